"""Work on the CPU cut by rows, one thread for each share.

A search alternates between matrix products and small steps of NumPy. Cut by queries, each thread does
all of it for its own rows and waits for nobody; split inside every operation, the threads would wait
for each other some thousand times.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def rows_in_parallel(work: Callable[[slice], None], rows: int, step: int) -> None:
    """Call ``work`` on slices of at most ``step`` rows, on as many threads as torch may use.

    While it runs, torch uses one thread for each operation, in all of the process.
    """
    slices = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    threads = min(torch.get_num_threads(), len(slices))
    if threads <= 1:
        for part in slices:
            work(part)
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for done in [pool.submit(work, part) for part in slices]:
                done.result()
    finally:
        torch.set_num_threads(before)
