"""Embeddings kept on disk, found again by what they were made from, and gone on with after a kill.

An entry's name is a hash of the weights, the contract, the vocabulary and the texts: train the
encoder a step, change a prefix or a text, and it is another entry. Nothing is ever stale, and
nothing has to be declared.

A matrix that takes hours to compute is written as it comes: rows into a file that has its final length
from the start, and after each group of rows, once they are on the disk, a line in a journal with their
SHA-256. Whoever comes back believes the journal only where the bytes agree, and computes the rest;
the groups are the same ones, so the finished file has the same bytes, however often it was begun.

Several ranks may share the work: each takes groups, and the first one writes them in their place. Another rank writes
each group into a file of its own beside the matrix, whole or not at all and named by its SHA-256; no two processes
ever write into one file, which not every shared file system can be trusted with. What a job that was stopped left
there is taken in by the next one, on however many ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_dpret.distributed.job import Job
from lit_dpret.encoders.bulk import BUFFER, OneSide, Progress, Window
from lit_dpret.errors import DataError, ResumeError, StorageError
from lit_dpret.files import append_fact, read_facts, write_whole

_BATCHES_PER_GROUP = 16
_READ = 2**24


def content_hash(facts: object, weights: Mapping[str, Tensor], texts: Iterable[str] = ()) -> str:
    """Return the SHA-256 over plain JSON facts, every weight's name, type, shape and bytes, and texts in order."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


def encode_to_file(
    encoding: OneSide,
    texts: Sequence[str],
    path: Path,
    *,
    dtype: torch.dtype,
    facts: Mapping[str, Any],
    batch_size: int = 64,
    buffer_size: int = BUFFER,
    restart: bool = False,
    progress: Progress | None = None,
    job: Job | None = None,
) -> None:
    """Write the embeddings of ``texts`` to ``path``, row after row; go on where an earlier call was stopped.

    Guarantees:
        - ``path`` appears whole or not at all, and has the bytes of a call by one process that was never
          interrupted, whatever the number of ranks (same machine and library versions).
        - Rows whose bytes are not those that the journal vouches for are computed again.

    Args:
        encoding: The encoder and the side.
        texts: The texts.
        path: The file; what is unfinished lies beside it as ``.partial``, ``.journal`` and ``.parts``.
        dtype: Of a number in the file.
        facts: What the content depends on, besides texts and batches: plain JSON values.
        batch_size: Texts per forward pass.
        buffer_size: Texts sorted together.
        restart: Begin again where something else was begun here, instead of refusing.
        progress: Called with (texts done, texts in all), on the ranks that give it.
        job: The ranks that share the work; each calls this with the same arguments, and all see the folder of
            ``path``. None for this process alone.

    Raises:
        DataError: An embedding holds a NaN or infinity.
        ResumeError: Something else was begun at ``path``.
        StorageError: The file cannot be written.
        WorkerError: Another rank died.
    """
    job = Job() if job is None else job
    begun = {  # everything that the bytes of the matrix depend on, as its journal keeps it
        **facts, "rows": len(texts), "dim": encoding.dim, "dtype": str(dtype).removeprefix("torch."),
        "batch_size": batch_size, "buffer_size": buffer_size,
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()[:16]
    matrix = SharedMatrix(job, path, dtype, encoding.dim, key)
    try:
        with ExitStack() as stack:
            opened: list[Unfinished] = []  # on the first rank alone
            job.share(lambda: opened.append(stack.enter_context(Unfinished(path, begun, restart=restart))))
            file = opened[0] if job.is_first else None
            stack.enter_context(encoding)
            matrix.fill(file, encoding, texts, batch_size=batch_size, buffer_size=buffer_size, progress=progress)
            if file is not None:
                file.finish()
                matrix.clear()
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"The embeddings {path} cannot be written: {error.strerror or error}. What is finished is kept: mend this "
            "and run the same command again."
        ) from error


class WindowGroups:
    """A window cut into the groups that are computed and vouched for at a time."""

    def __init__(self, window: Window, window_at: int, batch_size: int, dtype: torch.dtype) -> None:
        self._window, self.window_at, self._batch_size, self._dtype = window, window_at, batch_size, dtype
        self._order = window.places.argsort(stable=True)
        self._sorted_places = window.places[self._order]
        self._step = batch_size * _BATCHES_PER_GROUP
        self.starts = range(0, len(window), self._step)

    def rows(self, start: int) -> list[int]:
        """Return where the embeddings of a group belong among those of all texts."""
        return (self._places_of(start) + self.window_at).tolist()

    def end(self, start: int) -> int:
        """Return how many texts of the window are done with this group and those before it."""
        return int(torch.searchsorted(self._sorted_places, start + self._step))

    def embed(self, start: int) -> Tensor:
        """Return the embeddings of a group, in the order of ``rows``.

        Raises:
            DataError: One holds a NaN or infinity.
        """
        places = self._window.places[self._places_of(start)] - start
        found = self._window.embed(start, start + self._step, self._batch_size)[places]
        if broken := int((~found.isfinite()).any(dim=1).sum()):
            raise DataError(
                f"{broken} of {len(found)} embeddings hold a NaN or infinity. The encoder's weights are broken, or "
                "its precision is too low for it: choose float32 or bfloat16."
            )
        return found.to(self._dtype)

    def _places_of(self, start: int) -> Tensor:
        low = int(torch.searchsorted(self._sorted_places, start))
        return self._order[low : self.end(start)]


class Unfinished:
    """The file with its final length, and the journal of what of it is right."""

    def __init__(self, path: Path, begun: Mapping[str, Any], *, restart: bool) -> None:
        self._path, self._begun = path, dict(begun)
        self._partial, self._journal = path.with_name(path.name + ".partial"), path.with_name(path.name + ".journal")
        item = torch.empty(0, dtype=getattr(torch, str(begun["dtype"]))).element_size()
        self._width = int(begun["dim"]) * item
        path.parent.mkdir(parents=True, exist_ok=True)
        self._groups: dict[tuple[int, int], str] = {}
        self._windows: dict[int, str] = {}
        self._read_journal(restart)
        self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self._width * int(begun["rows"]))

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def has_window(self, start: int, rows: int) -> bool:
        """Return whether the rows of a window are all there, by their SHA-256."""
        return start in self._windows and self._windows[start] == self._sha256(start, rows)

    def vouch_for_window(self, start: int, rows: int) -> None:
        """Write down that the rows of a window are all there."""
        append_fact(self._journal, {"window": start, "sha256": self._sha256(start, rows)})

    def has_group(self, window: int, group: int, rows: Sequence[int]) -> bool:
        """Return whether these rows are there, by their SHA-256."""
        known = self._groups.get((window, group))
        if known is None:
            return False
        digest = hashlib.sha256()
        for row in rows:
            digest.update(os.pread(self._file, self._width, row * self._width))
        return digest.hexdigest() == known

    def write_group(self, window: int, group: int, rows: Sequence[int], embeddings: Tensor) -> None:
        """Write rows, wait until they are on the disk, and vouch for them."""
        data = embeddings.contiguous().view(torch.uint8).numpy()
        digest = hashlib.sha256()
        for row, line in zip(rows, data, strict=True):
            written = os.pwrite(self._file, line.data, row * self._width)
            if written != self._width:
                raise OSError(28, "No space left on device")
            digest.update(line.data)
        os.fsync(self._file)
        append_fact(self._journal, {"window": window, "group": group, "sha256": digest.hexdigest()})

    def finish(self) -> None:
        """Give the file its name and forget the journal."""
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
                    f"{self._path} was begun with another {', '.join(changed)} and cannot be gone on with. Restore it, "
                    "or give another folder."
                )
            self._partial.unlink(missing_ok=True)
            self._journal.unlink(missing_ok=True)
            append_fact(self._journal, {"begun": self._begun})
            return
        for fact in facts[1:]:
            if "group" in fact:
                self._groups[int(fact["window"]), int(fact["group"])] = str(fact["sha256"])
            elif "window" in fact:
                self._windows[int(fact["window"])] = str(fact["sha256"])


def mapped(path: Path, rows: int, dim: int, dtype: torch.dtype) -> Tensor | None:
    """Map the matrix of a file into memory, copy on write; None where it has another shape."""
    size = rows * dim * torch.empty(0, dtype=dtype).element_size()
    try:
        if path.stat().st_size != size:
            return None
    except OSError:
        return None
    if not size:
        return torch.empty(rows, dim, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=rows * dim, dtype=dtype).view(rows, dim)


_NAME = re.compile(r"(\d+)-(\d+)-([0-9a-f]{16})-([0-9a-f]{64})\.part")


@dataclass(frozen=True)
class SharedMatrix:
    """A matrix that several ranks fill.

    ``key`` tells it from another matrix that was begun at ``path``.
    """

    job: Job
    path: Path
    dtype: torch.dtype
    dim: int
    key: str

    @property
    def parts(self) -> Path:
        """Where the other ranks put what they made."""
        return self.path.with_name(self.path.name + ".parts")

    def fill(
        self,
        file: Unfinished | None,
        encoding: OneSide,
        texts: Sequence[str],
        *,
        batch_size: int,
        buffer_size: int,
        progress: Progress | None,
    ) -> None:
        """Make what is missing; ``file`` is the matrix on the first rank, and None on the others.

        Raises:
            DataError: An embedding holds a NaN or infinity.
            StorageError: A part cannot be written.
            WorkerError: Another rank died.
        """
        for window_at in range(0, len(texts), buffer_size):
            part = texts[window_at : window_at + buffer_size]
            there = self.job.share(partial(_has_window, file, window_at, len(part)))
            if not there:
                groups = WindowGroups(Window(encoding, part), window_at, batch_size, self.dtype)
                self._window(file, groups, progress, len(texts))
                if file is not None:
                    file.vouch_for_window(window_at, len(part))
            if progress is not None:
                progress(window_at + len(part), len(texts))

    def _window(self, file: Unfinished | None, groups: WindowGroups, progress: Progress | None, total: int) -> None:
        missing: list[int] = self.job.share(lambda: [] if file is None else self._missing(file, groups))
        made: list[str] = []

        def work() -> None:
            for start in self.job.deal(f"{self.path.name}-{groups.window_at}", missing):
                rows, found = groups.rows(start), groups.embed(start)
                if file is not None:
                    file.write_group(groups.window_at, start, rows, found)
                else:
                    made.append(self._write_part(groups.window_at, start, found))
                if progress is not None:
                    progress(min(total, groups.window_at + groups.end(start)), total)

        self.job.together(work)
        told = self.job.gather(made)
        if file is not None:
            self._take_in(file, groups, (name for names in told for name in names))

    def _missing(self, file: Unfinished, groups: WindowGroups) -> list[int]:
        """Return the groups of a window that are to be made, after what a stopped job left was taken in."""
        with suppress(OSError):
            self._take_in(file, groups, [path.name for path in sorted(self.parts.glob("*.part"))])
        return [start for start in groups.starts if not file.has_group(groups.window_at, start, groups.rows(start))]

    def _write_part(self, window: int, start: int, found: Tensor) -> str:
        data = found.contiguous().view(torch.uint8).numpy().tobytes()
        name = f"{window}-{start}-{self.key}-{hashlib.sha256(data).hexdigest()}.part"
        write_whole(self.parts / name, data, owner_only=True)
        return name

    def _take_in(self, file: Unfinished, groups: WindowGroups, names: Iterator[str] | Sequence[str]) -> None:
        """Put parts of this window in their place; one that is torn or of something else is forgotten."""
        for name in names:
            known = _NAME.fullmatch(name)
            if known is None or known[3] != self.key or int(known[1]) != groups.window_at:
                continue
            path, start = self.parts / name, int(known[2])
            data = path.read_bytes()
            rows = groups.rows(start) if start in groups.starts else []
            whole = hashlib.sha256(data).hexdigest() == known[4]
            fits = len(data) == len(rows) * self.dim * torch.empty(0, dtype=self.dtype).element_size()
            if whole and rows and fits and not file.has_group(groups.window_at, start, rows):
                found = torch.frombuffer(bytearray(data), dtype=self.dtype).view(len(rows), self.dim)
                file.write_group(groups.window_at, start, rows, found)
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what is left of the parts: nothing of this matrix."""
        with suppress(OSError):
            for path in self.parts.glob("*.part"):
                path.unlink(missing_ok=True)
            self.parts.rmdir()


def _has_window(file: Unfinished | None, window_at: int, rows: int) -> bool:
    return file is not None and file.has_window(window_at, rows)
