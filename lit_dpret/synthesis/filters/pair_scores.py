"""Score pairs of a query and a passage by a model, in this process or on the workers of a Ray cluster.

Each piece is computed separately, so its scores do not depend on the process that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from lit_dpret.distributed.ray_workers import device_named, ray_workers
from lit_dpret.encoders.embedding_cache import content_hash
from lit_dpret.errors import WorkerError

Piece = tuple[int, Sequence[str], Sequence[str]]
"""The number of a piece, its queries, and as many passages."""

Over = Callable[[Iterable[Piece]], Iterator[tuple[int, np.ndarray]]]
"""Function that yields the number of each piece and its scores, in any order."""

_BATCHES_PER_PIECE = 16


class PairScorer(Protocol):
    """A model that scores pairs, `CrossEncoder` or another."""

    model: Any

    def score(self, queries: Sequence[str], passages: Sequence[str], *, batch_size: int) -> Any: ...


@contextmanager
def pair_workers(
    load: Callable[[], PairScorer], source: str | Path, *, batch_size: int, workers: int = 0, device: str = "cpu"
) -> Iterator[Over]:
    """Yield a scorer of pieces of pairs by the model that ``load`` loads from ``source``, here or on ``workers``.

    Raises:
        ConfigurationError: This process has no such device, and there are no workers.
        WorkerError: Workers have different weights under the same name, or died.
    """
    if not workers:
        device_named(device)
        yield partial(map, partial(_scored, load(), batch_size))
        return
    with ray_workers(
        partial(_worker, load, batch_size), workers, device=device, threads=torch.get_num_threads()
    ) as over:

        def of_one_model(pieces: Iterable[Piece]) -> Iterator[tuple[int, np.ndarray]]:
            known = None
            for number, scores, weights in over(pieces):
                if known not in (None, weights):
                    raise WorkerError(f"{source} is not the same model on all workers. Copy the same files to each.")
                known = weights
                yield number, scores

        yield of_one_model


def score_pairs(
    queries: Sequence[str], passages: Sequence[str], over: Over, *, batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:  # fmt: skip
    """Return the score of each pair, shape ``(pairs,)``; ``progress`` is called with (pairs done, in total)."""
    # Long pairs first: this needs little padding, and running out of memory shows at once.
    order = sorted(range(len(queries)), key=lambda i: -len(queries[i]) - len(passages[i]))
    step, done = batch_size * _BATCHES_PER_PIECE, 0
    parts = {start: order[start : start + step] for start in range(0, len(order), step)}
    pieces = ((start, [queries[i] for i in rows], [passages[i] for i in rows]) for start, rows in parts.items())
    found = np.zeros(len(queries))
    for start, scores in over(pieces):
        found[parts[start]] = scores
        done += len(scores)
        if progress is not None:
            progress(done, len(queries))
    return found


def _scored(scorer: PairScorer, batch_size: int, piece: Piece) -> tuple[int, np.ndarray]:
    number, queries, passages = piece
    scores = scorer.score(queries, passages, batch_size=batch_size)
    return number, np.asarray(scores if isinstance(scores, np.ndarray) else scores.per_token())


def _worker(load: Callable[[], PairScorer], batch_size: int) -> Callable[[Piece], tuple[int, np.ndarray, str]]:
    scorer = load()
    weights = content_hash("", scorer.model.state_dict())
    return lambda piece: (*_scored(scorer, batch_size, piece), weights)
