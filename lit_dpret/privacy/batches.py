"""Batches of units: the form of a draw on its way to ``training_step``.

A *logical* batch is what one optimizer step sees; it is split into *physical* batches that fit the device. A
`FixedShape` gives every physical batch the same slots, rows and lengths: one program for XLA, and in low precision
another shape would give another result. `UnitOwners` remembers which unit each named row belongs to, since an
accountant counts units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lit_dpret.distributed.xla import is_lazy
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.budget import NAMES
from lit_dpret.privacy.state_watch import checksums
from lit_dpret.privacy.user_generators import kept_generators, seed_generators

_ROW = ("query_id", "passage_id", "image_id")


def _named(row: Any, fields: Iterable[str]) -> list[Any]:
    """Return those fields of ``row``, an object or a mapping; None for each that it lacks."""
    if isinstance(row, Mapping):
        return [row.get(name) for name in fields]
    return [getattr(row, name, None) for name in fields]


def names_its_unit(row: Any, unit: str) -> bool:
    """Return whether ``row`` has all the keys that identify a ``unit``."""
    return None not in _named(row, NAMES[unit])


def row_keys(rows: Iterable[Any], unit: str, *, or_row: bool) -> tuple[int, ...]:
    """Return the `row_key` of each row that has one."""
    return tuple(key for row in rows if (key := row_key(row, unit, or_row=or_row)) is not None)


def row_key(row: Any, unit: str, *, or_row: bool) -> int | None:
    """Return a number for the keys of a row that may occur in one unit only; None if the row has no key."""
    names = _named(row, NAMES[unit])
    if None in names:
        if not or_row:
            return None
        names = _named(row, _ROW)
        if names[0] is None and names[2] is None:
            return None
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "little")


class UnitOwners:
    """Record in which unit each query, user, image or row appeared; refuse one that appears in two units.

    A data set is asked for a unit by its number. Nothing keeps it from counting rows as units or from returning another
    unit; then one query or user takes part more often than the law says. Rows without a name are not checked.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._unit_of: dict[int, int] = {}

    def note(self, unit: int, keys: Iterable[int]) -> None:
        """Record the owner of these rows, by their `row_key`; refuse a row that came for another unit before."""
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


@dataclass(frozen=True)
class FixedShape:
    """The shape of every physical batch."""

    slots: int  # units that a batch has room for: ``datamodule.physical_batch_size`` plus ``spare``
    # Rows that a unit has room for; 1 where one row of each unit is drawn, else ``datamodule.max_rows_per_unit``.
    rows_of_a_slot: int
    # The module's function that puts features at given positions among a given number of rows.
    place_rows: Callable[[Any, Sequence[int], int], Any]
    # Names of features whose sizes may follow from the rows (`PrivateModule.ragged_features`).
    ragged: Sequence[str] = ()
    spare: int = 0  # the number of slots that stay empty

    @classmethod
    def of(
        cls,
        data: Any,
        place_rows: Callable[[Any, Sequence[int], int], Any],
        *,
        spare: int = 0,
        ragged: Sequence[str] = (),
    ) -> FixedShape:
        """Return the shape that a DataModule asks for, with ``spare`` slots that stay empty."""
        if data.rows_per_unit == "one":
            return cls(data.physical_batch_size + spare, 1, place_rows, ragged, spare)
        most = getattr(data, "max_rows_per_unit", None)
        if most is None:
            bounded = hasattr(data, "max_rows_per_unit")
            way = "datamodule.max_rows_per_unit" if bounded else "trainer.precision=32-true without fixed shapes"
            raise ConfigurationError(
                "datamodule.rows_per_unit=all with fixed shapes (trainer=tpu, model.fixed_shapes=true, or a "
                "trainer.precision below float32 under a guarantee) needs room for the rows of the largest unit: set "
                f"{way}, or datamodule.rows_per_unit=one."
            )
        return cls(data.physical_batch_size + spare, most, place_rows, ragged, spare)

    @property
    def rows(self) -> int:
        return self.slots * self.rows_of_a_slot

    def places(self, slots: Sequence[int]) -> list[int]:
        """Return the position of each row within the shape, given each row's slot, in order."""
        found: list[int] = []
        filled = [0] * self.slots
        for slot in slots:
            if slot >= self.slots or filled[slot] >= self.rows_of_a_slot:
                raise DataError(
                    f"A physical batch does not fit {self.slots} units of {self.rows_of_a_slot} rows each, the fixed "
                    "shape by datamodule.physical_batch_size and datamodule.max_rows_per_unit. Raise the latter, or "
                    "return fewer rows of a unit (one under datamodule.rows_per_unit=one)."
                )
            found.append(slot * self.rows_of_a_slot + filled[slot])
            filled[slot] += 1
        return found

    def filled(self, features: Any, slots: Sequence[int]) -> tuple[Any, Tensor]:
        """Return features as rows of this shape, given each row's slot, and a mask ``(rows,)`` of real rows."""
        places = self.places(slots)
        data_rows = torch.zeros(self.rows, dtype=torch.bool).index_fill_(0, torch.tensor(places), True)
        placed = self.place_rows(features, places, self.rows)
        return _filled_from_their_own(placed, data_rows, self.rows_of_a_slot), data_rows


def copied_rows(features: Any, places: Sequence[int], rows: int) -> Any:
    """Return features, a tensor or nested dicts, at ``places`` among ``rows`` rows; other rows are copies of the first.

    `UnitCollator` ensures that no copy stays next to the rows of another unit.
    """
    if isinstance(features, dict):
        return {name: copied_rows(value, places, rows) for name, value in features.items()}
    # Copies of real features, because zeros may not be a text that a model accepts (a mask without a token).
    of = torch.zeros(rows, dtype=torch.long)
    of[list(places)] = torch.arange(len(features))
    return features[of]


def _filled_from_their_own(features: Any, data_rows: Tensor, rows_of_a_slot: int) -> Any:
    """Return features of a fixed shape with a unit's free rows replaced by copies of its own first row.

    A module may pad with a copy of another unit's row, as `copied_rows` does. That row would then affect this slot: if
    its gradient is not finite, the unit would be dropped. A slot without rows has no unit to drop.
    """
    place = torch.arange(len(data_rows))
    first = place - place % rows_of_a_slot  # rows come first in their slot (`FixedShape.places`)
    of = torch.where(~data_rows & data_rows[first], first, place)
    return features if torch.equal(of, place) else take_rows(features, of)


PADDING = -1

#: The number of units whose rows are collated again without the others, in steps 0, 1, 2, 4, 8 and so on.
ALONE = 2


@dataclass(frozen=True)
class Draw:
    """One slot of a physical batch: the unit that fills it, and the logical step.

    The keyed number ``pick`` chooses a row where a unit has several and the mode takes one. ``seed`` seeds the global
    generators while the unit's rows are fetched and collated; it depends on attempt, step and unit. Neither reveals
    anything about the secret, so both may go to worker processes.
    """

    unit: int
    step: int
    part: int
    last: bool
    pick: int = 0
    attempt: int = 0
    seed: int = 0


class SeededDraws(list[Draw]):
    """Iterate over the draws of a physical batch, seeding the global generators for each draw.

    A loader fetches ``[dataset[draw] for draw in draws]``, so each ``dataset[draw]`` gets the unit's own numbers from
    torch, ``random`` and numpy. After the loop the generators are as before.
    """

    def __iter__(self) -> Iterator[Draw]:
        with kept_generators():
            for draw in super().__iter__():
                seed_generators(draw.seed)
                yield draw

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDraws, (tuple(super().__iter__()),)  # pickled by a thread, which must leave the generators alone


@dataclass
class UnitBatch:
    """A physical batch, the argument of ``training_step``."""

    rows: Any  # what the module's ``collate_rows`` returned for the rows; None where no slot is real
    unit_ids: Tensor  # the slot of each row's unit, shape ``(rows,)``
    mask: Tensor  # which slots hold a real unit, shape ``(units,)``
    step: int  # the logical step, counted from 0
    part: int  # the physical batch within the step, over all ranks: rank r has r, r + world size, and so on
    last: bool  # whether this is the last physical batch of its step on this rank
    attempt: int = 0  # the attempt whose coins drew the batch
    # In a batch of fixed shape, which rows are data and not padding, shape ``(rows,)``; else None.
    data_rows: Tensor | None = None
    # For the first ``ALONE`` units that have rows, what ``collate_rows`` returns for them without the others. In a
    # batch of fixed shape they are placed at their slots of an otherwise empty batch. None where it is not compared.
    alone: Any = None
    # The slot of a unit, and what ``collate_rows`` returns for its rows alone: the smallest of some units, in which
    # padding to another unit's length shows most. None where it is not compared, or where the shape is fixed.
    smallest: tuple[int, Any] | None = None
    # Checksums of some values of each tensor as it was collated, by its path in ``rows``; empty where not compared.
    digests: Mapping[str, tuple[torch.dtype, int]] = field(default_factory=dict)
    # For each slot of the whole batch, the unit that was drawn and the keys of the rows that came for it
    # (`lit_dpret.privacy.batches.row_key`); empty where unknown.
    origin: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # For a few draws, what a worker process of the loader got for them (`lit_dpret.privacy.content.content_of`); empty
    # where not compared.
    contents: Mapping[Draw, bytes] = field(default_factory=dict)

    def owners_of_rows(self) -> tuple[Tensor, Tensor]:
        """Return the unit slot of each row, ``(rows,)``, and which slots are real, for a clipping engine.

        Rows that pad the batch get an extra slot, one more than ``mask`` has. Their loss is zero, but their gradient
        may still be NaN (zero times infinity); in a unit's slot that would drop the unit.
        """
        if self.data_rows is None:
            return self.unit_ids, self.mask
        # The extra slot is never real, so an engine leaves its rows out.
        nobody = torch.full_like(self.unit_ids, len(self.mask))
        return torch.where(self.data_rows, self.unit_ids, nobody), torch.cat([self.mask, self.mask.new_zeros(1)])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> UnitBatch:
        """Move every tensor to ``device``; for an XLA device only the rows, not their owners."""

        def move(value: Any) -> Any:
            return value.to(device) if hasattr(value, "to") else value

        rows, alone = map_rows(move, self.rows), map_rows(move, self.alone)
        if is_lazy(torch.device(device)):  # the owners are read on the host, where reading costs nothing
            return replace(self, rows=rows)
        return replace(
            self,
            rows=rows,
            alone=alone,
            smallest=None if self.smallest is None else (self.smallest[0], map_rows(move, self.smallest[1])),
            unit_ids=self.unit_ids.to(device),
            mask=self.mask.to(device),
            data_rows=None if self.data_rows is None else self.data_rows.to(device),
        )


def map_rows(function: Callable[[Any], Any], rows: Any) -> Any:
    """Apply ``function`` to every leaf of nested dicts; the dicts keep their types."""
    if isinstance(rows, dict):
        return type(rows)({key: map_rows(function, value) for key, value in rows.items()})
    return function(rows)


def clone_rows(rows: Any) -> Any:
    """Return nested dicts with a copy of every tensor."""
    return map_rows(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, rows)


def with_own_memory(rows: Any) -> Any:
    """Return nested dicts in which no row shares memory with another, so that a loss may write into each.

    An expanded tensor has one memory for all rows, and two tensors may be views of one memory.
    """
    met = set[int]()

    def own(leaf: Any) -> Any:
        if type(leaf) is not Tensor or leaf.layout != torch.strided or leaf.is_nested or not leaf.numel():
            return leaf
        place = leaf.untyped_storage().data_ptr()
        shared = place in met or torch._debug_has_internal_overlap(leaf) != 0
        met.add(place)
        return leaf.clone() if shared else leaf

    return map_rows(own, rows)


def take_rows(rows: Any, index: slice | Tensor) -> Any:
    """Select rows of a tensor, or of nested dicts of tensors whose first axis is the rows."""
    return map_rows(lambda tensor: tensor[index], rows)


def digests_of(rows: Any, path: str = "rows") -> dict[str, tuple[torch.dtype, int]]:
    """Return, by path, the dtype and a checksum of a few thousand values of each tensor in nested dicts."""
    if isinstance(rows, dict):
        return {name: found for key in rows for name, found in digests_of(rows[key], f"{path}[{key!r}]").items()}
    if not isinstance(rows, Tensor):
        return {}
    flat = rows.detach().reshape(-1)
    return {path: (rows.dtype, checksums([flat[:: max(1, len(flat) // 4096)].contiguous()])[0])}


def rows_in_turn(count: int, at_once: int) -> Iterator[slice]:
    """Yield slices of at most ``at_once`` rows that cover ``count`` rows."""
    for first in range(0, count, at_once):
        yield slice(first, min(first + at_once, count))


def split_batch(batch: UnitBatch, *, units_at_once: int) -> Iterator[UnitBatch]:
    """Split a physical batch into smaller ones, without splitting a unit; parts without rows are skipped."""
    for slots in rows_in_turn(len(batch.mask), units_at_once):
        inside = ((batch.unit_ids >= slots.start) & (batch.unit_ids < slots.stop)).nonzero().flatten()
        if not len(inside):
            continue
        rows = slice(int(inside[0]), int(inside[-1]) + 1)
        yield replace(
            batch,
            rows=take_rows(batch.rows, rows),
            unit_ids=batch.unit_ids[rows] - slots.start,
            mask=batch.mask[slots],
            data_rows=None if batch.data_rows is None else batch.data_rows[rows],
            # These refer to units of the whole batch.
            alone=None,
            smallest=None,
        )


def answer_of(item: Any) -> tuple[Draw, Sequence[Any]]:
    """Return a training data set's answer to a draw, after checking its form."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], Draw):
        return item
    raise DataError(
        f"The training data set returned a {type(item).__name__} instead of (draw, rows): datamodule.train_dataloader "
        "must give the loader a map-style data set whose dataset[draw] is the draw itself and the rows of unit "
        "draw.unit, such as lit_dpret.datamodules.UnitItems(units).",
        trap="T38",
    )
