"""Share work on the CPU among threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_CPU = torch.device("cpu")


def in_threads(work: Callable[[int], None], places: range, device: torch.device = _CPU) -> None:
    """Call ``work`` with each place, in as many threads as PyTorch has; in one where another device does the work.

    While it runs, PyTorch uses one thread for each operation, in all of the process.
    """
    before = torch.get_num_threads()
    workers = min(before, len(places)) if device.type == "cpu" else 1
    if workers <= 1:
        for place in places:
            work(place)
        return
    try:
        # Each with one thread of PyTorch, or every operation in it would be shared out once more.
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            # Emptied for its exceptions alone, which `map` raises where a result is taken.
            deque(pool.map(work, places), maxlen=0)
    finally:
        torch.set_num_threads(before)


def on_slices(work: Callable[[slice], None], rows: int, step: int) -> None:
    """Call ``work`` on slices of at most ``step`` rows, as `in_threads` does."""
    in_threads(lambda start: work(slice(start, min(start + step, rows))), range(0, rows, step))
