"""The rows of each unit in a physical batch, and iteration over units.

In a batch of *fixed shape* every slot has the same number of rows, whether a unit fills it or not. No size of a tensor
and no branch depends on which units were drawn, so XLA compiles one program. In other batches empty slots are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dpret.errors import DataError


@dataclass(frozen=True)
class RowGroup:
    """Units with equal numbers of rows."""

    units: Tensor  # their slots, ``(n,)``
    rows: Tensor  # their rows, ``(n, rows of each)``
    start: int | None  # the first row if ``rows`` is consecutive, so that a slice will do
    first: int | None  # the first slot if ``units`` is consecutive

    @classmethod
    def build(cls, units: list[int], rows: list[list[int]], device: torch.device) -> RowGroup:
        flat = [row for each in rows for row in each]
        # A slice is a view, and indexing would copy the rows.
        start, first = _without_gap(flat), _without_gap(units)
        return cls(torch.tensor(units, device=device), torch.tensor(rows, device=device), start, first)

    def split(self, size: int) -> Iterator[RowGroup]:
        """Split the group into parts of at most ``size`` units."""
        if size >= len(self.units):
            yield self
            return
        each = self.rows.shape[1]
        for skipped in range(0, len(self.units), size):
            part = slice(skipped, skipped + size)
            start = None if self.start is None else self.start + skipped * each
            first = None if self.first is None else self.first + skipped
            yield RowGroup(self.units[part], self.rows[part], start, first)

    def join(self, tensor: Tensor) -> Tensor:
        """Reshape (rows, positions, ...) of the whole batch to (n, positions of all rows of a unit, ...)."""
        n, each = self.rows.shape
        if self.start is not None:
            part = tensor[self.start : self.start + n * each]
        else:
            part = tensor.index_select(0, self.rows.flatten())
        return part.reshape(n, each * tensor.shape[1], *tensor.shape[2:])

    def of(self, slots: Tensor) -> Tensor:
        """Return the values of the group's units, ``(n,)``, from values per slot; a view if possible."""
        return slots[self.units] if self.first is None else slots[self.first : self.first + len(self.units)]

    def add_to(self, slots: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """Add ``scale`` times ``values``, ``(n,)``, to those of the group's units in ``slots``, in place."""
        if self.first is None:
            slots.index_add_(0, self.units, values.to(slots.dtype), alpha=scale)
        else:
            self.of(slots).add_(values, alpha=scale)

    def add_squares_to(self, slots: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """Add ``scale`` times the squares of ``values`` in the same way."""
        if self.first is None:
            self.add_to(slots, values.square(), scale)
        else:
            self.of(slots).addcmul_(values, values, value=scale)


@dataclass(frozen=True)
class UnitRows:
    """The unit of each row in a physical batch."""

    unit_of_row: Tensor  # slot of each row's unit, ``(rows,)``
    real: Tensor  # which slots hold a unit, ``(units,)``; the rest contribute exactly zero
    groups: tuple[RowGroup, ...]  # the real units, grouped by their number of rows; in a batch of fixed shape all slots
    has_rows: bool  # whether any real unit has a row
    one_unit: bool  # whether all rows belong to one unit, so that no row can be charged to the wrong one
    fixed: bool = False  # whether the batch has a fixed shape

    @classmethod
    def build(
        cls, unit_ids: Tensor, mask: Tensor, *, device: torch.device | None = None, fixed: bool = False
    ) -> UnitRows:
        """Group the rows."""
        if unit_ids.dim() != 1 or mask.dim() != 1 or mask.dtype != torch.bool:
            raise DataError(
                f"unit_ids {tuple(unit_ids.shape)} and mask {tuple(mask.shape)} ({mask.dtype}) must be "
                "one slot number per row and one boolean per slot."
            )
        # On the host: a few numbers, on which the shapes of everything else depend.
        slots = unit_ids.tolist()
        real = mask.tolist()
        if slots and (min(slots) < 0 or max(slots) >= len(real)):
            raise DataError(f"unit_ids run from {min(slots)} to {max(slots)}, but the mask has {len(real)} slots.")
        device = mask.device if device is None else device
        of_unit = [row for row, slot in enumerate(slots) if real[slot]]
        facts = {"has_rows": bool(of_unit), "one_unit": len(set(slots)) == 1, "fixed": fixed}
        if fixed:
            whole = (_every_slot(slots, len(real), device),)
            return cls(unit_ids.long().to(device), mask.to(device), whole, **facts)
        rows_of: dict[int, list[int]] = {}
        for row in of_unit:
            rows_of.setdefault(slots[row], []).append(row)
        by_count: dict[int, list[int]] = {}
        # Sorted, so that sums are formed in one order whatever the order of the rows.
        for slot in sorted(rows_of):
            by_count.setdefault(len(rows_of[slot]), []).append(slot)
        groups = tuple(
            RowGroup.build(units, [rows_of[unit] for unit in units], device) for _, units in sorted(by_count.items())
        )
        return cls(unit_ids.to(device).long(), mask.to(device), groups, **facts)

    @property
    def rows(self) -> int:
        return int(self.unit_of_row.numel())

    @property
    def units(self) -> int:
        """The number of slots in the physical batch, masked ones included."""
        return int(self.real.numel())

    def row_is_real(self) -> Tensor:
        """Return which rows belong to a real unit, ``(rows,)``."""
        return self.real[self.unit_of_row]

    def only(self, units: Tensor) -> UnitRows:
        """Return the same rows with every slot masked except ``units``, ``(units,)`` booleans."""
        return UnitRows.build(self.unit_of_row, self.real & units)


def _without_gap(numbers: list[int]) -> int | None:
    """Return the first of consecutive numbers; None if they are not consecutive."""
    return numbers[0] if numbers == list(range(numbers[0], numbers[0] + len(numbers))) else None


def _every_slot(slots: list[int], units: int, device: torch.device) -> RowGroup:
    each = len(slots) // units if units else 0
    if not each or slots != [slot for slot in range(units) for _ in range(each)]:
        raise DataError(
            f"A batch of fixed shape must have equally many rows for each of its {units} slots, slot by slot; this one "
            f"has {len(slots)} rows in another number or order."
        )
    rows = [list(range(slot * each, (slot + 1) * each)) for slot in range(units)]
    return RowGroup.build(list(range(units)), rows, device)
