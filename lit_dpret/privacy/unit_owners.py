"""Which unit each training row belongs to, as far as the rows have names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from lit_dpret.errors import DataError


def row_key(row: Any) -> int | None:
    """A number for what names a row (its query and passage, or its image); None where it has no name."""
    names = [getattr(row, name, None) for name in ("query_id", "passage_id", "image_id")]
    if names[0] is None and names[2] is None:
        return None
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "little")


class UnitOwners:
    """Which unit each row belongs to, as far as it was seen.

    A data set is asked for a unit by its number, and nothing keeps it from answering with another one: ``index % n``,
    a cache, a wrapper that repeats or mixes units. Then one unit takes part in a step more often than the law says.

    Guarantees:
        - A row that came for two units is refused, whichever batches it came in. Rows without a name cannot be told.
    """

    def __init__(self) -> None:
        self._unit_of: dict[int, int] = {}

    def note(self, unit: int, keys: Iterable[int]) -> None:
        """Remember whose rows these are.

        Raises:
            DataError: One of them came for another unit before.
        """
        for key in keys:
            if (owner := self._unit_of.setdefault(key, unit)) != unit:
                raise DataError(
                    f"The training data set gave the same row for unit {owner} and for unit {unit}, so one unit takes "
                    "part in a step more often than the sampling law says, and epsilon would be false. dataset[draw] "
                    "must give the rows of unit draw.unit and of no other: build it by UnitItems, and do not repeat, "
                    "cache or mix units behind it (datamodule.train_dataloader).",
                    trap="T38",
                )
