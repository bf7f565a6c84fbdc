"""Units that are trained on and belong to nobody: canaries, put beside the data of a run.

The DataModule takes them as finished rows and knows nothing of secrets or coins, which are made in
`lit_dpret.audit.canaries`. They join as units, so that sampling, n, delta and the fingerprint of the data speak of
what is really trained on. A unit without rows is one that a coin left out: under ``zero_out`` that is what its
absence means, and n does not tell how the coins fell.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_dpret.datamodules.records import Duplicates, Row
from lit_dpret.errors import ConfigurationError, DataError


@dataclass(frozen=True)
class Planted:
    """What is planted.

    Args:
        units: The rows of each, of the kind that the data have: one, or none. A canary that stands k times in
            the data is k units.
        facts: What may be told of them, as JSON values: it goes into the ledger and onto the card.
    """

    units: Sequence[Sequence[Any]] = field(repr=False)
    facts: Mapping[str, Any]

    def check(self, before: Planted | None, *, duplicates: Duplicates, passages: Mapping[str, str]) -> None:
        """Refuse to be planted where a row would not be a unit of its own, or would contradict the data.

        Args:
            before: What is planted already.
            duplicates: What the data do about equal texts.
            passages: Those of the data, by id.

        Raises:
            ConfigurationError: Something is planted, or equal texts would become one unit.
            DataError: A planted passage has the id of a passage of the data, and another text.
        """
        if before is not None:
            raise ConfigurationError(
                "Something is planted in these data already. Plant everything at once, in data read anew."
            )
        if duplicates == "merge":
            raise ConfigurationError(
                "datamodule.duplicates=merge makes equal texts one unit, and each copy of a canary has to be one. Set "
                "datamodule.duplicates=keep."
            )
        for row in self._rows():
            if row.passage_id in passages and passages[row.passage_id] != row.passage:
                raise DataError(f"A planted row has another text for passage {row.passage_id!r} than the data.")

    def fingerprint(self, key: bytes) -> str:
        """HMAC-SHA256 of the units in their order, 64 hexadecimal digits."""
        digest = hmac.new(key, digestmod="sha256")
        for rows in self.units:
            digest.update(len(rows).to_bytes(8, "big"))
            for row in rows:
                for part in (row.query_id, row.query, row.passage_id, row.passage):
                    data = part.encode("utf-8", "surrogatepass")
                    digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def _rows(self) -> Iterator[Row]:
        return (row for rows in self.units for row in rows)
