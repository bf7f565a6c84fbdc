"""Physical batches padded to one shape, whichever units were drawn.

A compiler like XLA makes one program for each shape that it meets, so a batch of seven rows and one of eight
would be two programs, and texts of other lengths some more. And in low precision another shape is another
result: products of matrices round otherwise, in rows that are in both batches too, by more than any allowance for
rounding covers. Here every physical batch has the same number of slots, every slot the same number of rows, and every
text its maximal length, and a unit that has no rows leaves its place empty. What is filled in changes nothing: a slot
without a unit is masked, and a row without data has a loss of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lit_dpret.errors import ConfigurationError, DataError

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class FixedShape:
    """The shape of every physical batch.

    Args:
        slots: Units that a batch has room for; ``datamodule.physical_batch_size``.
        rows_of_a_slot: Rows that a unit has room for; 1 where one row of each unit is drawn, else
            ``datamodule.max_rows_per_unit``.
        place_rows: The module's function that puts features at some places among so many rows.
    """

    slots: int
    rows_of_a_slot: int
    place_rows: Callable[[Any, Sequence[int], int], Any]

    @classmethod
    def of(cls, data: Any, place_rows: Callable[[Any, Sequence[int], int], Any], *, spare: int = 0) -> FixedShape:
        """The shape that a DataModule asks for, with ``spare`` slots that nobody ever fills.

        Raises:
            ConfigurationError: All rows of a unit are drawn, and nothing says how many these can be.
        """
        if data.rows_per_unit == "one":
            return cls(data.physical_batch_size + spare, 1, place_rows)
        most = getattr(data, "max_rows_per_unit", None)
        if most is None:
            raise ConfigurationError(
                "datamodule.rows_per_unit=all with fixed shapes (trainer=tpu, model.fixed_shapes=true, or a "
                "trainer.precision below float32 under a guarantee) needs room for the rows of the largest unit: set "
                "datamodule.max_rows_per_unit, or datamodule.rows_per_unit=one."
            )
        return cls(data.physical_batch_size + spare, most, place_rows)

    @property
    def rows(self) -> int:
        return self.slots * self.rows_of_a_slot

    def places(self, slots: Sequence[int]) -> list[int]:
        """The place of each row among those of the shape, given the slot of each, in order.

        Raises:
            DataError: There are more slots, or more rows of one, than the shape has room for.

        Example:
            >>> FixedShape(slots=3, rows_of_a_slot=2, place_rows=print).places([0, 2, 2])
            [0, 4, 5]
        """
        found: list[int] = []
        filled = [0] * self.slots
        for slot in slots:
            if slot >= self.slots or filled[slot] >= self.rows_of_a_slot:
                raise DataError(
                    f"A physical batch does not fit {self.slots} units of {self.rows_of_a_slot} rows each, the fixed "
                    "shape that datamodule.physical_batch_size and datamodule.max_rows_per_unit give."
                )
            found.append(slot * self.rows_of_a_slot + filled[slot])
            filled[slot] += 1
        return found


class RowsAlone:
    """Features of rows that are made one by one, for a module that says nothing of texts or their lengths.

    Args:
        collate_rows: The module's.
        name: Of the module, for messages.
    """

    def __init__(self, collate_rows: Collate, name: str) -> None:
        self._collate_rows, self._name = collate_rows, name

    def __call__(self, rows: list[Any]) -> Any:
        """The features of some rows.

        Raises:
            ConfigurationError: Rows have features of several shapes: filled up to the largest of a batch, a row's
                would depend on the others.
        """
        try:
            return _joined([self._collate_rows([row]) for row in rows])
        except RuntimeError as error:
            raise ConfigurationError(
                f"{self._name} makes features of several shapes, and in low precision what a row gives depends on how "
                "far it is filled up. Implement place_rows(features, places, rows), which fills all up to one shape, "
                "or set trainer.precision=32-true.",
                trap="T39",
            ) from error


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    return torch.cat(parts)


def copied_rows(features: Any, places: Sequence[int], rows: int) -> Any:
    """Features, a tensor or nested dicts of them, at ``places`` among so many rows; the others are copies of the first.

    Example:
        >>> copied_rows(torch.tensor([[5], [7]]), [1, 2], 4).flatten().tolist()
        [5, 5, 7, 5]
    """
    if isinstance(features, dict):
        return {name: copied_rows(value, places, rows) for name, value in features.items()}
    of = torch.zeros(rows, dtype=torch.long)
    of[list(places)] = torch.arange(len(features))
    return features[of]
