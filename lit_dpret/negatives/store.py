"""What was mined, on disk: in shards that appear whole or not at all, under a name made of the content.

A ranking of the public passages for a private query says what was asked, so the store is as private as the
queries. It is named and permitted accordingly, and under a privacy mode it is refused anywhere but in a
folder whose path says that it is private.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_dpret.errors import ConfigurationError, StorageError
from lit_dpret.files import write_whole

SCHEMA = "lit-dpret/mined-negatives/1"
PRIVATE = "private"
_WARNING = (
    "Rankings of public passages for private queries, from which the queries can be guessed. They are as private as "
    "the\nqueries: do not publish them with a model.\n"
)


@dataclass(frozen=True, repr=False)
class Mined:
    """The best passages of consecutive queries, and the scores of those that answer them.

    Attributes:
        places: The best first, int32, ``(queries, depth)``; -1 where there are no more.
        scores: Theirs, float32, of the same shape.
        starts: Where each query's answers begin in the two below, ``(queries + 1,)``.
        answer_places: Places of the passages that answer, int32.
        answer_scores: Their scores, float32.
    """

    places: NDArray[np.int32]
    scores: NDArray[np.float32]
    starts: NDArray[np.int64]
    answer_places: NDArray[np.int32]
    answer_scores: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.places)

    def score_of(self, query: int, place: int) -> float:
        """The score of one of a query's answers; NaN for any other passage."""
        span = slice(self.starts[query], self.starts[query + 1])
        at = np.flatnonzero(self.answer_places[span] == place)
        return float(self.answer_scores[span][at[0]]) if len(at) else float("nan")

    @classmethod
    def join(cls, parts: list[Mined]) -> Mined:
        """Consecutive parts as one."""
        before = np.cumsum([0, *(len(part.answer_places) for part in parts)])
        starts = [part.starts[:-1] + offset for part, offset in zip(parts, before, strict=False)]
        return cls(
            np.concatenate([part.places for part in parts]),
            np.concatenate([part.scores for part in parts]),
            np.concatenate([*starts, before[-1:]]),
            np.concatenate([part.answer_places for part in parts]),
            np.concatenate([part.answer_scores for part in parts]),
        )


class ShardStore:
    """The shards of one mining: a folder with a file for each range of queries.

    Guarantees:
        - A file that has its name is whole: it was written under another one and renamed.
        - Files of any sizes together are one mining, so another ``shard_size`` goes on with them.
        - A file that cannot be read is taken for missing.

    Args:
        cache_dir: The folder that holds minings.
        name: Of the source.
        key: What the mining is made of, or which run and epoch it belongs to.
        count: How many queries it has.
        private: Whether the queries are private; then name and permissions of the folder say so.

    Raises:
        StorageError: The folder cannot be made.
    """

    def __init__(self, cache_dir: Path, *, name: str, key: str, count: int, private: bool) -> None:
        self.folder = cache_dir / f"{PRIVATE if private else 'public'}-{name}-{key[:24]}"
        self._count = count
        try:
            if not private:
                self.folder.mkdir(parents=True, exist_ok=True)
            else:
                _make_private(self.folder)
                (self.folder / "README.txt").write_text(_WARNING, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be made: {error.strerror}. Choose another cache_dir.") from error

    def missing(self, size: int) -> Iterator[range]:
        """The queries that no shard covers, in ranges of at most ``size``."""
        at = 0
        for start, stop in [*((span.start, span.stop) for span, _ in self._shards()), (self._count, self._count)]:
            while at < start:
                yield range(at, min(at + size, start))
                at = min(at + size, start)
            at = max(at, stop)

    def write(self, span: range, part: Mined) -> None:
        """Add a shard.

        Raises:
            StorageError: It cannot be written; those before it are kept.
        """
        path = self._path(span)
        content = io.BytesIO()
        np.savez(content, schema=np.array(SCHEMA), **vars(part))
        advice = "What was mined is kept: mend this and run the same command again."
        write_whole(path, content.getvalue(), advice=advice, owner_only=True)

    def read(self) -> Mined:
        """All shards as one mining; none is missing."""
        return Mined.join([part for _, part in self._shards()])

    def tidy(self) -> None:
        """Remove what was kept beside the shards while they were mined: embeddings, as private as the queries."""
        for path in self.folder.iterdir():
            if path.suffix not in (".npz", ".txt"):
                path.unlink(missing_ok=True)

    def _shards(self) -> Iterator[tuple[range, Mined]]:
        """The readable shards in order, none overlapping the one before."""
        names = [path.stem.partition("-") for path in self.folder.glob("*.npz")]
        stop = 0
        for first, last in sorted((int(a), int(b)) for a, _, b in names if a.isdigit() and b.isdigit()):
            part = self._read(range(first, last)) if first >= stop else None
            if part is not None:
                yield range(first, last), part
                stop = last

    def _read(self, span: range) -> Mined | None:
        try:
            with np.load(self._path(span), allow_pickle=False) as file:
                part = Mined(**{name: file[name] for name in Mined.__dataclass_fields__})
                return part if str(file["schema"]) == SCHEMA and len(part) == len(span) else None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None

    def _path(self, span: range) -> Path:
        return self.folder / f"{span.start:09}-{span.stop:09}.npz"


def _make_private(folder: Path) -> None:
    """Make a folder that its owner alone can read, and those above it that are missing likewise: names are hashes."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)


def check_private_place(folder: Path, knob: str) -> None:
    """Refuse to keep what was mined for private queries where its path does not say that it is private.

    Raises:
        ConfigurationError: No part of the path is called ``private``.
    """
    if PRIVATE not in folder.parts:
        raise ConfigurationError(
            f"{knob}={folder} would hold rankings for private queries, as private as they are. Name a folder in whose "
            f"path one part is {PRIVATE!r}, as RUN/{PRIVATE}/negatives, or set it to null to keep none."
        )
