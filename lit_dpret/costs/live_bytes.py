"""How many bytes of tensors are alive at once, on a CPU, where no allocator says so."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while it is active, until nothing refers to them any more.

    It is what `torch.cuda.max_memory_allocated` counts, without rounding up to blocks. What a kernel takes and
    gives back inside one operation is not seen.

    Attributes:
        now: Bytes alive that were made since the beginning.
        peak: The most there were at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
