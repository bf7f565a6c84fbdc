"""Find files whose place worker processes would share with this one, which has read rows from them before.

A process that is forked has the files of its parent, and whoever reads moves the place of all: a worker then gets rows
of other units, or parts of them.
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

#: More objects than these are not searched.
_OBJECTS = 50_000
#: Whose connections no forked process may use, whatever it reads.
_NEVER_FORKED = ("sqlite3", "h5py")
#: How long a forked process may take to read three rows, in seconds.
_LONGEST = 60


def refuse_shared_files(loader: Any, read: Callable[[int], Any], rows: int, *, whose: str, knob: str) -> None:
    """Refuse forked workers of ``loader`` that share a file with this process.

    ``read`` reads one of ``rows`` in a process that is forked for this alone, where every file was put to another
    offset before. A file whose offset moves there is shared, also if it is restored after each row; one that each
    process opens for itself is not.
    """
    context: Any = getattr(loader, "multiprocessing_context", None) or multiprocessing
    if not getattr(loader, "num_workers", 0) or context.get_start_method() != "fork":
        return
    holds = next((type(each).__name__ for each in islice(objects_in(loader.dataset), _OBJECTS)
                  if type(each).__module__.partition(".")[0] in _NEVER_FORKED), None)  # fmt: skip
    moved = partial(_moved_by_a_worker, loader, read, sorted({0, rows // 2, rows - 1}))
    if holds is not None or (moved() and moved()):  # once, another thread of this process may have read a file
        raise DataError(
            f"{whose} holds an open {holds or 'file'}, whose place the {loader.num_workers} worker processes of the "
            f"loader would share. Set num_workers=0 ({knob}), or let each process open it for itself (os.getpid()).",
            trap="T38",
        )


def _moved_by_a_worker(loader: Any, read: Callable[[int], Any], asked: Iterable[int]) -> bool:
    """Return whether a process like the loader's workers moves the place of a file of this one.

    Also true if it does not end in time.
    """
    for row in asked:
        with suppress(Exception):  # it ends the run where the row is drawn, by what is known of such ends
            read(row)  # opens what is opened at first use
    if not (before := _places()):
        return False
    if (child := os.fork()) == 0:
        moved = True
        try:
            torch.set_num_threads(1)  # as in a worker: those of this process are not there
            worker._worker_info = worker.WorkerInfo(
                id=0, num_workers=loader.num_workers, seed=0, dataset=loader.dataset
            )
            put = {}
            for file, place in before.items():
                with suppress(OSError):  # of a kind that has no such place
                    put[file] = os.lseek(file, place + 1, os.SEEK_SET)
            if (begin := getattr(loader, "worker_init_fn", None)) is not None:
                begin(0)
            for row in asked:
                with suppress(Exception):
                    read(row)
            after = _places()
            # Also where a worker that runs already has moved it: it shares the file.
            moved = any(after.get(file, place) != place for file, place in put.items())
        finally:
            os._exit(moved)  # without the ends of this process, as of its files and threads
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
    """Return the place of each file that is open for reading alone: what a data set reads, and no log."""
    import fcntl  # as os.fork, not on Windows

    found = {}
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # that of the listing is closed by now
            only_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if only_read and stat.S_ISREG(os.fstat(number).st_mode):
                found[number] = os.lseek(number, 0, os.SEEK_CUR)
    return found
