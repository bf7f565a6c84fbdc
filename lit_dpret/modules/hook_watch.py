"""What hooks leave behind in a private run: nothing that a later loss could read.

A forward pass of private rows is watched while it runs (`StateWatch`). Around it, hooks of the module and of callbacks
have the batch and its losses at hand. What they write into a weight, a buffer or a tensor of the module reaches later
steps without noise, and without a row of its own in them; what they write into the rows couples these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lit_dpret.distributed.master_weights import gradient_slot
from lit_dpret.distributed.xla import is_lazy
from lit_dpret.errors import UnsupportedModelError
from lit_dpret.modules.coupling_check import Looks
from lit_dpret.modules.kept_state import OWN_TO_MODULES
from lit_dpret.privacy.checksums import checksums
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.sampling import UnitBatch, digests_of

#: Of a longer list, that many entries are looked at.
_ENTRIES = 1000
#: Values that hold nothing; a class derived from one may.
_SCALARS = (bool, int, float, str, type(None))
#: Objects of these packages are not looked into.
_KNOWN = ("builtins", "torch", "lightning", "transformers", "tokenizers", "peft", "torchmetrics", "lit_dpret", "numpy")


class HookWatch:
    """Compares what a module and its optimizer hold before and after hooks run: around some batches (`Looks`).

    Guarantees:
        - Refused by name is a parameter, a buffer, a tensor or array in an attribute of the module or of a part, or a
          tensor of the optimizer's state, that was written, added or removed between the end of a batch and the
          beginning of the next. While the optimizer steps the same holds of the noised gradients, and not of the
          trained parameters and the state. A name of which a part is declared public passes.
        - The end of every epoch is looked at.
        - A batch whose tensors are others than were collated is refused.
        - Where each rank holds parts of the parameters, the parameters are not looked at.

    Numbers that are no tensors are not compared, since a schedule sets them too, nor are the states of torchmetrics.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from the first batch again."""
        self._looks = Looks()
        self._seen: dict[str, int] | None = None
        self._begun = self._looks_now = False

    def note_first(self, module: Any) -> None:
        """Note what ``module`` holds before the hooks of its first batch run; later calls do nothing."""
        if not self._begun:
            self._begun, self._seen = True, _values(module)

    def note(self, module: Any, coin: int, *, ends_epoch: bool) -> None:
        """Note what ``module`` holds at the end of a batch, where the next one is looked at."""
        self._seen = _values(module) if self._looks.due(coin) or ends_epoch else None

    def compare(self, module: Any, batch: UnitBatch, public: Collection[str]) -> None:
        """Compare with what was noted, before a batch does anything.

        Args:
            module: The `PrivateModule`.
            batch: The one that is about to be trained on.
            public: Names that no private row is behind.

        Raises:
            UnsupportedModelError: Something was written in between.
        """
        seen, self._seen = self._seen, None
        self._looks_now = seen is not None
        if seen is not None:
            _refuse_changed_rows(module, batch)
            _refuse_writes(module, seen, _values(module), public, "between two batches")

    @contextmanager
    def optimizing(self, module: Any, optimizer: Any, public: Collection[str]) -> Iterator[None]:
        """Within it the optimizer makes its update, and hooks run that may write nothing else.

        Raises:
            UnsupportedModelError: Something else was written, the noised gradients included.
        """
        if not self._looks_now:
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
        # Low precision may have cast numbers on the way.
        if path not in now or (now[path][0] == kind and now[path][1] != digest):
            raise UnsupportedModelError(
                f"{path} of a batch is not what collate_rows made of it when the training step of "
                f"{type(module).__name__} begins: a hook or training_step changed it, and nothing shows whether it "
                "mixed rows. Do it in collate_rows, or in per_row_loss for what runs on the device.",
                trap="T11",
            )


def _refuse_writes(
    module: Any, seen: Mapping[str, int], now: Mapping[str, int], public: Collection[str], when: str
) -> None:
    for name in sorted(seen.keys() | now.keys()):
        if seen.get(name) != now.get(name) and not {name, *name.split(".")} & {*public}:
            raise UnsupportedModelError(
                f"{name} of {type(module).__name__} changed {when}, by a hook of the module or of a callback, or in a "
                "training_step around that of PrivateModule: nothing says that no private row is in it, and no noise "
                "covers it. Remove the write. If no private row is behind it but through trained weights, as in the "
                "average of a teacher, list its name in public_metrics of the module or callback.",
                trap="T11",
            )


def _values(module: Any, *, trained: bool = True, optimizer: Any = None) -> dict[str, int]:
    """A checksum by name of everything that is watched, the gradients of an ``optimizer`` included."""
    held = dict(_held(module, trained))
    if optimizer is None and not module.in_shards:
        held |= dict(_state(module))
    elif not module.in_shards:
        slots = ((name, gradient_slot(optimizer, p)) for name, p in module.named_parameters() if p.requires_grad)
        held |= {f"{name}.grad": slot.grad for name, slot in slots if slot.grad is not None}
    return dict(zip(held, checksums(held.values()), strict=True))


def _state(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The moments and the like that optimizers keep, by the place of their parameter."""
    found = [] if module._trainer is None else module.trainer.optimizers
    for number, optimizer in enumerate(found):
        for place, kept in enumerate(optimizer.state.values()):
            yield from ((f"optimizer{number}.{place}.{k}", v) for k, v in kept.items() if isinstance(v, Tensor))


def _held(module: Any, trained: bool) -> Iterator[tuple[str, Tensor]]:
    if not module.in_shards:
        yield from ((name, p) for name, p in module.named_parameters() if trained or not p.requires_grad)
    yield from module.named_buffers()
    for prefix, part in module.named_modules():
        if isinstance(part, Metric):  # read by whoever logs it, which is looked at, and by no loss (CouplingCheck)
            continue
        for name, value in vars(part).items():
            if name not in OWN_TO_MODULES:
                yield from _within(f"{prefix}.{name}" if prefix else name, value, set())


def _within(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors and arrays in an attribute, in lists, dicts and plain objects."""
    if type(value) in _SCALARS or isinstance(value, nn.Parameter):
        return
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf" and value.dtype.isnative:
            yield path, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, (list, tuple, set, deque, Mapping)) or _is_foreign(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        inside = value if isinstance(value, Mapping) else vars(value) if _is_foreign(value) else dict(enumerate(value))
        for name, each in islice(inside.items(), _ENTRIES):
            yield from _within(f"{path}.{name}", each, seen)


def _is_foreign(value: Any) -> bool:
    """Whether a value is a plain object of the user's own."""
    if isinstance(value, (nn.Module, PrivacyMode, type)):
        return False
    return hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _KNOWN
