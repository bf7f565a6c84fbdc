"""Rows of a batch in other company: kept, replaced, alone, or at other positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_dpret.distributed.xla import is_lazy
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.batches import UnitBatch, take_rows
from lit_dpret.privacy.collation import is_square, leaves


def cannot_train(module: Any, why: str) -> UnsupportedModelError:
    """Return an error that refuses a module: ``why``, and what to do instead."""
    name = type(module).__name__
    return UnsupportedModelError(f"privacy={module.privacy.name} cannot train {name}: {why}", trap="T11")


class Rows:
    """Rows of a batch: the first half of the units, or with ``last`` the last, is ``kept``, the others are replaced."""

    def __init__(self, module: Any, batch: UnitBatch, slots: list[int], *, last: bool = False) -> None:
        self.batch, self.slots, self.module = batch, slots, module
        half = (len(slots) + 1) // 2
        kept = torch.tensor(slots[half:] if last else slots[:half], device=batch.unit_ids.device)
        self.kept = torch.isin(batch.unit_ids, kept)
        others = ~self.kept if batch.data_rows is None else ~self.kept & batch.data_rows
        self._others = others.nonzero().flatten()

    @classmethod
    def of(cls, module: Any, batch: UnitBatch) -> Rows:
        found = leaves(batch.rows) if isinstance(batch.rows, dict) else []
        if not found or any(not isinstance(v, Tensor) or v.dim() == 0 or len(v) != len(found[0]) for v in found):
            raise UnsupportedModelError(
                f"{type(module).__name__}.collate_rows must return a dict of tensors, possibly nested, whose first "
                "axis is the rows (convert a BatchEncoding with dict(...)). Otherwise no dependence between rows can "
                "be detected.",
                trap="T11",
            )
        data = batch.unit_ids if batch.data_rows is None else batch.unit_ids[batch.data_rows]
        return cls(module, batch, sorted(set(data.tolist())))

    def first(self, units: int) -> Rows:
        return self._of(self.slots[:units])

    def _of(self, slots: list[int], **changed: Any) -> Rows:
        batch = self.batch
        inside = torch.isin(batch.unit_ids, torch.tensor(slots, device=self.kept.device)).nonzero().flatten()
        data = None if batch.data_rows is None else batch.data_rows[inside]
        rows, ids = _part_of(batch.rows, inside), batch.unit_ids[inside]
        return Rows(self.module, replace(batch, rows=rows, unit_ids=ids, data_rows=data, **changed), slots)

    def smallest(self) -> Rows:
        """Return the rows of the unit that was collated by itself, as the kept one, and of another unit."""
        slot, alone = self.batch.smallest or (self.slots[0], None)
        return self._of([slot, *(other for other in self.slots if other != slot)][:2], alone=alone)

    def keeping_the_last(self) -> Rows:
        return Rows(self.module, self.batch, self.slots, last=True)

    def as_they_are(self) -> Any:
        """Return the rows in new nested dicts, since a module may write into them."""
        return _part_of(self.batch.rows, slice(None))

    def with_other_company(self, *, from_kept: bool) -> Any:
        """Return the rows, each one that is not kept replaced by a copy of a kept one, or of the last of the others."""
        source = self.kept.nonzero()[0] if from_kept or len(self._others) < 2 else self._others[-1:]
        index = torch.arange(len(self.kept), device=self.kept.device)
        index[self._others] = source
        return _part_of(self.batch.rows, index)

    def extreme(self, company: int = 3) -> tuple[Any, Any]:
        """Return the row with the largest finite numbers as the last of a few, and the same row alone."""
        sizes = torch.zeros(len(self.kept), device=self.kept.device)
        for leaf in leaves(self.batch.rows):
            if leaf.is_floating_point() and leaf.numel():
                sizes = torch.maximum(sizes, leaf.abs().reshape(len(leaf), -1).amax(1).float())
        finite = sizes.isfinite()  # rows that are not would make the gradients of weights NaN
        order = sizes.masked_fill(~finite, -1.0).argsort(descending=True)
        order = order[: min(company + 1, max(1, int(finite.sum())))].flip(0)
        return _part_of(self.batch.rows, order), _part_of(self.batch.rows, order[-1:])

    def others_alone(self) -> tuple[Any, Tensor]:
        """Return the replaced rows and their indices; without the first, so that even and odd positions swap."""
        places = self._others[len(self._others) > 1 :]
        return _part_of(self.batch.rows, places), places

    def apart(self, previous: Any, *, of_pairs: bool) -> list[Any]:
        """Return batches of which two have no row in common: the kept rows, all rows, and the others.

        Alternatively all rows, and a ``previous`` batch or other company.
        """
        if previous is not None:
            return [self.as_they_are(), previous]
        if of_pairs or is_lazy(self.kept.device):  # on a lazy device, another shape would be another program to compile
            return [self.as_they_are(), self.with_other_company(from_kept=True)]
        return [self.alone(), self.as_they_are(), self.others_alone()[0]]

    def alone(self) -> Any:
        """Return the kept rows without the others, collated without them if the loader did so."""
        collated = self.batch.alone if self.batch.data_rows is None else None
        if collated is None or len(leaves(collated)[0]) != int(self.kept.sum()):
            return _part_of(self.batch.rows, self.kept.nonzero().flatten())
        units = self.batch.unit_ids[self.kept]
        mask = torch.zeros_like(self.batch.mask).index_fill_(0, units, True)
        own = replace(self.batch, rows=take_rows(collated, slice(None)), unit_ids=units, mask=mask, alone=None)
        self.module.before_batch(own)
        return own.rows


def _part_of(rows: Any, index: slice | Tensor) -> Any:
    """Return some rows; of the rows' answers to each other, ``(rows, rows)``, take their columns as well."""
    found = take_rows(rows, index)
    if isinstance(rows, dict) and is_square(rows, len(leaves(rows)[0])):
        found["answers"] = found["answers"][:, index]
    return found
