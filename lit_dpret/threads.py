"""Share work on the CPU among threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_CPU = torch.device("cpu")


_here = threading.local()


@contextmanager
def threads_of_ours() -> Iterator[None]:
    """Let PyTorch use one thread per operation, and `in_threads` as many as PyTorch had.

    PyTorch's own threads synchronize after every operation. For operations of a few microseconds, or when other
    programs keep the processor busy, that takes longer than the work.
    """
    before, outer = torch.get_num_threads(), getattr(_here, "threads", None)
    _here.threads = outer or before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _here.threads = outer
        torch.set_num_threads(before)


def workers() -> int:
    """Return the number of threads that `in_threads` uses."""
    return getattr(_here, "threads", None) or torch.get_num_threads()


def in_threads(work: Callable[[int], None], places: range, device: torch.device = _CPU) -> None:
    """Call ``work`` with each place, in as many threads as PyTorch has; in one thread if another device does the work.

    While it runs, PyTorch uses one thread per operation, in the whole process.
    """
    before = torch.get_num_threads()
    count = min(workers(), len(places)) if device.type == "cpu" else 1
    if count <= 1:
        for place in places:
            work(place)
        return
    try:
        # One PyTorch thread each, or every operation would be split among threads again.
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            # Consumed only for exceptions, which `map` raises when a result is taken.
            deque(pool.map(work, places), maxlen=0)
    finally:
        torch.set_num_threads(before)


def on_slices(work: Callable[[slice], None], rows: int, step: int) -> None:
    """Call ``work`` on slices of at most ``step`` rows, in threads like `in_threads`."""
    in_threads(lambda start: work(slice(start, min(start + step, rows))), range(0, rows, step))
