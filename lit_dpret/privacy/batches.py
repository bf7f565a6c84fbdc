"""Batches of units: what a draw becomes on its way to ``training_step``.

A *logical* batch is what one optimizer step sees. It falls into *physical* batches that fit the device; a logical batch
may be empty, and then it still takes its step.

A compiler like XLA makes one program for each shape, and in low precision another shape is another result: products of
matrices round otherwise, in rows that are in both batches too, by more than any allowance for rounding covers. With a
`FixedShape` every physical batch has the same number of slots, every slot the same number of rows, and every text its
maximal length. Padding changes nothing: a slot without a unit is masked, a row without data has a loss of zero, and a
gradient of it, which zero times infinity may make NaN, is charged to no unit (`UnitBatch.owners_of_rows`).

An accountant counts units: draws of a query, a user, an image. A data set that spreads the rows of a query over several
units multiplies that query's part in a step, so the names of rows are remembered with their units (`UnitOwners`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor

from lit_dpret.distributed.xla import is_lazy
from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.privacy.budget import NAMES, RowsPerUnit, require_choice
from lit_dpret.privacy.state_watch import checksums, same_values
from lit_dpret.privacy.user_generators import generators_now, kept_generators, seed_generators

_ROW = ("query_id", "passage_id", "image_id")


def _named(row: Any, fields: Iterable[str]) -> list[Any]:
    """Those values of ``row``, an object or a mapping; None for each that it lacks."""
    if isinstance(row, Mapping):
        return [row.get(name) for name in fields]
    return [getattr(row, name, None) for name in fields]


def names_its_unit(row: Any, unit: str) -> bool:
    """Whether ``row`` has all names by which rows of one ``unit`` are known."""
    return None not in _named(row, NAMES[unit])


def row_keys(rows: Iterable[Any], unit: str, *, or_row: bool) -> tuple[int, ...]:
    """The `row_key` of each row that has one."""
    return tuple(key for row in rows if (key := row_key(row, unit, or_row=or_row)) is not None)


def row_key(row: Any, unit: str, *, or_row: bool) -> int | None:
    """A number for what may stand in one unit alone; None where the row has no name.

    That is the name of the unit (``query_id`` under ``privacy.unit=query``). With ``or_row`` a row without it is known
    by its query and passage, or its image, so that at least the same row in two units is noticed.
    """
    names = _named(row, NAMES[unit])
    if None in names:
        if not or_row:
            return None
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


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class FixedShape:
    """The shape of every physical batch.

    Args:
        slots: Units that a batch has room for; ``datamodule.physical_batch_size``, and those that are spare.
        rows_of_a_slot: Rows that a unit has room for; 1 where one row of each unit is drawn, else
            ``datamodule.max_rows_per_unit``.
        place_rows: The module's function that puts features at some places among so many rows.
        ragged: Names of features whose sizes may follow from the rows (`PrivateModule.ragged_features`).
        spare: How many of the slots nobody ever fills.
    """

    slots: int
    rows_of_a_slot: int
    place_rows: Callable[[Any, Sequence[int], int], Any]
    ragged: Sequence[str] = ()
    spare: int = 0

    @classmethod
    def of(
        cls,
        data: Any,
        place_rows: Callable[[Any, Sequence[int], int], Any],
        *,
        spare: int = 0,
        ragged: Sequence[str] = (),
    ) -> FixedShape:
        """The shape that a DataModule asks for, with ``spare`` slots that nobody ever fills.

        Raises:
            ConfigurationError: All rows of a unit are drawn, and nothing says how many these can be.
        """
        if data.rows_per_unit == "one":
            return cls(data.physical_batch_size + spare, 1, place_rows, ragged, spare)
        most = getattr(data, "max_rows_per_unit", None)
        if most is None:
            raise ConfigurationError(
                "datamodule.rows_per_unit=all with fixed shapes (trainer=tpu, model.fixed_shapes=true, or a "
                "trainer.precision below float32 under a guarantee) needs room for the rows of the largest unit: set "
                "datamodule.max_rows_per_unit, or datamodule.rows_per_unit=one."
            )
        return cls(data.physical_batch_size + spare, most, place_rows, ragged, spare)

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

    def filled(self, features: Any, slots: Sequence[int]) -> tuple[Any, Tensor]:
        """Return features as rows of this shape, given the slot of each, and which rows are data, ``(rows,)``."""
        places = self.places(slots)
        data_rows = torch.zeros(self.rows, dtype=torch.bool).index_fill_(0, torch.tensor(places), True)
        placed = self.place_rows(features, places, self.rows)
        return _filled_from_their_own(placed, data_rows, self.rows_of_a_slot), data_rows


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

    `UnitCollator` sees to it that no copy stays beside the rows of another unit.

    Example:
        >>> copied_rows(torch.tensor([[5], [7]]), [1, 2], 4).flatten().tolist()
        [5, 5, 7, 5]
    """
    if isinstance(features, dict):
        return {name: copied_rows(value, places, rows) for name, value in features.items()}
    # Copies of real features, because zeros may be no text that a model takes (a mask without a token).
    of = torch.zeros(rows, dtype=torch.long)
    of[list(places)] = torch.arange(len(features))
    return features[of]


def _filled_from_their_own(features: Any, data_rows: Tensor, rows_of_a_slot: int) -> Any:
    """Features of a fixed shape, a unit's free places filled with copies of its own first row.

    A module may fill up with a copy of another unit's row, as `copied_rows` does, and that row would have a say in this
    slot: without a finite gradient it would have the unit dropped. In a slot without rows there is nothing to drop.
    """
    place = torch.arange(len(data_rows))
    first = place - place % rows_of_a_slot  # rows stand at the beginning of their slot (`FixedShape.places`)
    of = torch.where(~data_rows & data_rows[first], first, place)
    return features if torch.equal(of, place) else take_rows(features, of)


PADDING = -1

#: Of how many units the rows are collated once more without company, in steps 0, 1, 2, 4, 8 and so on.
ALONE = 2


@dataclass(frozen=True)
class Draw:
    """One slot of a physical batch: which unit fills it, in which logical step.

    ``pick`` is a keyed random number that chooses a row where a unit has several and the mode
    takes one of them per step. ``seed`` is the keyed number by which the global generators are seeded while the rows of
    the unit are fetched and collated; it follows from attempt, step and unit, and from nobody else's rows. Both say
    nothing of the secret, and so may go to worker processes.
    """

    unit: int
    step: int
    part: int
    last: bool
    pick: int = 0
    attempt: int = 0
    seed: int = 0


class SeededDraws(list[Draw]):
    """The draws of a physical batch, in a loop over which the global generators are seeded for the draw at hand.

    A loader fetches ``[dataset[draw] for draw in draws]``, in a worker process or here: so what ``dataset[draw]`` draws
    from torch, ``random`` or numpy is the unit's own, whichever data set and loader it is. After the loop the
    generators are as before.
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
    """A physical batch, as ``training_step`` receives it.

    Attributes:
        rows: What the module's ``collate_rows`` made of the rows; None where no slot is real.
        unit_ids: The slot of each row's unit, shape ``(rows,)``.
        mask: Which slots hold a real unit, shape ``(units,)``.
        step: The logical step, counted from 0.
        part: The physical batch within the step, over all ranks: rank r has r, r + world size, and so on.
        last: Whether this is the last physical batch of its step on this rank.
        attempt: The attempt whose coins drew it.
        data_rows: In a batch of fixed shape, which rows are data and no filling, shape ``(rows,)``; else None.
        alone: Of the first ``ALONE`` units that have rows, what ``collate_rows`` makes of them without the others, in
            a batch of fixed shape placed at their slots of an otherwise empty one; None where it is not compared.
        digests: Checksums of some values of each tensor as it was collated, by its path in ``rows``; empty where it is
            not compared.
        origin: For each slot of the whole batch, the unit that was drawn and the keys of the rows that came for it
            (`lit_dpret.privacy.batches.row_key`); empty where it is not known.
    """

    rows: Any
    unit_ids: Tensor
    mask: Tensor
    step: int
    part: int
    last: bool
    attempt: int = 0
    data_rows: Tensor | None = None
    alone: Any = None
    digests: Mapping[str, tuple[torch.dtype, int]] = field(default_factory=dict)
    origin: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def owners_of_rows(self) -> tuple[Tensor, Tensor]:
        """Whose gradient each row's is, ``(rows,)``, and which slots are real, for a clipping engine.

        Rows that fill the batch up stand in a slot of nobody, one more than ``mask`` has. Their loss is zero and their
        gradient may yet be NaN, zero times infinity; in a unit's slot that would drop the unit.
        """
        if self.data_rows is None:
            return self.unit_ids, self.mask
        # One slot more than there are units: it is never real, so an engine leaves its rows out.
        nobody = torch.full_like(self.unit_ids, len(self.mask))
        return torch.where(self.data_rows, self.unit_ids, nobody), torch.cat([self.mask, self.mask.new_zeros(1)])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> UnitBatch:
        """Move every tensor to ``device``; to an XLA device the rows alone, and who they are of stays."""

        def move(value: Any) -> Any:
            return value.to(device) if hasattr(value, "to") else value

        rows, alone = map_rows(move, self.rows), map_rows(move, self.alone)
        if is_lazy(torch.device(device)):  # read on the host, where reading costs nothing
            return replace(self, rows=rows)
        return replace(
            self,
            rows=rows,
            alone=alone,
            unit_ids=self.unit_ids.to(device),
            mask=self.mask.to(device),
            data_rows=None if self.data_rows is None else self.data_rows.to(device),
        )


def map_rows(function: Callable[[Any], Any], rows: Any) -> Any:
    """``function`` of every leaf of nested dicts; the dicts keep their types."""
    if isinstance(rows, dict):
        return type(rows)({key: map_rows(function, value) for key, value in rows.items()})
    return function(rows)


def take_rows(rows: Any, index: slice | Tensor) -> Any:
    """Some rows of a tensor, or of nested dicts of tensors whose first axis is the rows."""
    return map_rows(lambda tensor: tensor[index], rows)


def digests_of(rows: Any, path: str = "rows") -> dict[str, tuple[torch.dtype, int]]:
    """A type and a checksum of some thousand values of each tensor in nested dicts, by its path."""
    if isinstance(rows, dict):
        return {name: found for key in rows for name, found in digests_of(rows[key], f"{path}[{key!r}]").items()}
    if not isinstance(rows, Tensor):
        return {}
    flat = rows.detach().reshape(-1)
    return {path: (rows.dtype, checksums([flat[:: max(1, len(flat) // 4096)].contiguous()])[0])}


def rows_in_turn(count: int, at_once: int) -> Iterator[slice]:
    """Slices of at most ``at_once`` that cover ``count`` rows."""
    for first in range(0, count, at_once):
        yield slice(first, min(first + at_once, count))


def split_batch(batch: UnitBatch, *, units_at_once: int) -> Iterator[UnitBatch]:
    """A physical batch in smaller ones, no unit split between two; parts without a row are passed over.

    The rows of a batch stand in the order of their units, as `UnitCollator` puts them.
    """
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
            # It speaks of the first units of the whole batch.
            alone=None,
        )


def answer_of(item: Any) -> tuple[Draw, Sequence[Any]]:
    """Return the answer of a training data set for a draw, checked.

    Raises:
        DataError: It is no pair of the draw and the rows of its unit.
    """
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], Draw):
        return item
    raise DataError(
        f"The training data set gave a {type(item).__name__} where (draw, rows) was due: datamodule.train_dataloader "
        "must give the loader a map-style data set whose dataset[draw] is the draw itself and the rows of unit "
        "draw.unit, as lit_dpret.datamodules.UnitItems(units) is.",
        trap="T38",
    )


class UnitCollator:
    """Turn the drawn units into a ``UnitBatch``.

    Guarantees:
        - Where ``collate_rows`` draws from a global generator, or from one made of its seed, as other seeds show in
          the first batch and in steps 1, 2, 4 and so on, it is called for each unit by itself, under
          `Draw.seed`: another unit's rows change neither its coins nor its features, whatever is known of the seeds.
          Which rows are ``answers`` to each other, booleans ``(rows, rows)``, no coin may decide.
        - A resumed run draws the same, and the global generators are afterwards as before.
        - Under a guarantee, features in a fixed shape have the sizes that they had in every batch before; in the first
          batch and in steps 1, 2, 4 and so on also those that they have where some of its units are collated alone.

    Args:
        collate_rows: The module's function from rows to tensors.
        rows_per_unit: ``"one"`` takes one row of each unit, chosen by the keyed stream;
            ``"all"`` takes all of them, and the module averages inside the unit.
        unit: ``privacy.unit``, which says what the rows of one unit have in common.
        or_row: Whether one row, without such a name, may not come for two units either.
        shape: Fill every batch with rows up to this shape; None for as many as there are.
        apart: Whether units are kept apart where ``collate_rows`` draws. Without a guarantee to keep, all rows are
            collated at once, under the seed of the first of them.
    """

    def __init__(
        self,
        collate_rows: Callable[[list[Any]], Any],
        rows_per_unit: str = "one",
        *,
        unit: str = "query",
        or_row: bool = True,
        shape: FixedShape | None = None,
        apart: bool = True,
    ) -> None:
        require_choice("datamodule.rows_per_unit", rows_per_unit, get_args(RowsPerUnit))
        self._collate_rows = collate_rows
        self._one = rows_per_unit == "one"
        self._unit, self._or_row = unit, or_row
        self._shape = shape
        self._apart = apart
        self._draws = self._looked = self._looks = False
        self._sizes: dict[str, torch.Size] = {}

    def _collated(self, drawn: Sequence[tuple[Draw, list[Any]]]) -> Any:
        """Collate the rows of some units, at least one of each: at once, or each unit's alone where coins are drawn."""
        with kept_generators():
            if not self._draws:
                # Under the first unit's seed, which stands where units are not kept apart.
                seed_generators(drawn[0][0].seed)
                before = generators_now()
                together = [row for _, rows in drawn for row in rows]
                features = self._collate_rows(together)
                if not self._apart:
                    return features
                # From here on for good: who draws once may draw in any batch.
                self._draws = generators_now() != before or (
                    self._looks and not self._is_the_same(features, together, drawn[0][0].seed)
                )
                if not self._draws:
                    return features
            parts = []
            for draw, rows in drawn:
                seed_generators(draw.seed)
                parts.append(self._collate_rows(rows))
            answers = self._answers_of_all(parts, drawn)
        joined = _units_joined([_without(part, answers) for part in parts], [len(rows) for _, rows in drawn])
        return {**joined, **answers} if answers else joined

    def _answers_of_all(self, parts: Sequence[Any], drawn: Sequence[tuple[Draw, list[Any]]]) -> dict[str, Tensor]:
        """Return ``answers`` of all rows, booleans ``(rows, rows)``: a unit by itself knows of its own columns alone.

        Raises:
            UnsupportedModelError: They are drawn at random, so that rows would take coins from each other.
        """
        if len(parts) < 2 or not all(_is_square(part, len(rows)) for part, (_, rows) in zip(parts, drawn, strict=True)):
            return {}
        together, seed = [row for _, rows in drawn for row in rows], drawn[0][0].seed
        found = []
        # Any constant does: a second seed that differs, and is the same in a repeated step.
        for each in (seed, seed ^ 0x5DEECE66D) if self._looks else (seed,):
            seed_generators(each)
            found.append(self._collate_rows(together)["answers"])
        if not _equal(found[0], found[-1]):
            raise UnsupportedModelError(
                "collate_rows draws at random which passages are right answers (answers), where rows would take coins "
                "from each other. Make answers from the ids of passages alone (lit_dpret.losses.false_negatives).",
                trap="T11",
            )
        return {"answers": found[0]}

    def _is_looked_at(self, step: int) -> bool:
        first, self._looked = not self._looked, True  # each worker process has a collator of its own
        return first or step & (step - 1) == 0

    def _is_the_same(self, features: Any, rows: list[Any], seed: int) -> bool:
        """Whether other seeds give the same: coins of a generator made from the seed leave the global ones alone."""
        seed_generators(seed ^ 0x5DEECE66D)
        return _equal(features, self._collate_rows(rows))

    def _collated_alone(self, drawn: Sequence[tuple[Draw, list[Any]]]) -> Any:
        """Return what ``collate_rows`` makes of the rows of some units alone; None where it draws at random."""
        if self._draws:
            return None
        # Twice: what differs from itself draws coins, and its features alone would prove nothing.
        found, again = self._collated(drawn), self._collated(drawn)
        return found if not self._draws and _equal(found, again) else None

    def _placed(self, shape: FixedShape, features: Any, slots: Sequence[int]) -> tuple[Any, Tensor]:
        with kept_generators():
            before = generators_now()
            placed = shape.filled(features, slots)
            if self._apart and generators_now() != before:
                raise ConfigurationError(
                    "place_rows draws random numbers, which the rows of a batch would take from each other: draw in "
                    "collate_rows or in dataset[draw], where each unit has coins of its own.",
                    trap="T11",
                )
        if self._apart and shape.slots - shape.spare > 1:  # of a unit by itself, sizes are nobody else's
            self._refuse_other_sizes(shape, placed[0])
        return placed

    def _refuse_other_sizes(self, shape: FixedShape, features: Any) -> None:
        sizes = {name: value.shape for name, value in _named_leaves(features, shape.ragged) if hasattr(value, "shape")}
        self._sizes = self._sizes or sizes
        for name in sorted(sizes.keys() | self._sizes.keys()):
            if sizes.get(name) != (known := self._sizes.get(name)):
                raise UnsupportedModelError(
                    f"{name} has the shape {_shown(sizes.get(name))} in one batch and {_shown(known)} in another one, "
                    "or in one with fewer units, after place_rows put it into a fixed shape. In low precision what a "
                    "row gives depends on how far it is filled up, so one unit would change what others give. Fill "
                    "texts up to one length in place_rows (or collate_rows), whatever is in the batch, or set "
                    "trainer.precision=32-true and model.fixed_shapes=false. A list of numbers that nothing is "
                    "computed from but a mask may be named in ragged_features of the module.",
                    trap="T39",
                )

    def __call__(self, items: list[tuple[Draw, Sequence[Any]]]) -> UnitBatch:
        slots: list[int] = []
        drawn: list[tuple[Draw, list[Any]]] = []
        items = [answer_of(item) for item in items]
        for slot, (draw, unit_rows) in enumerate(items):
            # `pick` has 62 bits, so the remainder favours no row by more than 2^-30.
            if chosen := [unit_rows[draw.pick % len(unit_rows)]] if self._one and unit_rows else list(unit_rows):
                drawn.append((draw, chosen))
                slots.extend([slot] * len(chosen))
        first = items[0][0]
        # Of all its rows, not of the one that was taken: the others must be its own as well.
        origin = tuple((draw.unit, row_keys(unit_rows, self._unit, or_row=self._or_row)) for draw, unit_rows in items)
        real = [draw.unit != PADDING for draw, _ in items]
        self._looks = bool(drawn) and self._is_looked_at(first.step)
        features = self._collated(drawn) if drawn else None
        compares = self._looks and (self._shape is None or self._apart)
        alone = self._collated_alone(drawn[:ALONE]) if compares else None
        data_rows = None if self._shape is None else torch.zeros(0, dtype=torch.bool)
        if self._shape is not None and drawn:
            shape = self._shape
            features, data_rows = self._placed(shape, features, slots)
            if alone is not None:
                alone, _ = self._placed(shape, alone, slots[: sum(len(rows) for _, rows in drawn[:ALONE])])
                self._placed(shape, self._collated(drawn[-1:]), slots[-len(drawn[-1][1]) :])  # for its sizes
            # From here on each row has the slot that its place is in, whether or not it is data.
            slots = [slot for slot in range(shape.slots) for _ in range(shape.rows_of_a_slot)]
            real += [False] * (shape.slots - len(real))
        return UnitBatch(
            rows=features,
            unit_ids=torch.tensor(slots, dtype=torch.long),
            mask=torch.tensor(real, dtype=torch.bool),
            data_rows=data_rows,
            step=first.step,
            part=first.part,
            last=first.last,
            attempt=first.attempt,
            alone=alone,
            digests=digests_of(features),
            origin=origin,
        )


def _units_joined(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """Put the features of units, each collated by itself, under each other.

    Raises:
        ConfigurationError: They do not fit.
    """
    try:
        if any(len(leaf) != count for part, count in zip(parts, counts, strict=True) for leaf in _leaves(part)):
            raise TypeError("a tensor's first axis is not the rows")
        return _joined(list(parts))
    except (TypeError, KeyError, RuntimeError) as error:
        raise ConfigurationError(
            "collate_rows draws random numbers, so it is called for each unit by itself, with coins that are no other "
            f"unit's, and what it gave for several units does not fit together ({error}). Give tensors whose first "
            "axis is the rows and whose other axes are as long for every unit (fill texts up to one length), or "
            "draw in dataset[draw], which has coins of its own for every unit too, or from torch in per_row_loss.",
            trap="T11",
        ) from error


def _is_square(part: Any, rows: int) -> bool:
    answers = part.get("answers") if isinstance(part, dict) else None
    return isinstance(answers, Tensor) and answers.dtype == torch.bool and answers.shape == (rows, rows)


def _without(features: Any, names: Mapping[str, Tensor]) -> Any:
    return {name: value for name, value in features.items() if name not in names} if names else features


def _named_leaves(rows: Any, apart: Sequence[str] = (), path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts with their paths, without those whose outermost name is in ``apart``."""
    for name, value in rows.items() if isinstance(rows, dict) else ():
        if name not in apart:
            yield from _named_leaves(value, (), f"{path}.{name}" if path else str(name))
    if not isinstance(rows, dict):
        yield path or "features", rows


def _shown(size: torch.Size | None) -> str:
    return "no shape" if size is None else str(tuple(size))


def _leaves(rows: Any) -> list[Any]:
    return [leaf for value in rows.values() for leaf in _leaves(value)] if isinstance(rows, dict) else [rows]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return same_values(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else True
