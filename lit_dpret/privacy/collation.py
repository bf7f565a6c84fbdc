"""Collate drawn units into a physical batch, with separate random draws for each unit.

A module's ``collate_rows`` may draw random numbers, and a batch may have a fixed shape whatever was drawn
(`lit_dpret.privacy.batches.FixedShape`). In either case no unit may change the features of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.privacy.batches import (
    ALONE,
    PADDING,
    Draw,
    FixedShape,
    UnitBatch,
    answer_of,
    digests_of,
    row_keys,
    with_own_memory,
)
from lit_dpret.privacy.budget import RowsPerUnit
from lit_dpret.privacy.content import readable_content
from lit_dpret.privacy.state_watch import same_values
from lit_dpret.privacy.user_generators import generators_now, kept_generators, seed_generators
from lit_dpret.settings import require_choice

Collate = Callable[[list[Any]], Any]
#: About this many units are searched for the smallest one.
_SIZED = 16


class RowsAlone:
    """Collate rows one by one, for a module without text lengths."""

    def __init__(self, collate_rows: Collate, name: str) -> None:
        self._collate_rows, self._name = collate_rows, name

    def __call__(self, rows: list[Any]) -> Any:
        try:
            return _joined([self._collate_rows([row]) for row in rows])
        except RuntimeError as error:
            raise ConfigurationError(
                f"{self._name} makes features of several shapes, and in low precision the result for a row depends on "
                "how far it is padded. Implement place_rows(features, places, rows), which pads all to one shape, or "
                "set trainer.precision=32-true.",
                trap="T39",
            ) from error


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    return torch.cat(parts)


class UnitCollator:
    """Turn the drawn units into a ``UnitBatch``.

    Guarantees:
        - ``collate_rows`` is called for each unit separately, under `Draw.seed`, if it draws from a global generator or
          from one created from its seed. The second kind shows under other seeds, in the first batch and in steps 1, 2,
          4 and so on. Then another unit's rows change neither the unit's coins nor its features, whatever is known of
          the seeds. No coin may decide which rows are ``answers`` to each other, booleans ``(rows, rows)``.
        - A resumed run draws the same numbers, and the global generators are afterwards as before.
        - Under a guarantee, features in a fixed shape have the same sizes as in every batch before. In the first batch
          and in steps 1, 2, 4 and so on, they also have the sizes they get where some of its units are collated alone.
        - Under a guarantee, ``answers`` of two rows are refused if they change where half of the units are collated
          separately: a unit would decide which negatives others have. This is checked in the first batch and in steps
          1, 2, 4 and so on, and with ``own`` code in every batch.

    Args:
        rows_per_unit: ``"one"`` takes one row of each unit, chosen by the keyed stream; ``"all"`` takes all of them,
            and the module averages within the unit.
        or_row: Whether a row without the unit's name may not come for two units either.
        apart: Whether units are kept apart where ``collate_rows`` draws. If there is no guarantee to keep, all rows are
            collated at once, under the seed of the first of them.
        own: Whether the user's code takes part, so that ``answers`` are compared in every batch.
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
        own: bool = False,
    ) -> None:
        require_choice("datamodule.rows_per_unit", rows_per_unit, get_args(RowsPerUnit))
        self._collate_rows = collate_rows
        self._one = rows_per_unit == "one"
        self._unit, self._or_row = unit, or_row
        self._shape = shape
        self._apart, self._own = apart, own
        self._draws = self._looked = self._looks = False
        self._sizes: dict[str, torch.Size] = {}

    def _collated(self, drawn: Sequence[tuple[Draw, list[Any]]]) -> Any:
        """Collate the rows of some units, at least one of each: at once, or unit by unit where coins are drawn."""
        with kept_generators():
            if not self._draws:
                # Under the first unit's seed, which is the final one where units are not kept apart.
                seed_generators(drawn[0][0].seed)
                before = generators_now()
                together = [row for _, rows in drawn for row in rows]
                features = self._collate_rows(together)
                if not self._apart:
                    return features
                # From here on permanently: code that draws once may draw in any batch.
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
        """Return ``answers`` of all rows, booleans ``(rows, rows)``; a unit alone knows only its own columns."""
        if len(parts) < 2 or not all(is_square(part, len(rows)) for part, (_, rows) in zip(parts, drawn, strict=True)):
            return {}
        together, seed = [row for _, rows in drawn for row in rows], drawn[0][0].seed
        found = []
        # Any constant works: a second seed that differs, and is the same in a repeated step.
        for each in (seed, seed ^ 0x5DEECE66D) if self._looks else (seed,):
            seed_generators(each)
            found.append(self._collate_rows(together)["answers"])
        if not _equal(found[0], found[-1]):
            raise UnsupportedModelError(
                "collate_rows draws at random which passages are right answers (answers), so rows would take random "
                "numbers from each other. Make answers from passage ids alone (lit_dpret.losses.false_negatives).",
                trap="T11",
            )
        return {"answers": found[0]}

    def _refuse_answers_of_others(self, features: Any, drawn: Sequence[tuple[Draw, list[Any]]]) -> None:
        """Refuse ``answers`` of two rows that depend on a third: the bound for a pair knows only two records."""
        rows, half = [len(rows) for _, rows in drawn], len(drawn) // 2
        if not half or not is_square(features, sum(rows)):
            return
        first, second = slice(sum(rows[:half])), slice(sum(rows[:half]), None)
        for part, where in ((drawn[:half], first), (drawn[half:], second)):
            if not _equal(self._collated(part)["answers"], features["answers"][where, where]):
                raise UnsupportedModelError(
                    "Which passages are right answers (answers of collate_rows, or of the views) depends on further "
                    "rows of the batch: one unit would affect the negatives of others, which no clipping bounds. "
                    "Decide about a row and a passage from these two alone, as lit_dpret.losses.false_negatives does, "
                    "with no threshold or rank over the batch.",
                    trap="T11",
                )

    def _is_looked_at(self, step: int) -> bool:
        first, self._looked = not self._looked, True  # each worker process has its own collator
        return first or step & (step - 1) == 0

    def _is_the_same(self, features: Any, rows: list[Any], seed: int) -> bool:
        """Return whether another seed gives the same: a generator made from the seed does not touch the global ones."""
        seed_generators(seed ^ 0x5DEECE66D)
        return _equal(features, self._collate_rows(rows))

    def _collated_alone(self, drawn: Sequence[tuple[Draw, list[Any]]]) -> Any:
        """Return what ``collate_rows`` gives for the rows of some units alone; None where it draws at random."""
        if self._draws:
            return None
        # Twice: features that differ between the two calls draw coins, and one result alone would prove nothing.
        found, again = self._collated(drawn), self._collated(drawn)
        return found if not self._draws and _equal(found, again) else None

    def _smallest(self, drawn: Sequence[tuple[Draw, list[Any]]], slots: Sequence[int]) -> tuple[int, Any] | None:
        """Return, among some units, the slot and features of the one whose rows alone give the smallest tensors."""
        some = range(0, len(drawn), max(1, len(drawn) // _SIZED))
        sizes = [sum(leaf.numel() for leaf in leaves(self._collated([drawn[each]])) if isinstance(leaf, Tensor))
                 for each in some]  # fmt: skip
        least = some[sizes.index(min(sizes))]
        alone = self._collated_alone([drawn[least]])
        return None if alone is None else (slots[least], alone)

    def _placed(self, shape: FixedShape, features: Any, slots: Sequence[int]) -> tuple[Any, Tensor]:
        with kept_generators():
            before = generators_now()
            placed = shape.filled(features, slots)
            if self._apart and generators_now() != before:
                raise ConfigurationError(
                    "place_rows draws random numbers, which the rows of a batch would share: draw in collate_rows or "
                    "in dataset[draw], where each unit has its own random draws.",
                    trap="T11",
                )
        if self._apart and shape.slots - shape.spare > 1:  # with one unit alone, sizes depend on no other unit
            self._refuse_other_sizes(shape, placed[0])
        return placed

    def _refuse_other_sizes(self, shape: FixedShape, features: Any) -> None:
        sizes = {name: value.shape for name, value in _named_leaves(features, shape.ragged) if hasattr(value, "shape")}
        self._sizes = self._sizes or sizes
        for name in sorted(sizes.keys() | self._sizes.keys()):
            if sizes.get(name) != (known := self._sizes.get(name)):
                raise UnsupportedModelError(
                    f"{name} has the shape {_shown(sizes.get(name))} in one batch and {_shown(known)} in another one, "
                    "or in one with fewer units, after place_rows put it into a fixed shape. In low precision the "
                    "result for a row depends on how far it is padded, so one unit would change the results of others. "
                    "Pad texts to one length in place_rows (or collate_rows), whatever is in the batch, or set "
                    "trainer.precision=32-true and model.fixed_shapes=false. A list of numbers from which only a mask "
                    "is computed may be named in ragged_features of the module.",
                    trap="T39",
                )

    def __call__(self, items: list[tuple[Draw, Sequence[Any]]]) -> UnitBatch:
        slots: list[int] = []
        with_rows: list[int] = []
        drawn: list[tuple[Draw, list[Any]]] = []
        items = [answer_of(item) for item in items]
        for slot, (draw, unit_rows) in enumerate(items):
            # `pick` has 62 bits, so the remainder favours no row by more than 2^-30.
            if chosen := [unit_rows[draw.pick % len(unit_rows)]] if self._one and unit_rows else list(unit_rows):
                drawn.append((draw, chosen))
                with_rows.append(slot)
                slots.extend([slot] * len(chosen))
        first = items[0][0]
        # Of all its rows, not only of the one that was taken: the others must belong to the unit as well.
        origin = tuple((draw.unit, row_keys(unit_rows, self._unit, or_row=self._or_row)) for draw, unit_rows in items)
        real = [draw.unit != PADDING for draw, _ in items]
        contents = {}
        self._looks = bool(drawn) and self._is_looked_at(first.step)
        if self._looks and get_worker_info() is not None:  # a worker has a copy of the data set
            contents = {draw: found for draw, rows in items[:ALONE] if (found := readable_content(rows)) is not None}
        features = self._collated(drawn) if drawn else None
        if self._apart and (self._own or self._looks):
            self._refuse_answers_of_others(features, drawn)
        compares = self._looks and (self._shape is None or self._apart)
        alone = self._collated_alone(drawn[:ALONE]) if compares else None
        sized = alone is not None and self._shape is None and len(drawn) > 1
        smallest = self._smallest(drawn, with_rows) if sized else None
        data_rows = None if self._shape is None else torch.zeros(0, dtype=torch.bool)
        if self._shape is not None and drawn:
            shape = self._shape
            features, data_rows = self._placed(shape, features, slots)
            if alone is not None:
                alone, _ = self._placed(shape, alone, slots[: sum(len(rows) for _, rows in drawn[:ALONE])])
                self._placed(shape, self._collated(drawn[-1:]), slots[-len(drawn[-1][1]) :])  # for its sizes
            # From here on each row's slot is given by its position, whether or not it is data.
            slots = [slot for slot in range(shape.slots) for _ in range(shape.rows_of_a_slot)]
            real += [False] * (shape.slots - len(real))
        features = with_own_memory(features)
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
            smallest=smallest,
            digests=digests_of(features),
            origin=origin,
            contents=contents,
        )


def _units_joined(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    try:
        if any(len(leaf) != count for part, count in zip(parts, counts, strict=True) for leaf in leaves(part)):
            raise TypeError("a tensor's first axis is not the rows")
        return _joined(list(parts))
    except (TypeError, KeyError, RuntimeError) as error:
        raise ConfigurationError(
            "collate_rows draws random numbers, so it is called for each unit by itself, with random numbers of that "
            f"unit alone, and its results for several units do not fit together ({error}). Return tensors whose first "
            "axis is the rows and whose other axes have one length for every unit (pad texts to one length), or "
            "draw in dataset[draw], which also has separate random numbers for every unit, or from torch in "
            "per_row_loss.",
            trap="T11",
        ) from error


def is_square(part: Any, rows: int) -> bool:
    """Return whether features hold ``answers``, booleans ``(rows, rows)``."""
    answers = part.get("answers") if isinstance(part, dict) else None
    return isinstance(answers, Tensor) and answers.dtype == torch.bool and answers.shape == (rows, rows)


def _without(features: Any, names: Mapping[str, Tensor]) -> Any:
    return {name: value for name, value in features.items() if name not in names} if names else features


def _named_leaves(rows: Any, apart: Sequence[str] = (), path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts with their paths, except those whose outermost name is in ``apart``."""
    for name, value in rows.items() if isinstance(rows, dict) else ():
        if name not in apart:
            yield from _named_leaves(value, (), f"{path}.{name}" if path else str(name))
    if not isinstance(rows, dict):
        yield path or "features", rows


def _shown(size: torch.Size | None) -> str:
    return "no shape" if size is None else str(tuple(size))


def leaves(rows: Any) -> list[Any]:
    """Return the leaves of nested dicts."""
    return [leaf for value in rows.values() for leaf in leaves(value)] if isinstance(rows, dict) else [rows]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return same_values(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else True
