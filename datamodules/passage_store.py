"""A corpus on disk that is used like a dictionary: texts are read when they are asked for, and not held.

MS MARCO's 8.8 million passages are 3 GB of text and, as Python strings in a dictionary, more than twice that. A
`PassageStore` keeps them in one file, and beside it three arrays that are mapped and not read: where each passage
begins, the hashes of all ids in rising order, and which passage each of those belongs to. A look-up is a binary
search and one read; going through the corpus in order is reading the file.

A store is built once from a corpus file of any format, next to others in a cache folder. Its name is made from what
the file is (length, time of change, hash of its beginning and end), so a changed file is another store and none is
ever stale. It appears whole or not at all.

Layout of a store, numbers little-endian: ``texts.bin``, for each passage the byte lengths of id and text (``<II``),
the id, the text; ``starts.u64``; ``hashes.u64``; ``order.u32``; ``store.json``, written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from pathlib import Path
from typing import Any, overload

import numpy as np

from lit_dpret.errors import DataError, StorageError

FORMAT = 2  # ids without surrounding whitespace
_HEADER = struct.Struct("<II")
_TEXTS, _STARTS, _HASHES, _ORDER, _SUMMARY = "texts.bin", "starts.u64", "hashes.u64", "order.u32", "store.json"
_READ = 2**20
_KEPT_BACK = 2**14  # numbers gathered before they go to the disk


class PassageStore(Mapping[str, str]):
    """The passages of a finished store, text by id, in the order of the corpus.

    Guarantees:
        - No text is held: memory does not grow with the length of the texts.
        - It equals the dictionary of the same passages, and iterates in the same order.
        - Threads, forked and spawned processes may read it at the same time.

    Args:
        folder: What `build_store` made.

    Raises:
        DataError: The folder is no finished store, or one of another version.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            summary = json.loads((self.folder / _SUMMARY).read_text(encoding="utf-8"))
            self._count, sizes = int(summary["passages"]), summary["bytes"]
            whole = summary["format"] == FORMAT and all(
                (self.folder / name).stat().st_size == size for name, size in sizes.items()
            )
            self._end: int = sizes[_TEXTS]
            self._file = os.open(self.folder / _TEXTS, os.O_RDONLY) if whole else -1
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{self.folder} is no store of passages; delete it to have it built anew.") from error
        if not whole:
            raise DataError(f"{self.folder} is a damaged store of passages; delete it to have it built anew.")
        self._starts = self._mapped(_STARTS, "<u8")
        self._hashes = self._mapped(_HASHES, "<u8")
        self._order = self._mapped(_ORDER, "<u4")

    def _mapped(self, name: str, kind: str) -> np.ndarray[Any, Any]:
        if not self._count:
            return np.empty(0, dtype=kind)
        return np.memmap(self.folder / name, dtype=kind, mode="r", shape=(self._count,))

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)
            self._file = -1

    def __reduce__(self) -> tuple[type[PassageStore], tuple[Path]]:
        return PassageStore, (self.folder,)

    def __repr__(self) -> str:
        return f"PassageStore({self._count} passages in {self.folder})"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, passage_id: str) -> str:
        if isinstance(passage_id, str):
            wanted = passage_id.encode("utf-8", "surrogatepass")
            hashed = np.uint64(_hash(wanted))
            place = int(np.searchsorted(self._hashes, hashed))
            while place < self._count and self._hashes[place] == hashed:
                name, text = self._record(int(self._order[place]))
                if name == wanted:
                    return _decoded(text)
                place += 1
        raise KeyError(passage_id)

    def __iter__(self) -> Iterator[str]:
        return (_decoded(name) for name, _ in self._records())

    def values(self) -> _Values:
        """The texts, in order, read as one goes; parts of them by number, like those of a list."""
        return _Values(self)

    def items(self) -> ItemsView[str, str]:
        """Ids and texts, in order, read as one goes."""
        return _Items(self)

    def _record(self, row: int) -> tuple[bytes, bytes]:
        start = int(self._starts[row])
        end = int(self._starts[row + 1]) if row + 1 < self._count else self._end
        data = os.pread(self._file, end - start, start)
        return _unpacked(data, 0)

    def _records(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        """The records from ``start`` to before ``stop`` in order, read in large pieces."""
        piece, begun = b"", 0
        for row in range(start, self._count if stop is None else stop):
            place = int(self._starts[row])
            end = int(self._starts[row + 1]) if row + 1 < self._count else self._end
            if not begun <= place < end <= begun + len(piece):
                piece, begun = os.pread(self._file, max(_READ, end - place), place), place
            yield _unpacked(piece, place - begun)


class _Values(ValuesView[str], Sequence[str]):
    """The texts in order; parts of them can be asked for by number, like those of a list."""

    _mapping: PassageStore

    def __iter__(self) -> Iterator[str]:
        return (_decoded(text) for _, text in self._mapping._records())

    def __contains__(self, text: object) -> bool:
        return any(found == text for found in self)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        rows = range(len(self))[place]
        if isinstance(rows, int):
            return _decoded(self._mapping._record(rows)[1])
        if rows.step == 1:
            return [_decoded(text) for _, text in self._mapping._records(rows.start, max(rows.start, rows.stop))]
        return [_decoded(self._mapping._record(row)[1]) for row in rows]


class _Items(ItemsView[str, str]):
    _mapping: PassageStore

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((_decoded(name), _decoded(text)) for name, text in self._mapping._records())


def build_store(folder: Path, passages: Iterable[tuple[str, str]]) -> list[int]:
    """Write a store of ``passages``, ids and texts, into the new folder ``folder``.

    An id that comes again is left out, whatever its text; nothing but numbers is held meanwhile.

    Returns:
        Which of ``passages``, counted from 0, were left out, in order.

    Raises:
        StorageError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True)
        with (
            (folder / _TEXTS).open("wb") as texts,
            (folder / _STARTS).open("wb") as starts,
            (folder / _HASHES).open("wb") as hashes,
        ):
            end = count = 0
            kept_back = array("Q"), array("Q")
            for count, (passage_id, text) in enumerate(passages, start=1):  # noqa: B007
                name, content = passage_id.encode("utf-8", "surrogatepass"), text.encode("utf-8", "surrogatepass")
                kept_back[0].append(end)
                kept_back[1].append(_hash(name))
                end += texts.write(_HEADER.pack(len(name), len(content)) + name + content)
                if len(kept_back[0]) == _KEPT_BACK:
                    _flush(kept_back, (starts, hashes))
            _flush(kept_back, (starts, hashes))
        again = _sort(folder, count)
        sizes = {name: (folder / name).stat().st_size for name in (_TEXTS, _STARTS, _HASHES, _ORDER)}
        summary = {"format": FORMAT, "passages": count - len(again), "bytes": sizes}
        (folder / _SUMMARY).write_text(json.dumps(summary), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror or error}. Free space, or choose another "
            "datamodule.cache_dir."
        ) from error
    return again


def published_store(folder: Path, draft: Path) -> PassageStore:
    """The store that was drafted, under its name; where another process was first, that one's."""
    try:
        os.replace(draft, folder)
    except OSError:  # there is one already
        shutil.rmtree(draft, ignore_errors=True)
    return PassageStore(folder)


def file_key(path: Path, *facts: object) -> str:
    """What a file is, in 32 hexadecimal digits: its length, time of change, first and last bytes, and ``facts``."""
    status = path.stat()
    digest = hashlib.sha256(json.dumps([FORMAT, status.st_size, status.st_mtime_ns, *facts], default=str).encode())
    with path.open("rb") as file:
        digest.update(file.read(_READ))
        file.seek(max(0, status.st_size - _READ))
        digest.update(file.read(_READ))
    return digest.hexdigest()[:32]


def _sort(folder: Path, count: int) -> list[int]:
    """Put the hashes in order, and leave out records whose id an earlier one has; returns those records."""
    if not count:
        (folder / _ORDER).touch()
        return []
    hashes = np.fromfile(folder / _HASHES, dtype="<u8")
    order = np.argsort(hashes, kind="stable").astype("<u4")
    hashes = hashes[order]
    again = _repeated(folder, hashes, order)
    if again:
        keep = np.ones(count, dtype=bool)
        keep[again] = False
        starts = np.fromfile(folder / _STARTS, dtype="<u8")[keep]
        starts.tofile(folder / _STARTS)
        renumbered = np.cumsum(keep) - 1
        hashes, order = hashes[keep[order]], renumbered[order[keep[order]]].astype("<u4")
    hashes.tofile(folder / _HASHES)
    order.tofile(folder / _ORDER)
    return again


def _repeated(folder: Path, hashes: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> list[int]:
    """The records, in order, whose id an earlier record has; only those with equal hashes are looked at."""
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    if not len(same):
        return []
    starts = np.memmap(folder / _STARTS, dtype="<u8", mode="r")
    seen: set[bytes] = set()
    again: list[int] = []
    with (folder / _TEXTS).open("rb") as texts:

        def name(row: int) -> bytes:
            texts.seek(int(starts[row]))
            length, _ = _HEADER.unpack(texts.read(_HEADER.size))
            return texts.read(length)

        for row in sorted({int(order[place + step]) for place in same for step in (0, 1)}):
            found = name(row)
            if found in seen:
                again.append(row)
            seen.add(found)
    return again


def _flush(kept_back: tuple[array[int], array[int]], files: tuple[Any, Any]) -> None:
    for numbers, file in zip(kept_back, files, strict=True):
        np.array(numbers, dtype="<u8").tofile(file)
        del numbers[:]


def _hash(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _unpacked(data: bytes, at: int) -> tuple[bytes, bytes]:
    of_name, of_text = _HEADER.unpack_from(data, at)
    begun = at + _HEADER.size
    return data[begun : begun + of_name], data[begun + of_name : begun + of_name + of_text]


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
