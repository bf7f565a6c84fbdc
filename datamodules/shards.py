"""The files behind a setting: one file, a glob or a folder of shards of one format, or an fsspec URL of any of these.

Shards are read in the order of their names, as one sequence of records, numbered as if they were one file; ids that are
derived from a record's number, and so the fingerprint of the data, do not depend on how the records are divided.
A remote file is copied once into a local cache, piece by piece, and read from there. It may be a private log, so only
its owner can read the copy. An object that has changed, or whose file system could not tell, is copied again.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lit_dpret.datamodules.passage_store import default_cache
from lit_dpret.datamodules.readers import FORMATS, RecordFile
from lit_dpret.datamodules.records import Complain, Records, refuse
from lit_dpret.datamodules.splitting import DIVISION_FILE
from lit_dpret.errors import ConfigurationError, DataError, LitDpretError, StorageError, first_line
from lit_dpret.files import CARD_NAME, note_folders, notes_near, write_whole
from lit_dpret.progress import ProgressLine

_PIECE = 2**22
_SILENT = 5.0  # seconds of copying before a progress line appears
_ABANDONED = 3600.0  # seconds until a draft is stale
_ELSEWHERE = "Free space, or choose another datamodule.cache_dir."
_NOTES = (CARD_NAME, DIVISION_FILE)
_LOCAL_FOLDER = "Copy the data to a folder on a local disk, with that file, and name the folder."


@dataclass(frozen=True)
class Shards:
    """Local files of one format, in the order in which they are read, and their names in messages."""

    given: str  # as the setting names them
    files: tuple[Path, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of bytes of all files."""
        return sum(file.stat().st_size for file in self.files)


def is_url(given: object) -> bool:
    """Return whether a setting names a place of fsspec; ``file://`` is one too.

    Example:
        >>> is_url("s3://bucket/log.jsonl"), is_url("corpus/*.parquet")
        (True, False)
    """
    return re.match(r"[A-Za-z][\w+.-]*://", str(given)) is not None


def find_shards(
    given: str | Path | Shards, *, knob: str = "the path", cache_dir: str | Path | None = None, public: bool = False
) -> Shards:
    """Find the files that ``given``, the value of the setting ``knob``, names; fetch remote ones into ``cache_dir``.

    Guarantees:
        - Formats are not mixed, and a glob or folder without a file of records is refused.
        - A remote file is fetched whole or not at all, and its copy is readable by its owner alone.
        - A privacy card, or a note on a split, beside the files is not overlooked: other code looks for it beside the
          setting's path, so files that a glob or a URL names must have none unless they are ``public``.
    """
    if isinstance(given, Shards):
        return given
    if Path(given).is_file():
        return Shards(str(given), (Path(given),), (str(given),))
    with _reading(str(given), knob):
        fs, root = _file_system(str(given))
        infos = _listed(fs, root, str(given), knob)
        is_local = "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))
        if is_local and not is_url(given) and not os.path.isabs(given):
            names = [os.path.relpath(info["name"]) for info in infos]
        else:
            names = [info["name"] if is_local else fs.unstrip_protocol(info["name"]) for info in infos]
        if not public and (is_url(given) or not Path(given).is_dir()):
            local = (str(note) for info in infos for name in _NOTES for note in notes_near(info["name"], name))
            for note in local if is_local else _notes(fs, infos, f"{knob}={given}"):
                raise ConfigurationError(
                    f"{knob}={given}: {note} says what these data were derived from, and a card has to say it too. "
                    f"{_LOCAL_FOLDER}"
                )
        suffixes = ([suffix.lower() for suffix in Path(name).suffixes] for name in names)
        kinds = {"".join(one for one in found if one in (*FORMATS, ".gz", ".zst")) or "unknown" for found in suffixes}
        if len(kinds) > 1:
            raise DataError(
                f"{given} names files of several formats ({', '.join(sorted(kinds))}); check {knob}: name those of one "
                "format by a glob.",
                kind="mixed formats",
            )
        if is_local:
            files = [Path(info["name"]) for info in infos]
        else:
            files = _fetched(fs, infos, names, knob, default_cache() if cache_dir is None else Path(cache_dir))
    return Shards(str(given), tuple(files), tuple(names))


def open_records(
    given: str | Path | Shards, *, knob: str = "the path", header: Sequence[str] | None = None,
    complain: Complain = refuse,
) -> Records:  # fmt: skip
    """Return the records of a file or of shards; arguments as for `RecordFile`."""
    shards = find_shards(given, knob=knob)
    files = [
        RecordFile(file, knob=knob, header=header, complain=complain, source=name)
        for file, name in zip(shards.files, shards.names, strict=True)
    ]
    return files[0] if len(files) == 1 else _Sequence(shards.given, files, complain)


class _Sequence(Records):
    """The records of several files, numbered as in one file with their content; locations name the file."""

    def __init__(self, source: str, files: Sequence[RecordFile], complain: Complain) -> None:
        super().__init__(source, complain)
        self._files = files
        self.row_word, self.column_word = files[0].row_word, files[0].column_word
        # The header of a file counts as a line of it. One file would have only the first one.
        self._headers = int(files[0].format in (".csv", ".tsv") and files[0].header is None)
        self._before = [0]  # the number of the last record before each file

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        self._before = [0]
        for place, given in enumerate(self._files):
            file = copy.copy(given)
            file.complain = self.complain
            start = self._before[-1] - (self._headers if place else 0)
            for number, record in file:
                yield start + number, record
            self._before.append(start + file.lines)

    def where(self, number: int) -> str:
        file, local = self._locate(number)
        return file.where(local)

    def place(self, number: int) -> str:
        file, local = self._locate(number)
        return f"{file.place(local)} of {file.source}" if number else super().place(number)

    def complain_of(self, number: int, problem: DataError) -> None:
        file, local = self._locate(number)
        problem.record = file.source, local
        self.complain(problem)

    def _locate(self, number: int) -> tuple[RecordFile, int]:
        place = max(0, min(bisect_left(self._before, number) - 1, len(self._files) - 1))
        return self._files[place], number - self._before[place] + (self._headers if place else 0)


def _file_system(given: str) -> tuple[Any, str]:
    fsspec = importlib.import_module("fsspec")
    if not is_url(given):
        return fsspec.filesystem("file"), os.path.abspath(given)
    fs, root = fsspec.core.url_to_fs(given)
    fs.invalidate_cache()  # a file system remembers its listings; the objects may have changed
    return fs, root


@contextmanager
def _reading(given: str, knob: str) -> Iterator[None]:
    try:
        yield
    except LitDpretError:
        raise
    except ImportError as error:  # its message names the library
        raise ConfigurationError(
            f"{knob}={given} needs a library that is not installed: {first_line(error)}. Install it, or copy the files "
            "to a local disk."
        ) from error
    except Exception as error:  # of any kind: a network, credentials, an unknown protocol
        raise DataError(f"{knob}={given} cannot be read: {first_line(error)}.", kind="unreadable file") from error


def _listed(fs: Any, root: str, given: str, knob: str) -> list[Mapping[str, Any]]:
    """Return what the file system states about each file, sorted by name."""
    if fs.isfile(root):
        return [fs.info(root)]
    if fs.isdir(root):
        inside = [i for i in fs.ls(root, detail=True) if not PurePosixPath(i["name"]).name.startswith((".", "_"))]
        if folders := sorted(PurePosixPath(i["name"]).name for i in inside if i["type"] == "directory"):
            raise DataError(
                f"{given} holds the folder {folders[0]}, which would be left out; check {knob}: name the files in "
                "folders by a glob, such as FOLDER/**/*.parquet.",
                kind="missing file",
            )
        found = [info for info in inside if set(PurePosixPath(info["name"].lower()).suffixes) & set(FORMATS)]
        problem = "holds no file of records (.parquet; .jsonl, .tsv or .csv, also with .gz or .zst)"
    elif any(sign in given for sign in "*?["):
        # A link is of type link or other.
        found = [i for i in fs.glob(root, detail=True).values() if i["type"] == "file" or fs.isfile(i["name"])]
        problem = "matches no file"
    else:
        found, problem = [], "does not exist"
    if not found:
        raise DataError(f"{given} {problem}; check {knob}.", kind="missing file")
    return sorted(found, key=lambda info: str(info["name"]))


def _notes(fs: Any, infos: Sequence[Mapping[str, Any]], setting: str) -> Iterator[str]:
    """Yield the privacy cards, and the notes on a split, that are near files of a remote file system."""
    if "::" in setting:
        raise ConfigurationError(f"{setting} is a file in another one, beside which a note may be. {_LOCAL_FOLDER}")
    # As text: a path would take a slash out of http://, whose names are whole URLs.
    names = {info["name"].partition("?")[0] if "://" in info["name"] else info["name"] for info in infos}
    folders = {folder for name in names for folder in note_folders(name.rpartition("/")[0])}
    for note in (f"{folder}/{name}" for folder in sorted(folders) for name in _NOTES):
        try:
            fs.cat_file(note)  # reads it, since fsspec's isfile returns False on any failure
        except FileNotFoundError:
            continue
        except Exception as error:  # of any kind: access denied, a time-out
            raise DataError(
                f"{setting}: {note} would say what these data were derived from, and whether it exists cannot be found "
                f"out ({first_line(error)}). {_LOCAL_FOLDER}",
                kind="unreadable file",
            ) from error
        yield note


def _fetched(fs: Any, infos: Sequence[Mapping[str, Any]], names: Sequence[str], knob: str, cache: Path) -> list[Path]:
    """Return the local copies of remote files; fetch those that are missing or have changed."""
    targets = []
    for info, name in zip(infos, names, strict=True):
        key = hashlib.sha256(json.dumps([name, _state(info)], default=str, sort_keys=True).encode()).hexdigest()[:32]
        targets.append(cache / "fetched" / key / PurePosixPath(info["name"]).name)
    missing = [
        (info, name, target)
        for info, name, target in zip(infos, names, targets, strict=True)
        if not (_is_dated(info) and target.is_file() and info["size"] in (None, target.stat().st_size))
    ]
    total, done, begun = sum(info["size"] or 0 for info, _, _ in missing), 0, time.monotonic()

    def pieces(path: str, name: str) -> Iterator[bytes]:
        nonlocal done
        with _reading(name, knob):  # here, since an OSError further out would mean that the copy cannot be written
            fs.invalidate_cache()  # a remembered listing may state other facts than a request for this one file
            before, count = fs.info(path), 0
            with fs.open(path, "rb") as stream:
                while piece := stream.read(_PIECE):
                    count += len(piece)
                    done += len(piece)
                    if time.monotonic() - begun > _SILENT:
                        line(done, max(done, total))
                    yield piece
            fs.invalidate_cache()
            again, size = "Run the same command again", before["size"]
            if size is not None and count != size:
                raise DataError(f"{knob}={name} ended after {count} of {size} bytes. {again}.", kind="unreadable file")
            if _state(fs.info(path)) != _state(before):
                raise DataError(f"{knob}={name} changed while it was fetched. {again}.", kind="unreadable file")

    line = ProgressLine(f"fetching {knob}, bytes", begun=0)
    for info, name, target in missing:
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            target.parent.chmod(0o700)  # fails if it belongs to another user
            for draft in target.parent.glob(".*.tmp"):  # by killed processes
                if time.time() - draft.stat().st_mtime > _ABANDONED:
                    draft.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{target.parent} cannot be written: {error.strerror}. {_ELSEWHERE}") from error
        write_whole(target, pieces(info["name"], name), owner_only=True, advice=_ELSEWHERE)
    return targets


def _is_dated(info: Mapping[str, Any]) -> bool:
    """Return whether a file system states a time or a tag of a file, which change with its content."""
    signs = ("etag", "modif", "mtime", "write", "updated", "created", "md5", "generation", "blob")
    return any(sign in key.lower() and value for key, value in info.items() for sign in signs)


def _state(info: Mapping[str, Any]) -> dict[str, str]:
    """Return what a file system states about a file, such as size, tag and time, but not when it was read."""
    return {key: str(value) for key, value in info.items() if "access" not in key.lower()}
