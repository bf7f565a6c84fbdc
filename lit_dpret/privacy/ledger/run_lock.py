"""One run, going on in one place: a lock beside the ledger of its data set, from reservation to settlement.

A copy of a run folder is the same run to that ledger, so a copy that goes on beside its original would
take over the reservation that the original still spends. The lock is the operating system's (``flock``): a
killed process lets it go, and it reaches as far as the lock on the ledger itself does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO

from lit_dpret.errors import LedgerError, StorageError
from lit_dpret.privacy.ledger.chain import storage_error


class RunLock:
    """Held by at most one object in all processes that name the same ledger and run.

    Guarantees:
        - While it is held, no other object gets it, in this process or in another.
        - It ends with its process, however that ends, and leaves no file behind when it is let go.

    Args:
        ledger: The ledger of the data set; the lock lies beside it, whatever path leads there.
        run_id: The run's lasting identity.
    """

    def __init__(self, ledger: Path, run_id: str) -> None:
        ledger = ledger.expanduser().resolve()
        self.path = ledger.with_name(f"{ledger.name}.{run_id}.lock")
        self._run_id = run_id
        self._file: IO[bytes] | None = None
        self._pid = os.getpid()

    def take(self) -> None:
        """Take the lock; nothing changes where this object has it already.

        Raises:
            LedgerError: Somebody else holds it.
            StorageError: The folder cannot be written, or the system has no such locks.
        """
        while self._file is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (kept open: it carries the lock)
            except OSError as error:
                raise storage_error(self.path, "opened for writing", error) from error
            try:
                _lock(file, self.path, self._run_id)
            except BaseException:
                file.close()
                raise
            if _is_at(file, self.path):
                self._file, self._pid = file, os.getpid()
            else:  # whoever had it removed the file after this object had opened it
                file.close()

    def release(self) -> None:
        """Let the lock go and remove its file; a forked worker that calls this changes nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        if os.getpid() == self._pid:
            if _is_at(file, self.path):
                self.path.unlink(missing_ok=True)
            _unlock(file)
        file.close()


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether ``path`` still leads to ``file``."""
    ours = os.fstat(file.fileno())
    try:
        theirs = os.stat(path)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)


def _lock(file: IO[bytes], path: Path, run_id: str) -> None:
    if sys.platform == "win32":
        raise StorageError(f"{path} could not be locked: the ledger needs the file locks of a POSIX system.")
    import fcntl

    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LedgerError(
            f"Run {run_id} is going on already, in this folder or in a copy of it: {path} is locked, and two copies "
            "of one run would spend one reservation twice. Wait for the other to end."
        ) from error
    except OSError as error:
        raise storage_error(path, "locked", error) from error


def _unlock(file: IO[bytes]) -> None:
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
