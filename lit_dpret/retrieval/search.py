"""Exact nearest neighbours, streamed, in an order that is always the same.

What a score *is* does not depend on how it was computed: the dot product of two embeddings in
float64, rounded to float32. A fast float32 matrix product finds the few candidates that can matter,
those are scored again pair by pair, and a bound on the rounding error of the matrix product proves
that none was missed; where it cannot prove that (many passages with nearly equal scores), that
query is looked through once more with a wider net. So the answer is the same for every chunk size,
device and order of the passages, and ties fall as trec_eval lets them fall: by passage id,
descending.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError

Similarity = Literal["dot", "cosine"]

MISSING = -1
"""The index that fills a row when there are fewer than k passages to return."""

_CPU_BLOCK = 4 * 2**20  # bytes that a cache holds
_DEVICE_BLOCK = 256 * 2**20  # bytes that keep an accelerator busy
_UNIT_ROUNDOFF = 2.0**-24


class TopK(NamedTuple):
    """The best passages of every query, best first.

    ``scores`` is float32 of shape ``(queries, k)``, ``indices`` long of the same shape: positions in
    the list of passages, `MISSING` (with score -inf) where there are no more passages.
    """

    scores: Tensor
    indices: Tensor


def lexicographic_rank(passage_ids: Sequence[str]) -> Tensor:
    """For every passage its place in the order that breaks ties: ids descending, as bytes.

    Of two passages with equal scores trec_eval puts the one with the larger id first, comparing
    UTF-8 bytes. Compute this once per corpus.

    Example:
        >>> lexicographic_rank(["d1", "d10", "d2"])
        tensor([2, 1, 0])

    Returns:
        Long, shape ``(passages,)``; 0 for the passage that wins every tie.

    Raises:
        DataError: An id occurs twice.
    """
    keys = [name.encode("utf-8") for name in passage_ids]
    order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
    for before, after in pairwise(order):
        if keys[before] == keys[after]:
            raise DataError(f"passage id {passage_ids[before]!r} occurs twice; ids must be unique.")
    rank = torch.empty(len(keys), dtype=torch.long)
    rank[torch.tensor(order, dtype=torch.long)] = torch.arange(len(keys))
    return rank


def search(
    query_embeddings: Tensor,
    passage_embeddings: Tensor,
    k: int,
    *,
    tie_rank: Tensor | None = None,
    similarity: Similarity = "dot",
    exclude: Tensor | None = None,
    query_chunk: int = 1024,
    passage_chunk: int = 50_000,
    device: torch.device | str | None = None,
) -> TopK:
    """The ``k`` passages with the highest score for every query.

    Guarantees:
        - Scores are float64 dot products rounded to float32, and the passages returned are the first
          k under (score descending, ``tie_rank`` ascending): exact, ties included.
        - Scores and indices do not depend on the chunk sizes.
        - No more than ``query_chunk x passage_chunk`` scores are held at a time.

    Args:
        query_embeddings: Shape ``(queries, dim)``.
        passage_embeddings: Shape ``(passages, dim)``; may lie on another device than the one
            searched on, and is moved there chunk by chunk.
        k: How many passages to return for each query; positive.
        tie_rank: `lexicographic_rank` of the passage ids; without it the earlier passage wins a tie.
        similarity: ``dot``, or ``cosine`` to normalise both sides first.
        exclude: For every query the index of one passage not to return, `MISSING` for none; for
            collections whose queries are passages themselves. Long, shape ``(queries,)``.
        query_chunk: Queries per matrix product.
        passage_chunk: Passages per matrix product.
        device: Where to compute; where the queries are, by default.

    Returns:
        Scores and indices on the CPU, exactly ``k`` columns.

    Raises:
        ConfigurationError: k or a chunk size is not positive, or shapes do not fit.
        DataError: An embedding is not finite.
    """
    for name, value in (("k", k), ("query_chunk", query_chunk), ("passage_chunk", passage_chunk)):
        if value < 1:
            raise ConfigurationError(f"{name}={value} must be at least 1.")
    _check(query_embeddings, passage_embeddings, similarity, tie_rank, exclude)
    where = torch.device(device) if device is not None else query_embeddings.device
    queries, passages = len(query_embeddings), len(passage_embeddings)
    rank = torch.arange(passages) if tie_rank is None else tie_rank.cpu()
    scores = torch.full((queries, k), float("-inf"))
    indices = torch.full((queries, k), MISSING, dtype=torch.long)
    if not passages:
        return TopK(scores, indices)
    corpus = _Corpus(passage_embeddings, rank, similarity, passage_chunk, where)
    with torch.inference_mode(), _exact_float32(where):
        for start in range(0, queries, query_chunk):
            chunk = slice(start, min(start + query_chunk, queries))
            skip = None if exclude is None else exclude[chunk].cpu()
            found = corpus.best(_prepared(query_embeddings[chunk].to(where).double(), similarity), k, skip)
            scores[chunk, : found.scores.shape[1]] = found.scores
            indices[chunk, : found.indices.shape[1]] = found.indices
    return TopK(scores, indices)


class _Corpus:
    """The passages, ready to be searched by one chunk of queries after another."""

    def __init__(
        self, embeddings: Tensor, rank: Tensor, similarity: Similarity, chunk: int, device: torch.device
    ) -> None:
        self.embeddings, self.rank, self.similarity = embeddings, rank, similarity
        self.chunk, self.device = chunk, device
        self.longest = max(float(torch.linalg.vector_norm(part, dim=1).max()) for _, part in self.parts())

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, len(self.embeddings), self.chunk):
            part = self.embeddings[start : start + self.chunk].to(self.device)
            yield start, _prepared(part.float(), self.similarity)

    def rows(self, indices: Tensor) -> Tensor:
        """The passages at ``indices``, float64, on the device."""
        picked = self.embeddings[indices.to(self.embeddings.device)].to(self.device)
        return _prepared(picked.double(), self.similarity)

    def best(self, queries: Tensor, k: int, skip: Tensor | None) -> TopK:
        """The first ``k`` (or all) passages of each of these queries (float64, prepared)."""
        passages = len(self.embeddings)
        wanted = min(k + (skip is not None), passages)
        width = min(wanted + max(64, wanted // 8), passages)
        approximate, candidates = self._candidates(queries.float(), width)
        scores = self._rescored(queries, candidates)
        scores, candidates = _ordered(scores, candidates, self.rank)
        if width < passages:
            slack = self._slack(queries)
            proven = scores[:, wanted - 1].double() > approximate.double() + slack
            for row in torch.nonzero(~proven).flatten().tolist():
                wide = self._wide(queries[row], float(scores[row, wanted - 1]), float(slack[row]))
                again, places = _ordered(self._rescored(queries[row : row + 1], wide[None]), wide[None], self.rank)
                scores[row, :wanted], candidates[row, :wanted] = again[0, :wanted], places[0, :wanted]
        scores, candidates = scores[:, :wanted], candidates[:, :wanted]
        if skip is not None:
            scores, candidates = _without(scores, candidates, skip)
        return TopK(scores[:, :k], candidates[:, :k])

    def _candidates(self, queries: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The ``width`` best by matrix product: the last one's score, and all their indices."""
        scores = queries.new_empty((len(queries), 0))
        indices = torch.empty((len(queries), 0), dtype=torch.long, device=queries.device)
        for start, part in self.parts():
            fresh, places = (queries @ part.T).topk(min(width, len(part)), dim=1)
            scores, indices = torch.cat([scores, fresh], dim=1), torch.cat([indices, places + start], dim=1)
            if scores.shape[1] > width:
                scores, places = scores.topk(width, dim=1)
                indices = indices.gather(1, places)
        return scores.amin(dim=1).cpu(), indices.cpu()

    def _rescored(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """The definition of a score, pair by pair; float32 on the CPU, shaped as ``candidates``."""
        width = candidates.shape[1]
        budget = _CPU_BLOCK if self.device.type == "cpu" else _DEVICE_BLOCK
        pairs = max(1, budget // (16 * queries.shape[1]))
        rows, columns = max(1, pairs // width), min(width, pairs)
        scores = torch.empty(candidates.shape, dtype=torch.float32)
        for row in range(0, len(queries), rows):
            for column in range(0, width, columns):
                block = slice(row, row + rows), slice(column, column + columns)
                passages = self.rows(candidates[block].reshape(-1)).view(*candidates[block].shape, -1)
                scores[block] = (passages * queries[row : row + rows, None, :]).sum(dim=-1).float().cpu()
        return scores

    def _slack(self, queries: Tensor) -> Tensor:
        """Twice what a float32 dot product of this length can be wrong by, for each query."""
        dim = queries.shape[1]
        relative = 4.0 * (dim + 4) * _UNIT_ROUNDOFF
        lengths: Tensor = torch.linalg.vector_norm(queries, dim=1)
        return lengths.mul(relative * self.longest).add(1e-37).cpu()

    def _wide(self, query: Tensor, floor: float, slack: float) -> Tensor:
        """Every passage that can reach ``floor``, by index."""
        kept = [
            torch.nonzero(part @ query.float() >= floor - slack).flatten().cpu() + start for start, part in self.parts()
        ]
        return torch.cat(kept)


def top_k_of(scores: Tensor, k: int, tie_rank: Tensor) -> TopK:
    """The first ``k`` of one full row of float32 scores, ties by ``tie_rank``.

    Args:
        scores: One score per passage, shape ``(passages,)``.
        k: How many; the answer is shorter when there are fewer passages.
        tie_rank: `lexicographic_rank` of the passage ids.

    Returns:
        Scores and indices of shape ``(1, min(k, passages))``.
    """
    k = min(k, len(scores))
    floor = scores.topk(k).values[-1] if k else 0.0
    kept = torch.nonzero(scores >= floor).flatten()
    ordered, places = _ordered(scores[kept][None], kept[None], tie_rank)
    return TopK(ordered[:, :k], places[:, :k])


def _ordered(scores: Tensor, indices: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """Each row sorted by score descending, equal scores by rank ascending."""
    by_rank = rank[indices].argsort(dim=1)
    scores, indices = scores.gather(1, by_rank), indices.gather(1, by_rank)
    scores, by_score = scores.sort(dim=1, descending=True, stable=True)
    return scores, indices.gather(1, by_score)


def _without(scores: Tensor, indices: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows with each row's skipped passage moved behind the end."""
    hit = indices == skip[:, None]
    back = hit.to(torch.int8).argsort(dim=1, stable=True)
    scores = scores.masked_fill(hit, float("-inf")).gather(1, back)
    return scores, indices.masked_fill(hit, MISSING).gather(1, back)


def _prepared(embeddings: Tensor, similarity: Similarity) -> Tensor:
    return F.normalize(embeddings, dim=-1) if similarity == "cosine" else embeddings


def _check(queries: Tensor, passages: Tensor, similarity: str, tie_rank: Tensor | None, exclude: Tensor | None) -> None:
    if similarity not in get_args(Similarity):
        raise ConfigurationError(f"similarity={similarity!r} is not one of {', '.join(get_args(Similarity))}.")
    if queries.ndim != 2 or passages.ndim != 2 or queries.shape[1] != passages.shape[1]:
        raise ConfigurationError(
            f"Embeddings of shapes {tuple(queries.shape)} and {tuple(passages.shape)} are not (queries, dim) and "
            "(passages, dim) of one model."
        )
    for name, value, length in (("tie_rank", tie_rank, len(passages)), ("exclude", exclude, len(queries))):
        if value is not None and value.shape != (length,):
            raise ConfigurationError(f"{name} has shape {tuple(value.shape)}, not {(length,)}.")
    for side, embeddings in (("query", queries), ("passage", passages)):
        rows = range(0, len(embeddings), 65_536)
        broken = sum(int((~embeddings[row : row + 65_536].isfinite()).any(dim=1).sum()) for row in rows)
        if broken:
            raise DataError(f"{broken} of {len(embeddings)} {side} embeddings hold a NaN or infinity.")


@contextmanager
def _exact_float32(device: torch.device) -> Iterator[None]:
    """Matrix products in true float32, whatever precision the surrounding run has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
