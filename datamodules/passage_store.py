"""A corpus on disk with the interface of a dictionary: texts are read on demand.

A `PassageStore` keeps them in an SQLite file, built once from a corpus file. Its name is derived from the identity of
that file (length, modification time, hash of its beginning and end), so a changed file gets a new store and no store is
ever stale.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from pathlib import Path
from typing import Any, overload

from lit_dpret.errors import DataError, StorageError

_FORMAT = 3  # of the SQLite file
_ABANDONED = 3600.0  # seconds until a draft is stale
_READ = 2**20
_MAPPED = 2**40  # bytes of the file that may be mapped into memory; SQLite's maximum
_log = logging.getLogger(__name__)


class PassageStore(Mapping[str, str]):
    """The passages of a finished store, written by `build_store`: text by id, in the order of the corpus.

    Guarantees:
        - No text is held: memory does not grow with the length of the texts.
        - It equals the dictionary of the same passages, and iterates in the same order.
        - Threads, forked and spawned processes may read it at the same time.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # A connection belongs to the thread and the process that opened it.
        self._connections: dict[tuple[int, int], sqlite3.Connection] = {}
        self._count: int
        try:
            format_, self._count, size = next(self._query("SELECT format, passages, bytes FROM store"))
            whole = format_ == _FORMAT and self.path.stat().st_size == size
        except (sqlite3.Error, StopIteration, OSError) as error:
            raise DataError(f"{self.path} is not a passage store; delete it to rebuild it.") from error
        if not whole:
            raise DataError(f"{self.path} is a damaged passage store; delete it to rebuild it.")

    def _query(self, statement: str, *values: object) -> Iterator[Any]:
        place = (os.getpid(), threading.get_ident())
        if place not in self._connections:
            # immutable: a finished store is never written, so no reader needs a lock.
            uri = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
            self._connections[place] = sqlite3.connect(uri, uri=True, check_same_thread=False)
            self._connections[place].execute(f"PRAGMA mmap_size={_MAPPED}")
        return self._connections[place].execute(statement, values)

    def __reduce__(self) -> tuple[type[PassageStore], tuple[Path]]:
        return PassageStore, (self.path,)

    def __repr__(self) -> str:
        return f"PassageStore({self._count} passages in {self.path})"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, passage_id: str) -> str:
        if isinstance(passage_id, str):
            for row in self._query("SELECT text FROM passages WHERE id = ?", passage_id):
                return str(row[0])
        raise KeyError(passage_id)

    def __iter__(self) -> Iterator[str]:
        return (name for (name,) in self._query("SELECT id FROM passages ORDER BY rowid"))

    def values(self) -> _Values:
        """Return the texts in order, read on demand; sliceable by number like a list."""
        return _Values(self)

    def items(self) -> ItemsView[str, str]:
        """Return ids and texts in order, read on demand."""
        return _Items(self)


class _Values(ValuesView[str], Sequence[str]):
    _mapping: PassageStore

    def __iter__(self) -> Iterator[str]:
        return (text for (text,) in self._mapping._query("SELECT text FROM passages ORDER BY rowid"))

    def __contains__(self, text: object) -> bool:
        return any(found == text for found in self)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        rows = range(len(self))[place]
        wanted = range(rows, rows + 1) if isinstance(rows, int) else rows
        low, high = (min(wanted), max(wanted)) if wanted else (0, -1)
        found = [
            text
            for (text,) in self._mapping._query(
                "SELECT text FROM passages WHERE rowid BETWEEN ? AND ? ORDER BY rowid", low + 1, high + 1
            )
        ]
        return found[0] if isinstance(rows, int) else found[:: rows.step]


class _Items(ItemsView[str, str]):
    _mapping: PassageStore

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._mapping._query("SELECT id, text FROM passages ORDER BY rowid")


def build_store(path: Path, passages: Iterable[tuple[str, str]], repeated: Callable[[str], object]) -> PassageStore:
    """Write a store of passages, ids and texts, into a new file; call ``repeated`` with each repeated id."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            # A draft that a crash interrupts is discarded, so it needs no journal.
            connection.executescript(
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;"
                "CREATE TABLE passages (id TEXT NOT NULL UNIQUE, text TEXT NOT NULL);"
                "CREATE TABLE store (format INTEGER, passages INTEGER, bytes INTEGER);"
                "BEGIN;"
            )
            count = 0
            for passage_id, text in passages:
                if connection.execute("INSERT OR IGNORE INTO passages VALUES (?, ?)", (passage_id, text)).rowcount:
                    count += 1
                else:
                    repeated(passage_id)
            connection.execute("INSERT INTO store VALUES (?, ?, 0)", (_FORMAT, count))
            connection.execute("COMMIT")
            connection.execute("UPDATE store SET bytes = ?", (path.stat().st_size,))
        finally:
            connection.close()
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise StorageError(
            f"{path} cannot be written: {reason or error}. Free space, or choose another datamodule.cache_dir."
        ) from error
    return PassageStore(path)


def cached_store(name: str, build: Callable[[Path], bool], cache_dir: str | Path | None) -> PassageStore:
    """Return the store of this name in ``cache_dir``; build it if it does not exist.

    ``build`` writes a store into a new file and returns whether it is complete. An incomplete store serves only this
    process and is not kept.
    """
    path = (default_cache() if cache_dir is None else Path(cache_dir)) / f"{name}.sqlite"
    if path.exists():
        try:
            return PassageStore(path)
        except DataError:  # damaged, or of another version
            path.unlink(missing_ok=True)
    _log.info("Copying passages into %s, to be read from there.", path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):  # by killed processes
        if time.time() - left.stat().st_mtime > _ABANDONED:
            left.unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        whole = build(draft)
        if whole:
            os.replace(draft, path)  # if two processes build it, the later one replaces an equal file
            return PassageStore(path)
        store = PassageStore(draft)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    weakref.finalize(store, draft.unlink, missing_ok=True)
    return store


def default_cache() -> Path:
    """Return the folder of stores if ``datamodule.cache_dir`` is null."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lit-dpret" / "passages"


def file_key(path: Path, *facts: object) -> str:
    """Hash a file's identity into 32 hexadecimal digits: length, modification time, first and last bytes, ``facts``."""
    status = path.stat()
    digest = hashlib.sha256(json.dumps([_FORMAT, status.st_size, status.st_mtime_ns, *facts], default=str).encode())
    with path.open("rb") as file:
        digest.update(file.read(_READ))
        file.seek(max(0, status.st_size - _READ))
        digest.update(file.read(_READ))
    return digest.hexdigest()[:32]
