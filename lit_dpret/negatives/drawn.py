"""Negatives without search: random public passages, and judged or labelled ones."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from lit_dpret.errors import ConfigurationError, DataError, in_words
from lit_dpret.negatives.base import PassageSource, Seat, Towers, TrainTexts, public_coins, uniform_places


class RandomNegatives(PassageSource):
    """Passages of the public list, drawn uniformly by (``seed``, step), the row's own record and public data alone."""

    name: ClassVar[str] = "random"

    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        draw = public_coins(self.seed, self.name, step, seat.text, self._texts.passage_ids[seat.own])
        return uniform_places(draw, self._texts.groups, self.per_query, answers=seat.answers)


@dataclass(kw_only=True, eq=False, repr=False)
class GoldNegatives(PassageSource):
    """Passages judged not to answer the row's own query: of grade 0 or less in the train qrels, or from a file.

    A file has one JSON object per line, in GPL's form ``{"qid": ..., "pos": [ids], "neg": {"<miner>": [ids]}}`` or
    that of msmarco-hard-negatives, whose entries are objects ``{"pid": id, ...}``. **Under a private mode this relies
    on an assumption** that the user has to declare: the line of a query was made from that query and public data
    alone, and not with a model trained on all queries.
    """

    name: ClassVar[str] = "gold"

    file: str | Path | None = None  # with hard negatives, ``.jsonl`` or ``.jsonl.gz``; null uses the qrels
    lines_are_independent: bool = False  # declares the assumption, which cannot be checked

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_declared = self.file is None or self.lines_are_independent

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        by_query: Mapping[str, Iterable[str]]
        if self.file is None:
            by_query = {
                query: [p for p, grade in judged.items() if grade <= 0] for query, judged in texts.judged.items()
            }
        else:
            by_query = read_hard_negatives(Path(self.file))
        self._judged = {
            texts.query_place[query]: sorted({texts.place[p] for p in names if p in texts.place})
            for query, names in by_query.items()
            if query in texts.query_place
        }
        if not any(self._judged.values()):
            where = "the train qrels hold no grade of 0 or less" if self.file is None else f"{self.file} holds none"
            raise DataError(
                f"model.negatives=gold: there is no judged negative for any train query in the public list; {where}. "
                "Name a file with model.negatives.gold.file, or choose another source."
            )

    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        groups = self._texts.groups
        places = [p for p in self._judged.get(seat.query, []) if int(groups[p]) not in seat.answers]
        return self.some_of(places, epoch, seat.text)


def read_hard_negatives(path: Path) -> dict[str, list[str]]:
    """Return negative passage ids by query id, merged over miners, from either form of the file."""
    if not path.is_file():
        raise ConfigurationError(f"model.negatives.gold.file={path} does not exist.")
    found: dict[str, list[str]] = {}
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    query, names = _entry(line, path, number)
                    found.setdefault(query, []).extend(names)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"model.negatives.gold.file={path} cannot be read: {in_words(error)}.") from error
    return found


def _entry(line: str, path: Path, number: int) -> tuple[str, list[str]]:
    try:
        entry: Any = json.loads(line)
        miners = entry["neg"].values()
        names = [item["pid"] if isinstance(item, Mapping) else item for items in miners for item in items]
        return str(entry["qid"]), [str(name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f'{path} line {number} is not of the form {{"qid": ..., "neg": {{"miner": [ids or {{"pid": id}}]}}}}.'
        ) from error


@dataclass(frozen=True, kw_only=True)
class LabelledNegative:
    """A query's own passage, another one, and the margin of relevance between them (logits)."""

    query_id: str
    passage_id: str
    negative_id: str
    margin: float

    def line(self) -> str:
        """Return the label as a line of the file."""
        return f"{self.query_id}\t{self.passage_id}\t{self.negative_id}\t{self.margin!r}\n"


_LARGEST = 3.4028234663852886e38  # of float32: a larger margin of one private record would stop the run at its step


def read_labels(path: str | Path) -> list[LabelledNegative]:
    """Read a file of labels in GPL's format: query id, passage id, negative id and margin, tab-separated."""
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
                f"{place} line {number}: query id, passage id, negative id and a finite margin are expected, "
                "separated by tabs."
            ) from None
        found.append(LabelledNegative(query_id=query, passage_id=passage, negative_id=negative, margin=margin))
    return found


@dataclass(kw_only=True, eq=False, repr=False)
class LabelledNegatives(PassageSource):
    """Passages with a cross-encoder's margin to a row's own passage, for `MarginMSELoss`.

    **Under a private mode this relies on an assumption** that the user has to declare: the labels of a query were
    made from that query and public data alone.
    """

    name: ClassVar[str] = "labelled"

    file: str | Path  # the ``gpl-training-data.tsv`` that ``task=pseudo_labels`` wrote
    lines_are_independent: bool = False  # declares the assumption, which cannot be checked
    shared_in_batch: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_declared = self.lines_are_independent

    def prepare(self, texts: TrainTexts, towers: Towers, *, private: bool) -> None:
        super().prepare(texts, towers, private=private)
        self._labels = defaultdict[tuple[int, int], dict[int, float]](dict)
        for label in read_labels(self.file):
            own, other = texts.place.get(label.passage_id), texts.place.get(label.negative_id)
            query = texts.query_place.get(label.query_id)
            if query is not None and own is not None and other is not None:
                self._labels[query, own][other] = label.margin
        if not self._labels:
            raise DataError(
                f"model.negatives.labelled.file={self.file} labels no train query with passages of the public list. "
                "Use the file made for this data set."
            )

    def choose(self, seat: Seat, *, step: int, epoch: int) -> list[int]:
        groups = self._texts.groups
        labelled = self._labels.get((seat.query, seat.own), {})
        places = sorted(place for place in labelled if int(groups[place]) not in seat.answers)
        return self.some_of(places, epoch, seat.text, self._texts.passage_ids[seat.own])

    def margins(self, seat: Seat, places: Sequence[int]) -> list[float]:
        """Return the label at each index for a row, in logits; NaN without a label."""
        labelled = self._labels.get((seat.query, seat.own), {})
        return [labelled.get(place, math.nan) for place in places]
