"""A tamper-evident file of records that survives a crash during a write.

Each line is a record in canonical JSON with the SHA-256 of itself and of its predecessor; only the removal of records
at the end goes unnoticed. A record has a day and no time: the duration of a step depends on the private texts that it
drew, so times would reveal who was drawn. A `Book` decides what records mean and which record may follow another.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Protocol, Self

from lit_dpret.errors import LedgerError, StorageError

GENESIS = "0" * 64
_CHAIN = ("seq", "day", "kind", "prev", "hash")
_WAYS_OUT = {
    errno.ENOSPC: "the disk is full. Free some space, then resume the run",
    errno.EDQUOT: "the disk quota is used up. Free some space, then resume the run",
    errno.EFBIG: "the file size limit is reached. Raise it (ulimit -f), then resume the run",
    errno.EIO: "the disk reports an input/output error. Move the folder to a sound disk, then resume the run",
    errno.EACCES: "the folder cannot be written. Choose another hydra.run.dir, or change its permissions",
    errno.EPERM: "the folder cannot be written. Choose another hydra.run.dir, or change its permissions",
    errno.EROFS: "the file system is read-only. Choose another hydra.run.dir",
    errno.ENOTDIR: "a part of the path is a file, not a folder. Choose another hydra.run.dir",
    errno.EEXIST: "a part of the path is a file, not a folder. Choose another hydra.run.dir",
    errno.EISDIR: "the path is a folder, not a file. Choose another hydra.run.dir",
}
_KNOB = "hydra.run.dir"


def canonical_json(value: object) -> str:
    """Return the canonical JSON of ``value``, for hashing: sorted keys, no spaces, no NaN."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerError(f"The ledger and the card hold plain, finite JSON values only: {error}.") from error


def record_hash(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without its own ``hash``; it includes ``prev``, and so the whole past."""
    body = {key: value for key, value in record.items() if key != "hash"}
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def storage_error(path: Path, doing: str, error: OSError, *, knob: str = _KNOB) -> StorageError:
    """Return an error for an ``OSError`` that names the file, the reason, and what to do.

    ``knob`` is the setting that places the file.
    """
    way_out = _WAYS_OUT.get(error.errno or 0, f"{error.strerror or error}. Fix this, then resume the run")
    return StorageError(f"{path} could not be {doing}: {way_out.replace(_KNOB, knob)}.")


def today() -> str:
    """Return the date in UTC, the finest time that a publishable file contains."""
    return datetime.now(UTC).date().isoformat()


class Book(Protocol):
    """Judges a record by the earlier ones; ``check`` changes nothing, so that it can run before the write."""

    def check(self, record: Mapping[str, Any]) -> None: ...
    def add(self, record: Mapping[str, Any]) -> None: ...


class ChainedFile:
    """An append-only, hash-chained file with one writer; a second writer waits ``lock_wait`` s, then is refused.

    Guarantees:
        - When ``append`` returns, the whole record is on disk (fsync).
        - When ``append`` raises, the file is as it was before, or ends in a torn line that the next ``open`` cuts and
          records as a ``repair``; no later record can follow a torn line. A last line that lacks only its line end is
          kept.
        - A changed, removed, inserted or swapped complete line raises ``LedgerError`` with its number.
    """

    kinds: ClassVar[tuple[str, ...]] = ("repair",)
    """The kinds of records that the file may hold."""

    lock_wait: ClassVar[float] = 0.0
    """Seconds to wait for another writer."""

    lock_refusal: ClassVar[str] = "is open in another process."
    """The text that refuses a second writer, after the path."""

    knob: ClassVar[str] = _KNOB
    """The setting that places the file."""

    def __init__(self, path: Path, content: bytes, *, file: IO[bytes] | None = None) -> None:
        self.path = path
        self._records, self._book, self._length = self._verify(content, path)
        self.torn_bytes = len(content) - self._length
        self._file = file
        self._pid = os.getpid()
        self._day = today()

    @classmethod
    def new_book(cls) -> Book:
        """Return the validator for the records of one file, in its initial state."""
        raise NotImplementedError

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open for writing, creating the file if absent; verify the chain, remove and record a torn last line."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+b", buffering=0)  # noqa: SIM115 (kept open: it carries the lock)
        except OSError as error:
            raise storage_error(path, "opened for writing", error, knob=cls.knob) from error
        try:
            lock(file, path, wait=cls.lock_wait, refusal=f"The ledger {path} {cls.lock_refusal}", knob=cls.knob)
            # A new file is durable only once its name in the folder is.
            sync_folder(path.parent)
            content = path.read_bytes()
            ledger = cls(path, content, file=file)
            ledger._repair(content)
        except OSError as error:
            file.close()
            if isinstance(error, StorageError):
                raise
            raise storage_error(path, "opened", error, knob=cls.knob) from error
        except BaseException:
            file.close()
            raise
        return ledger

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read and verify without changing anything; ``torn_bytes`` counts an incomplete last line."""
        path = Path(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise LedgerError(f"The ledger {path} cannot be read: {error.strerror}.") from error
        return cls(path, content)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records in order, each ``{seq, day, kind, prev, hash, **facts}``."""
        return list(self._records)

    @property
    def head(self) -> str:
        """The hash of the last record; 64 zeros for an empty ledger."""
        return str(self._records[-1]["hash"]) if self._records else GENESIS

    def append(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Write one record of public facts and wait until it is on disk; return it as a reader will see it."""
        file = self._writable()
        if kind not in self.kinds:
            raise LedgerError(f"A ledger has no records of kind {kind!r}; there are {', '.join(self.kinds)}.")
        if taken := sorted(set(facts) & set(_CHAIN)):
            raise LedgerError(f"A {kind} record cannot carry the fact {taken[0]!r}: the chain uses that name.")
        record: dict[str, Any] = {
            # Through JSON, so that the record in memory is what a reader will get (tuples are lists).
            **json.loads(canonical_json(facts)),
            "seq": len(self._records),
            "day": self._day,
            "kind": kind,
            "prev": self.head,
        }
        record["hash"] = record_hash(record)
        self._book.check(record)
        self._write(file, (canonical_json(record) + "\n").encode())
        self._records.append(record)
        self._book.add(record)
        return record

    def close(self) -> None:
        """Release the lock, even if a forked worker still has the file; further appends are refused."""
        if self._file is not None:
            if os.getpid() == self._pid:
                unlock(self._file)
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _writable(self) -> IO[bytes]:
        """Return the open file, after checking that no other process touched it since the last append."""
        if self._file is None:
            raise LedgerError(f"The ledger {self.path} is not open for writing.")
        if os.getpid() != self._pid:
            raise LedgerError(f"The ledger {self.path} was opened by another process; only that one may write to it.")
        # Before every record: a replaced file would be a ledger that forgets.
        ours = os.fstat(self._file.fileno())
        try:
            theirs = os.stat(self.path)
        except OSError as error:
            raise LedgerError(f"The ledger {self.path} was removed during the run; its claim is lost.") from error
        if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino) or ours.st_size != self._length:
            raise LedgerError(f"The ledger {self.path} was changed by another program during the run.")
        return self._file

    def _write(self, file: IO[bytes], data: bytes) -> None:
        """Append ``data`` and sync; on failure restore the file to its last good length."""
        try:
            # A raw file may write less than it was given.
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError as error:
            try:
                file.truncate(self._length)
                os.fsync(file.fileno())
            except OSError:
                self.close()  # the torn line stays; the next open cuts it
            raise storage_error(self.path, "written", error, knob=self.knob) from error
        except BaseException:  # Ctrl-C in the middle of a line
            file.truncate(self._length)
            raise
        self._length += len(data)

    def _repair(self, content: bytes) -> None:
        """Cut an incomplete last line, or end a complete one, and record that in the chain."""
        tail = content[self._length :]
        if not tail or self._file is None:
            return
        record = _parse(tail)
        if record is None:
            self._file.truncate(self._length)
            note: dict[str, Any] = {"cut_bytes": len(tail), "cut_sha256": hashlib.sha256(tail).hexdigest()}
        else:
            self._write(self._file, b"\n")
            self._length += len(tail)
            self._records, self._book, _ = self._verify(content + b"\n", self.path)
            note = {"ended_record": record["seq"]}
        self.torn_bytes = 0
        self.append("repair", **note)

    @classmethod
    def _verify(cls, content: bytes, path: Path) -> tuple[list[dict[str, Any]], Book, int]:
        """Return the records of the complete lines, the book after them, and the length of those lines in bytes."""
        *lines, tail = content.split(b"\n")
        records: list[dict[str, Any]] = []
        book = cls.new_book()
        head = GENESIS
        for number, line in enumerate(lines, start=1):
            try:
                record = _follow(line, head=head, seq=number - 1, kinds=cls.kinds)
                book.check(record)
            except LedgerError as error:
                raise LedgerError(f"{path}, line {number}: {error}") from error
            book.add(record)
            records.append(record)
            head = str(record["hash"])
        if _starts_with_json(tail):
            try:
                book.check(_follow(tail, head=head, seq=len(lines), kinds=cls.kinds))
            except LedgerError as error:
                raise LedgerError(f"{path}, line {len(lines) + 1}, without a line end: {error}") from error
        return records, book, len(content) - len(tail)


def lock(file: IO[bytes], path: Path, *, wait: float, refusal: str, knob: str) -> None:
    """Take the exclusive lock within ``wait`` seconds, or refuse; it ends with the file, also after a kill."""
    if sys.platform == "win32":
        raise StorageError(f"{path} could not be locked: the ledger needs the file locks of a POSIX system.")
    import fcntl

    deadline = time.monotonic() + wait
    while True:
        try:
            # flock instead of a lock file: the system releases it with the process, also after a kill.
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                # With a wait, other waiting processes have the file open as well.
                raise LedgerError(refusal if wait else f"{refusal}{left_behind(file.fileno())}") from error
            time.sleep(0.05)
        except OSError as error:
            raise storage_error(path, "locked", error, knob=knob) from error


def left_behind(descriptor: int) -> str:
    """Name the workers that hold a file's lock after its run was killed; empty if the run may still be alive."""
    place, holders = os.fstat(descriptor), set[str]()
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    except OSError:  # not Linux
        return ""
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has just ended, or belongs to another user
            found = opened.stat()
            if (found.st_dev, found.st_ino) == (place.st_dev, place.st_ino):
                holders.add(opened.parts[2])
    # Forks share the lock, which is listed under the process that took it.
    took = {words[4] for words in locks if words[1] == "FLOCK" and words[5].endswith(f":{place.st_ino}")}
    if took & holders or not (left := holders - {str(os.getpid())}):
        return ""
    workers = " ".join(sorted(left, key=int))
    return (
        f" The run that locked it was killed and left workers behind. They end within seconds; or run: kill {workers}"
    )


def unlock(file: IO[bytes]) -> None:
    """Release the lock."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names of its files are as durable as their content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _follow(line: bytes, *, head: str, seq: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the record in ``line``, which must continue the chain that ends in ``head``."""
    record = _parse(line)
    if record is None:
        raise LedgerError("not a record in canonical JSON. The ledger was edited or damaged.")
    if record.get("hash") != record_hash(record):
        raise LedgerError("the content does not match its hash. The ledger was edited.")
    if record.get("prev") != head or record.get("seq") != seq:
        raise LedgerError(
            "does not follow the line before it. A line was removed, inserted or moved, or belongs to another ledger."
        )
    if record.get("kind") not in kinds:
        raise LedgerError(f"unknown kind {record.get('kind')!r}.")
    return record


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record in ``line``, or None if the bytes are not exactly its canonical JSON."""
    try:
        record = json.loads(line.decode("ascii"))
        if isinstance(record, dict) and canonical_json(record).encode() == line:
            return record
    except (ValueError, RecursionError, LedgerError):
        pass
    return None


def _starts_with_json(tail: bytes) -> bool:
    try:
        json.JSONDecoder().raw_decode(tail.decode("ascii", errors="replace"))
    except (ValueError, RecursionError):
        return False
    return True
