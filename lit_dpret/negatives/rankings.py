"""The best passages of every train query, in shards, resumable after an interruption."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.errors import ConfigurationError, StorageError
from lit_dpret.files import write_whole
from lit_dpret.negatives.base import Towers, TrainTexts
from lit_dpret.progress import ProgressLine
from lit_dpret.retrieval.bm25 import BM25, BM25Settings
from lit_dpret.retrieval.rows import TensorRows
from lit_dpret.retrieval.scores import canonical_scores
from lit_dpret.retrieval.search import MISSING, TopK, lexicographic_rank, search, unbroken

Ranker = Callable[[range], tuple[TopK, list[Tensor]]]
"""Ranks a range of queries; returns their best passages, and the scores of the passages that answer each."""


def mine(
    rank: Callable[[], Ranker],
    texts: TrainTexts,
    *,
    label: str,
    shard_size: int,
    store: MinedShards | None,
    private: bool,
) -> Mined:
    """Return the best passages of every train query.

    Guarantees:
        - A query's entry is a function of that query and of the passages: the same for any ``shard_size`` and
          however often the work was interrupted.
        - Existing shards are not mined again, and ``rank`` is not called if none is missing.
        - For ``private`` queries only begin and end are reported: a share after each shard would reveal how many
          there are.
    """
    total = len(texts.queries)
    if store is None:
        spans = [range(start, min(start + shard_size, total)) for start in range(0, total, shard_size)]
    else:
        spans = list(store.missing(shard_size))
    parts: list[Mined] = []
    if spans:
        ranker = rank()
        done = total - sum(map(len, spans))
        with ProgressLine(label) as progress:
            if private:
                progress(0, 1)
            for span in spans:
                part = _packed(span, *ranker(span), texts)
                if store is None:
                    parts.append(part)
                else:
                    store.write(span, part)
                done += len(span)
                if not private:
                    progress(done, total)
            if private:
                progress(1, 1)
    if store is None:
        return Mined.join(parts)
    store.tidy()
    return store.read()


def bm25_ranker(texts: TrainTexts, *, depth: int, settings: BM25Settings) -> Ranker:
    """Return a ranker by words: it ranks every passage that shares a word with the query."""
    index = BM25(texts.passages, texts.passage_ids, **asdict(settings))
    depth = min(depth, len(texts.passages))

    def rank(span: range) -> tuple[TopK, list[Tensor]]:
        queries = [texts.queries[i] for i in span]
        return index.search_and_score(queries, depth, [texts.positives(i) for i in span])

    return rank


def dense_ranker(texts: TrainTexts, towers: Towers, *, depth: int, store: MinedShards | None) -> Ranker:
    """Return a ranker by the encoders; it encodes all queries at once, so that embeddings do not depend on shards."""
    folder = None if store is None else store.folder
    passages = towers.embeddings(texts.passages, "passage", folder)
    queries = towers.embeddings(texts.queries, "query", folder)
    tie_rank, depth = lexicographic_rank(texts.passage_ids), min(depth, len(passages))

    def rank(span: range) -> tuple[TopK, list[Tensor]]:
        some = queries[span.start : span.stop]
        answers = [texts.positives(i) for i in span]
        width = max(map(len, answers), default=0)
        filled = torch.tensor([[*a, *[MISSING] * (width - len(a))] for a in answers], dtype=torch.long)
        scores = canonical_scores(some.double(), TensorRows(passages), filled.view(len(answers), width), cosine=False)
        scored = [row[: len(a)] for row, a in zip(scores, answers, strict=True)]
        return search(some, passages, depth, tie_rank=tie_rank, device=towers.device), scored

    return rank


def silenced(queries: Tensor) -> Tensor:
    """Return embeddings of private queries, with unusable ones set to zero.

    Such a query gets the first passages of the list, its loss is not finite, and it counts for nothing. An error
    would reveal that the query is there.
    """
    return torch.where(unbroken(queries)[:, None], queries, torch.zeros_like(queries))


def _packed(span: range, top: TopK, scored: list[Tensor], texts: TrainTexts) -> Mined:
    answers = [texts.positives(i) for i in span]
    return Mined(
        top.indices.numpy().astype(np.int32),
        top.scores.numpy(),
        np.cumsum([0, *map(len, answers)]),
        np.array([place for places in answers for place in places], dtype=np.int32),
        torch.cat([torch.empty(0), *scored]).numpy().astype(np.float32),
    )


SCHEMA = "lit-dpret/mined-negatives/1"
PRIVATE = "private"
_WARNING = (
    "Rankings of public passages for private queries, from which the queries can be guessed. They are as private as "
    "the\nqueries: do not publish them with a model.\n"
)


@dataclass(frozen=True, repr=False)
class Mined:
    """The best passages of consecutive queries, and the scores of their answers."""

    places: NDArray[np.int32]  # indices of passages, best first, ``(queries, depth)``; -1 if there are no more
    scores: NDArray[np.float32]  # their scores, of the same shape
    starts: NDArray[np.int64]  # where each query's answers begin in the two arrays below, ``(queries + 1,)``
    answer_places: NDArray[np.int32]  # indices of the passages that answer
    answer_scores: NDArray[np.float32]  # their scores

    def __len__(self) -> int:
        return len(self.places)

    def score_of(self, query: int, place: int) -> float:
        """Return the score of one of a query's answers; NaN for other passages."""
        span = slice(self.starts[query], self.starts[query + 1])
        at = np.flatnonzero(self.answer_places[span] == place)
        return float(self.answer_scores[span][at[0]]) if len(at) else float("nan")

    @classmethod
    def join(cls, parts: list[Mined]) -> Mined:
        """Join consecutive parts."""
        before = np.cumsum([0, *(len(part.answer_places) for part in parts)])
        starts = [part.starts[:-1] + offset for part, offset in zip(parts, before, strict=False)]
        return cls(
            np.concatenate([part.places for part in parts]),
            np.concatenate([part.scores for part in parts]),
            np.concatenate([*starts, before[-1:]]),
            np.concatenate([part.answer_places for part in parts]),
            np.concatenate([part.answer_scores for part in parts]),
        )


class MinedShards:
    """The shards of one mining, which ``key`` identifies: a folder with a file for each range of queries.

    A ranking of public passages for a private query reveals the query, so the folder's name and permissions are then
    private. A file with its final name is whole; an unreadable one counts as missing. Files of different sizes can form
    one mining, so a run with another ``shard_size`` continues it.
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
            raise StorageError(
                f"{self.folder} cannot be created: {error.strerror}. Choose another cache_dir."
            ) from error

    def missing(self, size: int) -> Iterator[range]:
        """Yield the queries without a shard, in ranges of at most ``size``."""
        at = 0
        for start, stop in [*((span.start, span.stop) for span, _ in self._shards()), (self._count, self._count)]:
            while at < start:
                yield range(at, min(at + size, start))
                at = min(at + size, start)
            at = max(at, stop)

    def write(self, span: range, part: Mined) -> None:
        """Add a shard."""
        path = self._path(span)
        content = io.BytesIO()
        np.savez(content, schema=np.array(SCHEMA), **vars(part))
        advice = "What was mined is kept: fix this and run the same command again."
        write_whole(path, content.getvalue(), advice=advice, owner_only=True)

    def read(self) -> Mined:
        """Return all shards as one mining; none may be missing."""
        return Mined.join([part for _, part in self._shards()])

    def tidy(self) -> None:
        """Remove temporary files next to the shards: embeddings, which are as private as the queries."""
        for path in self.folder.iterdir():
            if path.suffix not in (".npz", ".txt"):
                path.unlink(missing_ok=True)

    def _shards(self) -> Iterator[tuple[range, Mined]]:
        """Yield the readable shards in order, skipping any that overlaps the one before."""
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
    """Make a folder, and its missing parents, that only the owner can read: names are hashes."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)


def check_private_place(folder: Path, knob: str) -> None:
    """Refuse to store rankings of private queries in a folder whose path is not marked private."""
    if PRIVATE not in folder.parts:
        raise ConfigurationError(
            f"{knob}={folder} would hold rankings for private queries, which are as private as the queries. Name a "
            f"folder whose path has a part {PRIVATE!r}, such as RUN/{PRIVATE}/negatives, or set it to null to keep "
            "none."
        )
