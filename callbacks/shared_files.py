"""Find open files whose offset worker processes would share with this process, which has read rows from them.

A forked process inherits its parent's open files, and a read in any process moves the offset for all. A worker then
gets rows of other units, or parts of them.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data._utils import worker

from lit_dpret.errors import DataError
from lit_dpret.privacy.ledger.trained import objects_in

#: At most this many objects are searched.
_OBJECTS = 50_000
#: Packages whose connections no forked process may use, whatever it reads.
_NEVER_FORKED = ("sqlite3", "h5py")
#: How long a forked process may take to read three rows, in seconds.
_LONGEST = 60


def refuse_shared_files(loader: Any, read: Callable[[int], Any], rows: int, *, whose: str, knob: str) -> None:
    """Refuse forked workers of ``loader`` that share a file with this process.

    In a process forked for this purpose, every file is first moved to another offset; then ``read`` reads a few of the
    ``rows``. A file whose offset moves is shared, even if it is restored after each row. A file that each process opens
    for itself is not.
    """
    context: Any = getattr(loader, "multiprocessing_context", None) or multiprocessing
    if not getattr(loader, "num_workers", 0) or context.get_start_method() != "fork":
        return
    holds = next((type(each).__name__ for each in islice(objects_in(loader.dataset), _OBJECTS)
                  if type(each).__module__.partition(".")[0] in _NEVER_FORKED), None)  # fmt: skip
    moved = partial(_moved_by_a_worker, loader, read, sorted({0, rows // 2, rows - 1}))
    if holds is not None or (moved() and moved()):  # twice, as another thread of this process may have read a file
        raise DataError(
            f"{whose} holds an open {holds or 'file'} that the {loader.num_workers} worker processes of the loader "
            f"would share, with its offset. Set num_workers=0 ({knob}), or open it in each process (os.getpid()).",
            trap="T38",
        )


def _moved_by_a_worker(loader: Any, read: Callable[[int], Any], asked: Iterable[int]) -> bool:
    """Return whether a process like the loader's workers moves the offset of a file of this process.

    Also true if it does not end in time.
    """
    for row in asked:
        with suppress(Exception):  # raised again where the row is drawn, and judged there (`ends_by_rows`)
            read(row)  # opens files that are opened at first use
    if not (before := _places()):
        return False
    if (child := os.fork()) == 0:
        moved = True
        try:
            torch.set_num_threads(1)  # as in a worker: this process's threads are not forked
            worker._worker_info = worker.WorkerInfo(
                id=0, num_workers=loader.num_workers, seed=0, dataset=loader.dataset
            )
            put = {}
            for file, place in before.items():
                with suppress(OSError):  # this kind of file has no offset
                    put[file] = os.lseek(file, place + 1, os.SEEK_SET)
            if (begin := getattr(loader, "worker_init_fn", None)) is not None:
                begin(0)
            for row in asked:
                with suppress(Exception):
                    read(row)
            after = _places()
            # Also true if a running worker has moved it: that worker shares the file.
            moved = any(after.get(file, place) != place for file, place in put.items())
        finally:
            os._exit(moved)  # without this process's exit handlers, such as those of its files and threads
    begun, status = time.monotonic(), 1
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() - begun < _LONGEST:
        time.sleep(0.01)
    if ended[0]:
        status = ended[1]
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    for file, place in before.items():
        with suppress(OSError):
            os.lseek(file, place, os.SEEK_SET)
    return status != 0


def _places() -> dict[int, int]:
    """Return the offset of each read-only open file: files that a data set reads, not logs."""
    import fcntl  # like os.fork, not on Windows

    found = {}
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            only_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if only_read and stat.S_ISREG(os.fstat(number).st_mode):
                found[number] = os.lseek(number, 0, os.SEEK_CUR)
    return found
