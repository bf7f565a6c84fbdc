"""Whether a run was ended by its private rows: no noise covers such an end."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import CodeType

import torch
from torch.utils.data._utils import fetch

from lit_dpret.errors import BudgetExceededError, DivergenceError, LedgerError, ResumeError, StorageError

#: The budget, the ledger and the weights know of releases alone, and a full disk or a person of no row.
_OF_NO_ROW = (BudgetExceededError, DivergenceError, LedgerError, ResumeError, StorageError)
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

#: Code in which a data set is read and its rows are collated, in this process or in a worker of the loader.
_READING: frozenset[CodeType] = frozenset(
    {
        fetch._MapDatasetFetcher.fetch.__code__,
        torch._utils.ExceptionWrapper.reraise.__code__,
    }
)


def ends_by_rows(error: BaseException, *, at_hand: bool) -> bool:
    """Return whether an error that ends a run may follow from a private row.

    So may every error while rows are read or computed, since it is not known why it happened; but not that the budget
    is spent, that the released weights diverged, that the disk is full, or that somebody ends the run.

    Args:
        error: Ends the run.
        at_hand: Whether rows were checked or computed when it was raised.
    """
    if not isinstance(error, Exception) or isinstance(error, _OF_NO_ROW):
        return False
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        return False
    return at_hand or any(code in _READING for code in _passed(error))


def _passed(error: BaseException) -> Iterator[CodeType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next
