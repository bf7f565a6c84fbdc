"""Whether a run was ended by its private rows: no noise covers such an end."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType

import torch
from lightning.pytorch.trainer import call
from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling

from lit_dpret.errors import BudgetExceededError, DivergenceError, LedgerError, ResumeError, StorageError
from lit_dpret.privacy.sampling import PrivateBatchSampler
from lit_dpret.privacy.user_code import is_library

#: The budget, the ledger and the weights know of releases alone, and a full disk or a person of no row.
_OF_NO_ROW = (BudgetExceededError, DivergenceError, LedgerError, ResumeError, StorageError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_THE_DISK = (*_FULL, errno.EROFS, errno.EIO)

#: Files of the code in which a data set is read and its rows are collated, or a worker that does so is found dead.
_READING = {dataloader.__file__, signal_handling.__file__}
#: Code that is called from it and reads no row.
_DRAWING = PrivateBatchSampler.__iter__.__code__
#: Where torch's optimizers and schedules are.
_UPDATING = f"{Path(torch.optim.__file__).parent}{os.sep}"
#: Where Lightning calls the hooks of modules and callbacks, which may have kept rows.
_HOOKS = call.__file__
#: Hooks that are given batches of other data.
_OF_OTHER_ROWS = ("on_validation", "on_test", "on_predict")


def ends_by_rows(error: BaseException, *, at_hand: bool) -> bool:
    """Return whether an error that ends a run may follow from a private row.

    So may every error while rows are read or computed (``at_hand``) or given to a hook of the user's own, since it is
    not known why it happened; but not that the budget is spent, that the released weights diverged, that the disk is
    full, or that somebody ends the run.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, *_OF_NO_ROW)):
        return False
    passed = {frame.f_code for frame in _passed(error)}
    reading = not _READING.isdisjoint(code.co_filename for code in passed) and _DRAWING not in passed
    if isinstance(error, OSError) and error.errno in (_FULL if reading else _OF_THE_DISK):
        return False
    return at_hand or reading or _in_hook_with_batch(error)


def _in_hook_with_batch(error: BaseException) -> bool:
    """Return whether an error comes from code of the user's own in a hook of Lightning's that is given a batch."""
    for caller, called in pairwise(_passed(error)):
        hook = str(caller.f_locals.get("hook_name", "")) if caller.f_code.co_filename == _HOOKS else ""
        if "batch" in hook and not hook.startswith(_OF_OTHER_ROWS) and not is_library(called.f_globals["__name__"]):
            return True
    return False


def fails_in_update(error: BaseException) -> bool:
    """Return whether an error comes from an optimizer or schedule of torch, and from no hook of Lightning within."""
    files = [frame.f_code.co_filename for frame in _passed(error)]
    first = next((at for at, file in enumerate(files) if file.startswith(_UPDATING)), None)
    return first is not None and _HOOKS not in files[first:]


def hear_no_worker() -> None:
    """Let the news that a worker of the loader died, which torch raises anywhere, interrupt no more of this process."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Else the next loader with workers would not set it again.
        signal_handling._SIGCHLD_handler_set = False  # type: ignore[attr-defined]


def _passed(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
