"""Compare what a module and its optimizer hold before and after hooks.

A forward pass is watched while it runs (`StateWatch`). Hooks before and after it can access the batch and its losses.
What they write into a weight, a buffer or a tensor of the module reaches later steps without noise. What they write
into the rows couples these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lit_dpret.distributed.handover import gradient_slot
from lit_dpret.distributed.xla import is_lazy
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.modules.kept_state import ENTRIES, OWN_TO_MODULES, Looks, code_of_loss, is_foreign, memory_of
from lit_dpret.privacy.batches import UnitBatch, digests_of
from lit_dpret.privacy.clipping.base import trainable
from lit_dpret.privacy.state_watch import checksums
from lit_dpret.privacy.user_code import attributes_of, items_of

#: Values that hold nothing; subclasses may.
_HOLD_NOTHING = (bool, int, float, str, type(None))


class HookWatch:
    """Compare the state of a module and its optimizer before and after hooks, around some batches (`Looks`).

    Guarantees:
        - A write, addition or removal between the end of a batch and the start of the next is refused by name. This
          covers parameters, buffers, tensors and arrays in attributes of the module and its parts, tensors of the
          optimizer's state, and all other tensors and arrays that the code of the loss reads (`ReadByLoss`). While the
          optimizer steps, the noised gradients are covered too, but not the trained parameters and the state. A name
          passes if a part of it is declared public.
        - Between two updates no trained parameter changes, by any writer at any time. On XLA, where reading values is
          expensive, this is not checked.
        - The end of every epoch and of the training is checked, before a card, a model or a checkpoint is written.
        - A batch whose tensors differ from those that were collated is refused.
        - If each rank holds parts of the parameters, the parameters are not checked.

    Numbers that are not tensors are not compared, since a schedule sets them too, nor are the states of torchmetrics.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Restart the count at the first batch."""
        self._looks, self._updates = Looks(), Looks()
        self._seen: dict[str, int] | None = None
        self._weights: dict[str, int] | None = None
        self._begun = False

    def note_weights(self, module: Any) -> None:
        """Store checksums of the trained parameters after an update."""
        self._weights = _weights(module)

    def compare_weights(self, module: Any, public: Collection[str]) -> None:
        """Refuse, before an update, writes into a trained parameter since the last update."""
        if self._weights is not None:
            _refuse_writes(module, self._weights, _weights(module), public, "between two updates")

    def note_first(self, module: Any) -> None:
        """Store the state of ``module`` before the hooks of its first batch; later calls do nothing."""
        if not self._begun:
            self._begun, self._seen = True, _values(module)
            self.note_weights(module)

    def note(self, module: Any, coin: int, *, ends_epoch: bool) -> None:
        """Store the state of ``module`` at the end of a batch, if the next one is checked."""
        self._seen = _values(module) if self._looks.due(coin) or ends_epoch else None

    def compare(self, module: Any, batch: UnitBatch, public: Collection[str]) -> None:
        """Refuse, before ``batch`` starts, writes since the stored state; names in ``public`` pass."""
        seen, self._seen = self._seen, None
        if seen is not None:
            _refuse_changed_rows(module, batch)
            _refuse_writes(module, seen, _values(module), public, "between two batches")

    def compare_last(self, module: Any, public: Collection[str], *, trained: bool) -> None:
        """Refuse writes after the last batch.

        ``trained`` is false if an average has replaced the weights by now.
        """
        if (seen := self._seen) is not None:
            now = _values(module)
            averaged = set() if trained else trainable(module).keys()
            seen, now = ({k: v for k, v in each.items() if k not in averaged} for each in (seen, now))
            _refuse_writes(module, seen, now, public, "after the last batch")

    @contextmanager
    def validating(self, module: Any) -> Iterator[None]:
        """Accept writes by a validation on public rows within the block."""
        if self._seen is None:
            yield
            return
        before = _values(module)
        yield
        now = _values(module)
        self._seen |= {name: value for name, value in now.items() if before.get(name) != value}
        for name in before.keys() - now.keys():
            self._seen.pop(name, None)

    @contextmanager
    def optimizing(self, module: Any, optimizer: Any, public: Collection[str], coin: int) -> Iterator[None]:
        """Watch some updates of the optimizer, including the first, during which hooks may write nothing else."""
        if not self._updates.due(coin):
            yield
            return
        before = _values(module, trained=False, optimizer=optimizer)
        yield
        now = _values(module, trained=False, optimizer=optimizer)
        _refuse_writes(module, before, now, public, "while the optimizer stepped")


def _refuse_changed_rows(module: Any, batch: UnitBatch) -> None:
    if not batch.digests or is_lazy(module.device):
        return
    now = digests_of(batch.rows)
    for path, (kind, digest) in batch.digests.items():
        # Low precision may have cast numbers in the meantime.
        if path not in now or (now[path][0] == kind and now[path][1] != digest):
            raise UnsupportedModelError(
                f"{path} of a batch is not what collate_rows returned when the training step of "
                f"{type(module).__name__} begins: a hook or training_step changed it, where mixing of rows cannot be "
                "detected. Make the change in collate_rows, or in per_row_loss if it runs on the device.",
                trap="T11",
            )


def _refuse_writes(
    module: Any, seen: Mapping[str, int], now: Mapping[str, int], public: Collection[str], when: str
) -> None:
    for name in sorted(seen.keys() | now.keys()):
        if seen.get(name) != now.get(name) and not {name, *name.split(".")} & {*public}:
            raise UnsupportedModelError(
                f"{name} of {type(module).__name__} changed {when}: a hook of the module or of a callback wrote it, or "
                "a training_step that wraps that of PrivateModule. It may depend on private rows, and no noise covers "
                "it. Remove the write. If it depends on private rows only through trained weights, as the average of "
                "a teacher does, list its name in public_metrics of the module or callback.",
                trap="T11",
            )


def _weights(module: Any) -> dict[str, int]:
    held = {} if module.in_shards or is_lazy(module.device) else trainable(module)
    return dict(zip(held, checksums(held.values()), strict=True))


def _values(module: Any, *, trained: bool = True, optimizer: Any = None) -> dict[str, int]:
    """Return checksums by name of everything that is watched, including the gradients of an ``optimizer``."""
    held = dict(_held(module, trained))
    held |= dict(code_of_loss(module).tensors())
    if not trained:  # views of trained parameters are trained too
        views = {memory_of(one) for one in trainable(module).values()}
        held = {name: one for name, one in held.items() if memory_of(one) not in views}
    if optimizer is None and not module.in_shards:
        held |= dict(_state(module))
    elif not module.in_shards:
        slots = ((name, gradient_slot(optimizer, p)) for name, p in trainable(module).items())
        held |= {f"{name}.grad": slot.grad for name, slot in slots if slot.grad is not None}
    return dict(zip(held, checksums(held.values()), strict=True))


def _state(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the optimizers' states, such as moments, by the index of their parameter."""
    found = [] if module._trainer is None else module.trainer.optimizers
    for number, optimizer in enumerate(found):
        for place, kept in enumerate(optimizer.state.values()):
            yield from ((f"optimizer{number}.{place}.{k}", v) for k, v in kept.items() if isinstance(v, Tensor))


def _held(module: Any, trained: bool) -> Iterator[tuple[str, Tensor]]:
    if not module.in_shards:
        yield from ((name, p) for name, p in module.named_parameters() if trained or not p.requires_grad)
    yield from module.named_buffers()
    for prefix, part in module.named_modules():
        if isinstance(part, Metric):  # logging it is checked elsewhere, and no loss may read it (CouplingCheck)
            continue
        for name, value in vars(part).items():
            if name not in OWN_TO_MODULES:
                yield from _within(f"{prefix}.{name}" if prefix else name, value, set())


def _within(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and arrays in an attribute, in lists, dicts and plain objects."""
    if type(value) in _HOLD_NOTHING or isinstance(value, nn.Parameter):
        return
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8:
            yield path, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, (list, tuple, set, deque, Mapping)) or is_foreign(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        whole = attributes_of(value) if is_foreign(value) else dict(enumerate(value))
        for name, each in items_of(value if isinstance(value, Mapping) else whole, ENTRIES):
            yield from _within(f"{path}.{name}", each, seen)
