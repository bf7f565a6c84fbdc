"""Detect out-of-memory errors, and free some memory."""

from __future__ import annotations

import gc
import re

import torch

from lit_dpret.errors import LitDpretError

# CUDA has its own error class; the CPU allocator and other backends raise a RuntimeError with one of these.
_MESSAGES = re.compile(r"out of memory|can't allocate memory|not enough memory|RESOURCE_EXHAUSTED", re.IGNORECASE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error``, or its cause, is an out-of-memory error of a device or the host."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, LitDpretError):  # its message already gives advice
            return False
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and _MESSAGES.search(str(error)):
            return True
        error = error.__cause__
    return False


def give_back_memory() -> None:
    """Free unreachable objects, and release the cached blocks of a GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
