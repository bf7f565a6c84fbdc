"""Determine whether a run was ended by its private rows: no noise covers such an end."""

from __future__ import annotations

import dis
import errno
import os
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType

import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling

from lit_dpret.errors import BudgetExceededError, DivergenceError, LedgerError, ResumeError, StorageError
from lit_dpret.privacy.sampling import PrivateBatchSampler
from lit_dpret.privacy.user_code import is_library

#: Budget, ledger and weights depend on releases alone; a full disk depends on no row.
_OF_NO_ROW = (BudgetExceededError, DivergenceError, LedgerError, ResumeError, StorageError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_THE_DISK = (*_FULL, errno.EROFS, errno.EIO)

#: Files of the code that reads a data set and collates its rows, or that notices a dead worker.
_READING = {dataloader.__file__, signal_handling.__file__}
#: Code that they call and that reads no row.
_DRAWING = PrivateBatchSampler.__iter__.__code__
#: The folder of torch's optimizers and schedules.
_UPDATING = f"{Path(torch.optim.__file__).parent}{os.sep}"
#: The file in which Lightning calls the hooks of modules and callbacks, which may have kept rows.
_HOOKS = call.__file__
#: Hooks that are given batches of other data.
_OF_OTHER_ROWS = ("on_validation", "on_test", "on_predict")


def ends_by_rows(error: BaseException, *, at_hand: bool) -> bool:
    """Return whether an error that ends a run may follow from a private row.

    Its cause is unknown, so this is assumed of every error raised while rows are read, computed (``at_hand``) or passed
    to a user's hook. Exceptions: the budget is spent, the released weights diverged, the disk is full, or a signal,
    such as Ctrl-C, ended the run. Code that calls ``sys.exit``, or raises KeyboardInterrupt, ends it like any error.
    """
    if isinstance(error, _OF_NO_ROW) or _is_of_a_signal(error):
        return False
    passed = {frame.f_code for frame in _passed(error)}
    reading = not _READING.isdisjoint(code.co_filename for code in passed) and _DRAWING not in passed
    if isinstance(error, OSError) and error.errno in (_FULL if reading else _OF_THE_DISK):
        return False
    return at_hand or reading or _in_hook_with_batch(error)


def _is_of_a_signal(error: BaseException) -> bool:
    """Return whether Python, Lightning or a user's handler of a signal raised this, and no statement of other code."""
    if isinstance(error, SIGTERMException):
        return True
    if not isinstance(error, (KeyboardInterrupt, SystemExit)):
        return False
    for caller, called in pairwise(_passed(error)):
        # A handler is given the frame that the signal interrupted, perhaps as one of *arguments.
        count = called.f_code.co_argcount + called.f_code.co_kwonlyargcount + 1
        held = [called.f_locals.get(name) for name in called.f_code.co_varnames[:count]]
        if any(value is caller for one in held for value in (one if isinstance(one, tuple) else (one,))):
            return True
    if isinstance(error, SystemExit) or error.__traceback__ is None:
        return False
    *_, last = _traces(error)
    # Python's own handler raises between two instructions of the code that it interrupts.
    return last.tb_frame.f_code.co_code[last.tb_lasti] != dis.opmap["RAISE_VARARGS"]


def _in_hook_with_batch(error: BaseException) -> bool:
    """Return whether an error comes from user code in a Lightning hook that is given a batch."""
    for caller, called in pairwise(_passed(error)):
        hook = str(caller.f_locals.get("hook_name", "")) if caller.f_code.co_filename == _HOOKS else ""
        if "batch" in hook and not hook.startswith(_OF_OTHER_ROWS) and not is_library(called.f_globals["__name__"]):
            return True
    return False


def fails_in_update(error: BaseException) -> bool:
    """Return whether an error comes from a torch optimizer or schedule, and not from a Lightning hook within it."""
    files = [frame.f_code.co_filename for frame in _passed(error)]
    first = next((at for at, file in enumerate(files) if file.startswith(_UPDATING)), None)
    return first is not None and _HOOKS not in files[first:]


def hear_no_worker() -> None:
    """Stop torch from interrupting this process, at any point, with an error about a dead worker of the loader."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Otherwise the next loader with workers would not install the handler again.
        signal_handling._SIGCHLD_handler_set = False  # type: ignore[attr-defined]


def _passed(error: BaseException) -> Iterator[FrameType]:
    return (trace.tb_frame for trace in _traces(error))


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next
