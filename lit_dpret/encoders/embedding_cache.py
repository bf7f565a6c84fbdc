"""Embeddings cached on disk, keyed by a hash of weights, contract, vocabulary and texts, and resumed after a kill.

Each window of texts is cut into groups. Once computed, a group is written to a separate file whose name contains its
SHA-256. When all groups are there, their rows are copied to the window's offset and its SHA-256 is written to a
journal. Names and journal are trusted only if the bytes match.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_dpret.encoders.bulk import BATCHES_PER_PIECE, BUFFER, OneSide, Over, Piece, Progress, Window, embed_piece
from lit_dpret.errors import ResumeError, StorageError
from lit_dpret.files import append_fact, json_sha256, read_facts, write_whole

_READ = 2**24


def content_hash(facts: object, weights: Mapping[str, Tensor], texts: Iterable[str] = ()) -> str:
    """Return the SHA-256 of plain JSON facts, of every weight's name, type, shape and bytes, and of texts in order."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


@dataclass(frozen=True)
class Rows:
    """How the rows of a file are computed and stored; its bytes depend on every field."""

    dtype: torch.dtype  # of the numbers in the file
    batch_size: int = 64  # texts per forward pass
    buffer_size: int = BUFFER  # texts sorted together


def encode_to_file(
    encoding: OneSide,
    texts: Sequence[str],
    path: Path,
    rows: Rows,
    *,
    facts: Mapping[str, Any],
    restart: bool = False,
    progress: Progress | None = None,
    over: Over | None = None,
) -> None:
    """Write the embeddings of ``texts`` to ``path``, row by row; resume an interrupted call.

    Guarantees:
        - ``path`` appears whole or not at all, and has the bytes of a call that was never interrupted (same machine
          and library versions), wherever its pieces were computed.
        - Rows whose bytes do not match the journal are computed again.

    Unfinished work is next to ``path`` as ``.partial``, ``.journal`` and ``.parts``. ``facts`` are what the content
    depends on besides texts and ``rows``. If other content was begun there, ``restart`` discards it instead of
    refusing. If given, ``over`` does the work of `embed_piece`, in any order, instead of this process.
    """
    begun = {  # everything that the bytes of the matrix depend on, as kept in its journal
        **facts, "rows": len(texts), "dim": encoding.dim, "dtype": str(rows.dtype).removeprefix("torch."),
        "batch_size": rows.batch_size, "buffer_size": rows.buffer_size,
    }  # fmt: skip
    key = json_sha256(begun)[:16]
    try:
        with ExitStack() as stack:
            file = stack.enter_context(Unfinished(path, begun, restart=restart))
            if over is None:
                stack.enter_context(encoding)
                over = partial(map, partial(embed_piece, encoding, rows.dtype))
            Filling(path, rows, encoding.dim, key, over).fill(file, encoding, texts, progress)
            file.finish()
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"The embeddings {path} cannot be written: {error.strerror or error}. The finished part is kept: fix this "
            "and run the same command again."
        ) from error


class WindowGroups:
    """A window split into groups that are computed and verified separately."""

    def __init__(self, window: Window, window_at: int, made: Rows) -> None:
        self._window, self.window_at, self._size = window, window_at, made.batch_size
        self._order = window.places.argsort(stable=True)
        self._sorted_places = window.places[self._order]
        self._step = made.batch_size * BATCHES_PER_PIECE
        self.starts = range(0, len(window), self._step)

    def __len__(self) -> int:
        return len(self._order)

    def rows(self, start: int) -> Tensor:
        """Return the indices of the window's texts whose embeddings are in a group."""
        return self._order[int(torch.searchsorted(self._sorted_places, start)) : self.end(start)]

    def end(self, start: int) -> int:
        """Return the number of the window's texts that are finished after this group and those before it."""
        return int(torch.searchsorted(self._sorted_places, start + self._step))

    def piece(self, start: int) -> Piece:
        """Return the argument with which `embed_piece` computes a group."""
        return self._window.piece(start, self._size)

    def spread(self, start: int, embedded: Tensor) -> Tensor:
        """Return the embeddings of a group, in the order of ``rows``."""
        return embedded[self._window.places[self.rows(start)] - start]


class Unfinished:
    """The file with its final length, and the journal of its finished windows."""

    def __init__(self, path: Path, begun: Mapping[str, Any], *, restart: bool) -> None:
        self._path, self._begun = path, dict(begun)
        self._partial, self._journal = path.with_name(path.name + ".partial"), path.with_name(path.name + ".journal")
        item = torch.empty(0, dtype=getattr(torch, str(begun["dtype"]))).element_size()
        self._width = int(begun["dim"]) * item
        path.parent.mkdir(parents=True, exist_ok=True)
        self._windows: dict[int, str] = {}
        self._read_journal(restart)
        self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self._width * int(begun["rows"]))

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def has_window(self, start: int, rows: int) -> bool:
        """Return whether the rows of a window are complete, by their SHA-256."""
        return start in self._windows and self._windows[start] == self._sha256(start, rows)

    def write_window(self, start: int, embeddings: Tensor) -> None:
        """Write the rows of a window, sync them to disk, and record them as complete."""
        data, place = embeddings.view(torch.uint8).numpy().reshape(-1).data, start * self._width
        while len(data):
            written = os.pwrite(self._file, data, place)  # may write only a part if the disk is nearly full
            data, place = data[written:], place + written
        os.fsync(self._file)
        append_fact(self._journal, {"window": start, "sha256": self._sha256(start, len(embeddings))})

    def finish(self) -> None:
        """Rename the file to its final name and delete the journal."""
        os.fsync(self._file)
        os.replace(self._partial, self._path)
        self._journal.unlink(missing_ok=True)

    def _sha256(self, start: int, rows: int) -> str:
        digest, place, end = hashlib.sha256(), start * self._width, (start + rows) * self._width
        while place < end:
            part = os.pread(self._file, min(_READ, end - place), place)
            if not part:
                break
            digest.update(part)
            place += len(part)
        return digest.hexdigest()

    def _read_journal(self, restart: bool) -> None:
        try:
            facts = read_facts(self._journal)
        except FileNotFoundError:
            facts = []
        before = facts[0].get("begun") if facts else None
        if before != self._begun:
            if isinstance(before, dict) and not restart:
                changed = sorted(key for key in {*before, *self._begun} if before.get(key) != self._begun.get(key))
                raise ResumeError(
                    f"{self._path} was begun with another {', '.join(changed)} and cannot be resumed. Restore what it "
                    "was begun with, or name another folder."
                )
            self._partial.unlink(missing_ok=True)
            self._journal.unlink(missing_ok=True)
            append_fact(self._journal, {"begun": self._begun})
            return
        self._windows = {int(fact["window"]): str(fact["sha256"]) for fact in facts[1:] if "window" in fact}


def mapped(path: Path, rows: int, dim: int, dtype: torch.dtype) -> Tensor | None:
    """Map the matrix of a file into memory, copy on write; None if its size does not fit."""
    size = rows * dim * torch.empty(0, dtype=dtype).element_size()
    try:
        if path.stat().st_size != size:
            return None
    except OSError:
        return None
    if not size:
        return torch.empty(rows, dim, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=rows * dim, dtype=dtype).view(rows, dim)


@dataclass(frozen=True)
class Filling:
    """The computation of a matrix; ``key`` distinguishes it from another one that was begun at ``path``."""

    path: Path
    made: Rows
    dim: int
    key: str
    over: Over

    @property
    def parts(self) -> Path:
        """The folder of groups that are computed but not yet copied to the matrix."""
        return self.path.with_name(self.path.name + ".parts")

    def fill(self, file: Unfinished, encoding: OneSide, texts: Sequence[str], progress: Progress | None) -> None:
        """Compute the missing windows."""
        for window_at in range(0, len(texts), self.made.buffer_size):
            part = texts[window_at : window_at + self.made.buffer_size]
            if not file.has_window(window_at, len(part)):
                groups = WindowGroups(Window(encoding, part), window_at, self.made)
                self._window(file, groups, progress, len(texts))
            if progress is not None:
                progress(window_at + len(part), len(texts))
        self._forget_parts()

    def _window(self, file: Unfinished, groups: WindowGroups, progress: Progress | None, total: int) -> None:
        missing = [start for start in groups.starts if self._part(groups, start) is None]
        done = groups.window_at + len(groups) - sum(len(groups.rows(start)) for start in missing)
        for start, embedded in self.over(groups.piece(start) for start in missing):
            data = groups.spread(start, embedded).contiguous().view(torch.uint8).numpy().tobytes()
            name = f"{self._begins(groups, start)}{hashlib.sha256(data).hexdigest()}.part"
            write_whole(self.parts / name, data, owner_only=True)
            done += len(groups.rows(start))
            if progress is not None:
                progress(done, total)
        joined = torch.empty(len(groups), self.dim, dtype=self.made.dtype)
        for start in groups.starts:
            part = self._part(groups, start)
            if part is None:
                raise OSError(f"a part is missing from {self.parts}")
            joined[groups.rows(start)] = part
        file.write_window(groups.window_at, joined)
        self._forget_parts()

    def _part(self, groups: WindowGroups, start: int) -> Tensor | None:
        """Return the embeddings of a group that is on disk; ignore a torn file."""
        rows = len(groups.rows(start))
        for path in self.parts.glob(f"{self._begins(groups, start)}*.part"):
            data = path.read_bytes()
            if path.name.endswith(f"-{hashlib.sha256(data).hexdigest()}.part"):
                return torch.frombuffer(bytearray(data), dtype=self.made.dtype).view(rows, self.dim)
        return None

    def _begins(self, groups: WindowGroups, start: int) -> str:
        return f"{groups.window_at}-{start}-{self.key}-"

    def _forget_parts(self) -> None:
        """Remove all parts, including those of another matrix that was begun here."""
        shutil.rmtree(self.parts, ignore_errors=True)
