"""One matrix of embeddings made by several ranks: each takes groups of texts, the first one puts them in their place.

The groups are those of `encode_to_file`, so the file has its bytes. A rank other than the first writes each group into
a file of its own beside the matrix, whole or not at all and named by its SHA-256; no two processes ever write
into one file, which not every shared file system can be trusted with. What a job that was stopped left there is
taken in by the next one, on however many ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_dpret.distributed.crew import Crew
from lit_dpret.encoders.bulk import BUFFER, Encoding, Progress, Window
from lit_dpret.encoders.embedding_cache import Unfinished, WindowGroups, begun_facts, encode_to_file, storing
from lit_dpret.files import write_whole

_NAME = re.compile(r"(\d+)-(\d+)-([0-9a-f]{16})-([0-9a-f]{64})\.part")


@dataclass(frozen=True)
class CrewMatrix:
    """A matrix that a crew fills.

    Args:
        crew: The ranks.
        path: Of the matrix.
        dtype: Of a number in it.
        dim: The width of an embedding.
        key: Tells this matrix from another one that was begun here.
    """

    crew: Crew
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
        encoding: Encoding,
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
            there = self.crew.share(partial(_has_window, file, window_at, len(part)))
            if not there:
                groups = WindowGroups(Window(encoding, part), window_at, batch_size, self.dtype)
                self._window(file, groups, progress, len(texts))
                if file is not None:
                    file.vouch_for_window(window_at, len(part))
            if progress is not None:
                progress(window_at + len(part), len(texts))

    def _window(self, file: Unfinished | None, groups: WindowGroups, progress: Progress | None, total: int) -> None:
        missing: list[int] = self.crew.share(lambda: [] if file is None else self._missing(file, groups))
        made: list[str] = []

        def work() -> None:
            for start in self.crew.deal(f"{self.path.name}-{groups.window_at}", missing):
                rows, found = groups.rows(start), groups.embed(start)
                if file is not None:
                    file.write_group(groups.window_at, start, rows, found)
                else:
                    made.append(self._write_part(groups.window_at, start, found))
                if progress is not None:
                    progress(min(total, groups.window_at + groups.end(start)), total)

        self.crew.together(work)
        told = self.crew.gather(made)
        if file is not None:
            self._take_in(file, groups, (name for names in told for name in names))

    def _missing(self, file: Unfinished, groups: WindowGroups) -> list[int]:
        """The groups of a window that are to be made, after what a stopped job left was taken in."""
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


def encode_with_crew(
    crew: Crew,
    encoding: Encoding,
    texts: Sequence[str],
    path: Path,
    *,
    dtype: torch.dtype,
    facts: Mapping[str, Any],
    batch_size: int = 64,
    buffer_size: int = BUFFER,
    progress: Progress | None = None,
) -> None:
    """Write the embeddings of ``texts`` to ``path`` as `encode_to_file` does, with all ranks of a crew.

    Guarantees:
        - The file has the bytes that one process would write, whatever the number of ranks, also if a job was
          stopped and another number of ranks went on (same machine and library versions).

    Args:
        crew: The ranks; each calls this with the same arguments, and all see the folder of ``path``.
        encoding: As for `encode_to_file`, as are the others.
        texts: The texts.
        path: The file.
        dtype: Of a number in it.
        facts: What the content depends on.
        batch_size: Texts per forward pass.
        buffer_size: Texts sorted together.
        progress: Called with (texts done, texts in all) on the ranks that give it.

    Raises:
        DataError: An embedding holds a NaN or infinity.
        ResumeError: Something else was begun at ``path``.
        StorageError: The file cannot be written.
        WorkerError: Another rank died.
    """
    if crew.size == 1 and not path.with_name(path.name + ".parts").exists():
        encode_to_file(
            encoding, texts, path, dtype=dtype, facts=facts, batch_size=batch_size, buffer_size=buffer_size,
            progress=progress,
        )  # fmt: skip
        return
    begun = begun_facts(encoding, texts, dtype, facts, batch_size=batch_size, buffer_size=buffer_size)
    key = hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()[:16]
    matrix = CrewMatrix(crew, path, dtype, encoding.dim, key)
    with storing(path), ExitStack() as stack:
        file = _on_first(crew, lambda: stack.enter_context(Unfinished(path, begun, restart=False)))
        stack.enter_context(encoding)
        matrix.fill(file, encoding, texts, batch_size=batch_size, buffer_size=buffer_size, progress=progress)
        if file is not None:
            file.finish()
            matrix.clear()


def _has_window(file: Unfinished | None, window_at: int, rows: int) -> bool:
    return file is not None and file.has_window(window_at, rows)


def _on_first(crew: Crew, work: Callable[[], Unfinished]) -> Unfinished | None:
    """What ``work`` opens on the first rank; None on the others, once it is open."""
    opened: list[Unfinished] = []

    def remember() -> None:
        opened.append(work())

    crew.share(remember)
    return opened[0] if crew.is_first else None
