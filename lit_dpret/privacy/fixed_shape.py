"""Physical batches filled up to one shape, whoever was drawn.

A compiler like XLA makes one program for each shape that it meets, so a batch of seven rows and one of eight
would be two programs, and texts of other lengths some more. Here every physical batch has the same number of
slots, every slot the same number of rows, and every text its maximal length. What is filled in changes nothing:
a slot without a unit is masked, and a row without data has a loss of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_dpret.errors import ConfigurationError, DataError


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
    def of(cls, data: Any, place_rows: Callable[[Any, Sequence[int], int], Any]) -> FixedShape:
        """The shape that a DataModule asks for.

        Raises:
            ConfigurationError: All rows of a unit are drawn, and nothing says how many these can be.
        """
        if data.rows_per_unit == "one":
            return cls(data.physical_batch_size, 1, place_rows)
        most = getattr(data, "max_rows_per_unit", None)
        if most is None:
            raise ConfigurationError(
                "datamodule.rows_per_unit=all with fixed shapes (trainer=tpu, or model.fixed_shapes=true) needs room "
                "for the rows of the largest unit: set datamodule.max_rows_per_unit, or datamodule.rows_per_unit=one."
            )
        return cls(data.physical_batch_size, most, place_rows)

    @property
    def rows(self) -> int:
        """Rows of every batch."""
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
