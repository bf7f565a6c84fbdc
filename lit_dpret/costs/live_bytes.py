"""How many bytes of tensors are alive at once, on a CPU, where no allocator says so."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_dpret.privacy.clipping.phases import PREFIX


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while it is active, until nothing refers to them any more.

    It is what `torch.cuda.max_memory_allocated` counts, without rounding up to blocks. What a kernel takes and
    gives back inside one operation is not seen.

    Attributes:
        now: Bytes alive that were made since the beginning.
        peak: The most there were at once.
        peaks: The most there were at once inside of each phase of clipping (`lit_dpret.privacy.clipping.phases`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.peaks: dict[str, int] = {}
        self._inside: list[str] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.profiler._record_function_enter_new.default:
            self._inside.append(args[0])
        elif func is torch.ops.profiler._record_function_exit._RecordFunction and self._inside:
            self._inside.pop()
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._note(leaf.untyped_storage(), given)
        return made

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in given:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        for name in self._inside:
            if name.startswith(PREFIX):
                phase = name.removeprefix(PREFIX)
                self.peaks[phase] = max(self.peaks.get(phase, 0), self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
