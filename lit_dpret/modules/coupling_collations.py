"""Compare the result of ``collate_rows`` for rows alone, before and after others, and at other positions of a batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lit_dpret.modules.coupling_passes import DEPENDS, FLOOR, Passes
from lit_dpret.modules.coupling_rows import Rows, cannot_train
from lit_dpret.modules.coupling_values import FixedCoins, differ
from lit_dpret.privacy.batches import ALONE, FixedShape, UnitBatch, copied_rows, take_rows
from lit_dpret.privacy.collation import leaves
from lit_dpret.privacy.ledger.trained import objects_in
from lit_dpret.privacy.state_watch import same_values
from lit_dpret.privacy.user_generators import own_generators, python_and_numpy_now, seed_everywhere

#: At most this many objects are searched for generators.
_OBJECTS = 50_000


class _Collated(NamedTuple):
    """The result of ``collate_rows`` for some rows, and the state in which it left the module's own generators.

    ``draws_beside_torch`` says whether it drew from the global generators of ``random`` and numpy.
    """

    features: Any
    own_generators: tuple[bytes | str, ...]
    draws_beside_torch: bool


class CollationPasses(Passes):
    """The passes that collate rows again, or place them apart."""

    def collated(self, rows: list[Any], before: list[Any]) -> _Collated:
        """Collate ``rows`` by a copy of the module, after collating the rows ``before``, if any."""
        module = _copy_without_weights(self.module)
        if module is self.module:
            self._kept_state.reset()
        seed_everywhere(self._seed)
        with FixedCoins() as secret:
            if before:
                module.collate_rows(before)
            seed_everywhere(self._seed)
            coins = python_and_numpy_now()
            found = module.collate_rows(rows)
            draws = coins != python_and_numpy_now()
        self._drew_publicly |= secret.drew_publicly
        return _Collated(found, own_generators(islice(objects_in(module), _OBJECTS)), draws)

    def compare_collated(self, rows: Rows, own: list[Any], others: list[Any], *, again: bool = True) -> None:
        """Compare the losses of rows collated alone with those of the same rows collated before and after others."""
        if rows.batch.data_rows is not None:  # as many as there are slots
            slots = len(rows.batch.mask)
            own = own[: max(1, slots // 2)]
            others = others[: slots - len(own)]
        alone = self.collated(own, []).features
        for together, first in (([*own, *others], 0), ([*others, *own], len(others))):
            found, drawn = [], []
            for features, at in ((alone, first), (self.collated(together, []).features, 0)):
                batch, places = self._batch_like(rows.batch, features, at)
                if self._prepared_like is None:
                    self.module.before_batch(batch)
                found.append(self._afresh(batch.rows, fixed_coins=True)[places[first - at :][: len(own)]])
                drawn.append(python_and_numpy_now())
            if drawn[0] != drawn[1]:
                if again:
                    return self.compare_collated(rows, own, others, again=False)
                self._refuse_other_coins()
            if differ(found[0], found[1], floor=FLOOR):
                self._refuse(rows, f"{DEPENDS}, or collated in another order, as when collate_rows sorts them")

    def compare_placed(self, rows: Rows) -> None:
        """Compare the losses of the first units of a fixed-shape batch with their losses alone in it."""
        slots = torch.tensor(rows.slots[:ALONE], device=rows.kept.device)
        data_rows: Any = rows.batch.data_rows
        kept = torch.isin(rows.batch.unit_ids, slots) & data_rows
        mask = torch.zeros_like(rows.batch.mask).index_fill_(0, slots, True)
        features = take_rows(rows.batch.alone, slice(None))
        alone = replace(rows.batch, rows=features, data_rows=kept, mask=mask, alone=None)
        if self._prepared_like is None:
            self.module.before_batch(alone)
        found = [self._afresh(features, fixed_coins=True)[kept] for features in (rows.as_they_are(), alone.rows)]
        if differ(found[0], found[1]):
            self._refuse(rows)

    def _batch_like(self, batch: UnitBatch, features: Any, first: int) -> tuple[UnitBatch, Tensor]:
        """Return a batch of collated rows, each a unit, and the positions of these rows.

        In low precision another shape gives another result. So if ``batch`` has a fixed shape, the rows are placed in
        the same shape, in the slots from ``first`` on.
        """
        count, device = len(leaves(features)[0]), self.module.device
        if batch.data_rows is None:
            ids = torch.arange(count, device=device)
            mask, data_rows, places = torch.ones_like(ids, dtype=torch.bool), None, ids
        else:
            place_rows = self.module.place_rows if self.module.fills_up else copied_rows
            shape = FixedShape(len(batch.mask), len(batch.unit_ids) // len(batch.mask), place_rows)
            slots = range(first, first + count)
            features, data_rows = shape.filled(features, slots)
            ids, data_rows = batch.unit_ids, data_rows.to(device)
            mask = torch.zeros_like(batch.mask).index_fill_(0, torch.tensor(slots, device=device), True)
            places = data_rows.nonzero().flatten()
        moved = _moved_like(batch.rows, features)
        found = replace(batch, rows=moved, unit_ids=ids, mask=mask, data_rows=data_rows, alone=None)
        return found, places


def refuse_own_coins(module: Any) -> NoReturn:
    """Refuse a ``collate_rows`` that does not repeat itself, because of its own random draws or of kept state."""
    raise cannot_train(
        module,
        "collate_rows returns something else for the same rows each time. It draws random numbers from a generator of "
        "its own, which rows share, or keeps something of earlier rows. Draw from the global generators "
        "(torch.rand(...), random, numpy.random), which the run seeds for every unit and step, and keep nothing "
        "between calls.",
    )


def _copy_without_weights(module: Any) -> Any:
    """Return a copy of a module that shares its tensors and texts; the module itself if it cannot be copied."""
    shared = [
        each for each in objects_in(module) if isinstance(each, Tensor) or getattr(type(each), "holds_texts", False)
    ]
    try:
        copied = copy.deepcopy(module, {id(each): each for each in (*shared, module._trainer)})
        vars(copied)["_trainer"] = module._trainer  # Lightning excludes it, but collate_rows may ask it for the step
        return copied
    except Exception:  # user objects may refuse to be copied, in any way
        return module


def _moved_like(example: Any, rows: Any) -> Any:
    """Return ``rows`` on the devices and with the dtypes of ``example``."""
    if isinstance(rows, dict):
        return type(rows)({key: _moved_like(example.get(key), value) for key, value in rows.items()})
    return rows.to(example.device, example.dtype) if isinstance(example, Tensor) else rows


def same_features(one: _Collated, other: _Collated) -> bool:
    """Return whether two collations hold equal tensors; leaves of other kinds are not compared."""
    a, b = leaves(one.features), leaves(other.features)
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(same_values(x, y) for x, y in pairs if isinstance(x, Tensor))
