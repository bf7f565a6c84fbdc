"""Which unit each training row belongs to, as far as the rows have names.

An accountant counts units: draws of a query, a user, an image. What a unit of a data set really holds is for the data
set to say, and one that spreads the rows of a query over several units multiplies that query's part in a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from lit_dpret.errors import DataError

#: What names the unit of a row, by ``privacy.unit``.
NAMES: Mapping[str, tuple[str, ...]] = {
    "query": ("query_id",),
    "pair": ("query_id", "passage_id"),
    "user": ("user_id",),
    "image": ("image_id",),
    "passage": ("passage_id",),
}
_ROW = ("query_id", "passage_id", "image_id")


def _named(row: Any, fields: Iterable[str]) -> list[Any]:
    """Those values of ``row``, an object or a mapping; None for each that it lacks."""
    if isinstance(row, Mapping):
        return [row.get(name) for name in fields]
    return [getattr(row, name, None) for name in fields]


def names_its_unit(row: Any, unit: str) -> bool:
    """Whether ``row`` has all names by which rows of one ``unit`` are known."""
    return None not in _named(row, NAMES[unit])


def row_keys(rows: Iterable[Any], unit: str) -> tuple[int, ...]:
    """The `row_key` of each row that has one."""
    return tuple(key for row in rows if (key := row_key(row, unit)) is not None)


def row_key(row: Any, unit: str) -> int | None:
    """A number for what may stand in one unit alone; None where the row has no name.

    That is the name of the unit (``query_id`` under ``privacy.unit=query``). A row without it is known by its query and
    passage, or its image, so that at least the same row in two units is noticed.
    """
    names = _named(row, NAMES[unit])
    if None in names:
        names = _named(row, _ROW)
        if names[0] is None and names[2] is None:
            return None
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "little")


class UnitOwners:
    """Remembers which unit each query, user, image or row came for.

    A data set is asked for a unit by its number. Nothing keeps it from counting rows as units where a query is one, or
    from answering with another unit: ``index % n``, a cache, a wrapper that repeats or mixes units. Then one query or
    one user takes part in a step more often than the law says.

    Guarantees:
        - A row or name that came for two units is refused, in whichever batches. Rows without a name are not seen.

    Args:
        unit: ``privacy.unit``.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._unit_of: dict[int, int] = {}

    def note(self, unit: int, keys: Iterable[int]) -> None:
        """Remember whose rows these are, by their `row_key`.

        Raises:
            DataError: One of them came for another unit before.
        """
        for key in keys:
            if (owner := self._unit_of.setdefault(key, unit)) != unit:
                raise DataError(
                    f"The training data set gave rows of the same {self.unit} (by {', '.join(NAMES[self.unit])}) for "
                    f"unit {owner} and for unit {unit}, so one {self.unit} takes part in a step more often than the "
                    "sampling law says, and epsilon would be false. dataset[draw] must give all rows of unit draw.unit "
                    f"and of no other (datamodule.train_dataloader): put all rows of one {self.unit} into one unit, do "
                    "not repeat, cache or mix units, or set privacy.unit to what a unit of these data is.",
                    trap="T38",
                )
