"""The file of labelled negatives: by how much a query's own passage is more relevant than another one.

It is GPL's ``gpl-training-data.tsv``: query id, passage id, negative id and margin between tabs, without a
header.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_dpret.errors import DataError


@dataclass(frozen=True, kw_only=True)
class LabelledNegative:
    """A query's own passage, another one, and by how much the first is more relevant (logits)."""

    query_id: str
    passage_id: str
    negative_id: str
    margin: float

    def line(self) -> str:
        """The label as the file has it."""
        return f"{self.query_id}\t{self.passage_id}\t{self.negative_id}\t{self.margin!r}\n"


_LARGEST = 3.4028234663852886e38  # of float32: beyond it one private record would stop the run in its own step


def read_labels(path: str | Path) -> list[LabelledNegative]:
    """Read a file of labels.

    Raises:
        DataError: It cannot be read, or a line is malformed; the message names the line.
    """
    place = Path(path)
    try:
        lines = place.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(
            f"model.negatives.labelled.file={place} cannot be read: {reason}. Name the gpl-training-data.tsv that "
            "task=pseudo_labels wrote."
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        fields = line.split("\t")
        try:
            query, passage, negative, margin = fields[0], fields[1], fields[2], float(fields[3])
            if len(fields) != 4 or not abs(margin) <= _LARGEST:
                raise ValueError
        except (ValueError, IndexError):
            raise DataError(
                f"{place} line {number}: query id, passage id, negative id and a finite margin are expected, between "
                "tabs."
            ) from None
        found.append(LabelledNegative(query_id=query, passage_id=passage, negative_id=negative, margin=margin))
    return found
