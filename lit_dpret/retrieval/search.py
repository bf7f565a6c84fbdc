"""Exact nearest neighbours, streamed, in an order that is always the same.

What a score *is* does not depend on how it was computed: the dot product of two embeddings in
float64, rounded to float32. A fast float32 matrix product finds the few candidates that can matter,
those are scored again pair by pair, and a bound on the rounding error of the matrix product proves
that none was missed; where it cannot prove that (many passages with nearly equal scores), that
query is looked through once more with a wider net. So the answer is the same for every chunk size,
device, number of shards and order of the passages, and ties fall as trec_eval lets them fall: by
passage id, descending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.candidates import CandidateBuffer
from lit_dpret.retrieval.rescoring import canonical_scores
from lit_dpret.retrieval.rows import Rows, as_rows
from lit_dpret.retrieval.threads import rows_in_parallel
from lit_dpret.retrieval.topk import (
    EMPTY,
    MISSING,
    NO_RANK,
    TopK,
    ascending,
    keyed,
    lexicographic_rank,
    merged,
    places_by_rank,
    ranked,
    smallest,
    top_k_of,
    unpacked,
)

__all__ = [
    "MISSING",
    "SearchStream",
    "Similarity",
    "TopK",
    "lexicographic_rank",
    "merged",
    "search",
    "top_k_of",
]

Similarity = Literal["dot", "cosine"]

_UNIT_ROUNDOFF = 2.0**-24
_CPU_BLOCK = 4096  # passages whose scores stay in a processor's cache
_BUFFER_BYTES = 256 * 2**20  # of candidates, for the queries that are searched together


def search(
    query_embeddings: Tensor,
    passage_embeddings: Tensor | Rows,
    k: int,
    *,
    tie_rank: Tensor | None = None,
    similarity: Similarity = "dot",
    exclude: Tensor | None = None,
    query_chunk: int = 1024,
    passage_chunk: int = 16_384,
    device: torch.device | str | None = None,
) -> TopK:
    """The ``k`` passages with the highest score for every query.

    Guarantees:
        - Scores are float64 dot products rounded to float32, and the passages returned are the first
          k under (score descending, ``tie_rank`` ascending): exact, ties included.
        - Scores and indices do not depend on the chunk sizes.
        - No more than ``query_chunk x passage_chunk`` scores are held at a time, and of passages in a
          file (`FileRows`) little more than a chunk: memory does not grow with the corpus, but for
          16 bytes of a passage's rank.

    Args:
        query_embeddings: Shape ``(queries, dim)``.
        passage_embeddings: Shape ``(passages, dim)``; may lie on another device than the one
            searched on, or in a file, and is moved there chunk by chunk.
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
    rows = as_rows(passage_embeddings)
    require_positive(k=k, query_chunk=query_chunk, passage_chunk=passage_chunk)
    _check_shapes(query_embeddings, rows, len(rows), similarity, tie_rank, exclude)
    width = min(_net(k), max(1, len(rows)))
    together = max(query_chunk, _BUFFER_BYTES // (32 * width))
    found = []
    for start in range(0, len(query_embeddings), together):
        part = slice(start, start + together)
        stream = SearchStream(
            query_embeddings[part],
            k,
            tie_rank=torch.arange(len(rows)) if tie_rank is None else tie_rank,
            similarity=similarity,
            exclude=None if exclude is None else exclude[part],
            query_chunk=query_chunk,
            passage_chunk=passage_chunk,
            device=device,
        )
        stream.add(rows)
        found.append(stream.result())
    if not found:
        return TopK(torch.empty(0, k), torch.empty(0, k, dtype=torch.long))
    return TopK(torch.cat([top.scores for top in found]), torch.cat([top.indices for top in found]))


class SearchStream:
    """A search over passages that come piece by piece and are not kept.

    Guarantees:
        - `result` is that of `search` over all pieces together, whatever the pieces were.

    Args:
        query_embeddings: Shape ``(queries, dim)``.
        k: How many passages to return for each query; positive.
        tie_rank: `lexicographic_rank` of the ids of all passages that will come; shape ``(passages,)``.
        similarity: As in `search`.
        exclude: As in `search`.
        query_chunk: Queries per matrix product.
        passage_chunk: Passages per matrix product.
        device: Where to compute; where the queries are, by default.

    Raises:
        ConfigurationError: k or a chunk size is not positive, or shapes do not fit.
        DataError: An embedding is not finite.
    """

    def __init__(
        self,
        query_embeddings: Tensor,
        k: int,
        *,
        tie_rank: Tensor,
        similarity: Similarity = "dot",
        exclude: Tensor | None = None,
        query_chunk: int = 1024,
        passage_chunk: int = 16_384,
        device: torch.device | str | None = None,
    ) -> None:
        require_positive(k=k, query_chunk=query_chunk, passage_chunk=passage_chunk)
        _check_shapes(query_embeddings, None, len(tie_rank), similarity, tie_rank, exclude)
        if len(tie_rank) > NO_RANK:
            raise ConfigurationError(f"{len(tie_rank)} passages are more than the {NO_RANK} that can be ranked.")
        _refuse_broken(query_embeddings, "query")
        self.k, self.cosine = k, similarity == "cosine"
        self.device = torch.device(device) if device is not None else query_embeddings.device
        self._query_chunk, self._passage_chunk = query_chunk, passage_chunk
        self._queries = prepared(query_embeddings.detach().to(self.device).double(), self.cosine)
        self._fast_queries = self._queries.float()
        self._lengths = torch.linalg.vector_norm(self._queries, dim=1)
        self._rank = tie_rank.cpu()
        self._exclude = None if exclude is None else exclude.to(self.device)
        self._best = torch.full((len(self._queries), k), EMPTY)
        self._seen = 0

    def add(self, passages: Tensor | Rows) -> None:
        """Search the next passages; their indices count on from those before.

        Raises:
            ConfigurationError: They have another width, or are more than there are ranks.
            DataError: An embedding is not finite.
        """
        rows = as_rows(passages)
        if rows.dim != self._queries.shape[1] or self._seen + len(rows) > len(self._rank):
            raise ConfigurationError(
                f"Passages {self._seen} to {self._seen + len(rows)} of width {rows.dim} do not fit a search of "
                f"{len(self._rank)} passages by queries of width {self._queries.shape[1]}."
            )
        if len(rows) and len(self._queries):
            with torch.no_grad(), exact_float32(self.device):
                self._search(rows)
        self._seen += len(rows)

    def result(self) -> TopK:
        """The best of all passages so far, on the CPU, exactly ``k`` columns."""
        return ranked(self._best, places_by_rank(self._rank))

    def _search(self, rows: Rows) -> None:
        everyone = torch.arange(len(self._queries), device=self.device)
        guess = self._guess(rows)
        short = self._narrow(rows, everyone, guess)
        if guess is not None and len(short):
            self._narrow(rows, short, None)

    def _narrow(self, rows: Rows, chosen: Tensor, guess: Tensor | None) -> Tensor:
        """Search a piece for some queries; returns those for which ``guess`` was too high, still to be searched."""
        width = min(_net(self.k), len(rows))
        queries, kth = self._fast_queries[chosen], self._kth()[chosen.cpu()].to(self.device)
        buffer = CandidateBuffer(len(chosen), width, self.device, guess)
        longest = 0.0
        for start, part, length in self._parts(rows):
            longest = max(longest, length)
            exclude = None if self._exclude is None else self._exclude[chosen] - self._seen - start
            self._compare(buffer, queries, part, start, kth - self._slack(longest)[chosen], exclude)
        slack = self._slack(longest)[chosen]
        short = torch.zeros(len(chosen), dtype=torch.bool, device=self.device)
        if guess is not None:
            short = (buffer.count < width) & (guess > kth - slack)
        enough = chosen[~short].cpu()
        candidates, floor = buffer.indices()[~short.cpu()], buffer.floor[~short]
        self._take_in(rows, candidates, enough)
        if width < len(rows):
            proven = self._kth()[enough].to(self.device) > floor + slack[~short]
            for row in torch.nonzero(~proven).flatten().tolist():
                query = enough[row : row + 1]
                wide = self._wide(rows, int(query), float(self._kth()[query]) - float(slack[~short][row]))
                known = torch.isin(wide, candidates[row])
                self._take_in(rows, wide[~known][None], query)
        return chosen[short]

    def _guess(self, rows: Rows) -> Tensor | None:
        """A score that more passages than needed exceed, very likely; from a sample spread over the piece.

        It only saves work: a query for which it was too high is searched again without.
        """
        sample = min(max(len(rows) // 48, 2048), 16_384)
        width = _net(self.k)
        expected = width * sample / len(rows)
        rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
        if len(rows) < 4 * sample or rank > sample // 2:
            return None
        places = torch.linspace(0, len(rows) - 1, sample, dtype=torch.float64).long()
        passages = prepared(rows.sample(places).to(self.device).float(), self.cosine)
        guess = self._fast_queries.new_empty(len(self._queries))

        def draw(part: slice) -> None:
            guess[part] = (self._fast_queries[part] @ passages.T).topk(rank, dim=1).values[:, -1]

        self._each(draw, len(guess))
        return guess

    def _parts(self, rows: Rows) -> Iterator[tuple[int, Tensor, float]]:
        """Each chunk's first index, its passages ready for the matrix product, and the length of the longest."""
        for start in range(0, len(rows), self._passage_chunk):
            part = rows.chunk(start, min(start + self._passage_chunk, len(rows))).to(self.device).float()
            longest = float(torch.linalg.vector_norm(part, dim=1).max())
            if not math.isfinite(longest):
                _refuse_broken(part, "passage")
            yield start, prepared(part, self.cosine), 1.0 if self.cosine else longest

    def _compare(
        self,
        buffer: CandidateBuffer,
        queries: Tensor,
        part: Tensor,
        start: int,
        at_least: Tensor,
        exclude: Tensor | None,
    ) -> None:
        """Matrix products, and what of them may matter."""
        block = _CPU_BLOCK if self.device.type == "cpu" else self._passage_chunk

        def compare(chunk: slice) -> None:
            asking = queries[chunk]
            scratch = asking.new_empty(len(asking) * min(block, len(part)))  # new memory each time would cost a fifth
            for left in range(0, len(part), block):
                some = part[left : left + block]
                scores = scratch[: len(asking) * len(some)].view(len(asking), len(some))
                torch.mm(asking, some.T, out=scores)
                if exclude is not None:
                    _hide(scores, exclude[chunk] - left)
                buffer.add(chunk, scores, start + left, at_least[chunk])

        self._each(compare, len(queries))

    def _each(self, work: Callable[[slice], None], queries: int) -> None:
        """Do something for all queries, ``query_chunk`` at a time; on the CPU by several threads."""
        if self.device.type == "cpu":
            rows_in_parallel(work, queries, _share(queries, self._query_chunk))
            return
        for first in range(0, queries, self._query_chunk):
            work(slice(first, min(first + self._query_chunk, queries)))

    def _take_in(self, rows: Rows, candidates: Tensor, chosen: Tensor) -> None:
        """Score candidates of a piece as a score is defined, and keep the best of them and those before."""
        if self._exclude is not None:
            banned = candidates + self._seen == self._exclude.cpu()[chosen, None]
            candidates = candidates.masked_fill(banned, MISSING)
        scores = canonical_scores(self._queries[chosen], rows, candidates, cosine=self.cosine)

        def keep(part: slice) -> None:
            some, of = candidates[part], chosen[part]
            indices = torch.where(some == MISSING, MISSING, some + self._seen)
            keys = torch.cat([self._best[of], keyed(TopK(scores[part], indices), self._rank)], dim=1)
            self._best[of] = ascending(smallest(keys, self.k)[:, : self.k].contiguous())

        rows_in_parallel(keep, len(chosen), _share(len(chosen), 256))

    def _kth(self) -> Tensor:
        """The score that a passage must reach to be among the best, on the CPU; -inf while there are fewer than k."""
        return unpacked(self._best[:, -1])[0]

    def _slack(self, longest: float) -> Tensor:
        """Twice what a float32 dot product of this length can be wrong by, for each query."""
        relative = 4.0 * (self._queries.shape[1] + 4) * _UNIT_ROUNDOFF
        slack: Tensor = self._lengths.mul(relative * longest).add(1e-37).float()
        return slack

    def _wide(self, rows: Rows, row: int, floor: float) -> Tensor:
        """Every passage of the piece that can reach the score that ``floor`` was lowered from, by index."""
        query = self._fast_queries[row]
        kept = [torch.nonzero(part @ query >= floor).flatten().cpu() + start for start, part, _ in self._parts(rows)]
        return torch.cat(kept)


def _net(k: int) -> int:
    """How many candidates to keep for ``k`` results: enough that rounding errors seldom call for a second look."""
    return k + 64 + k // 64


def _share(rows: int, most: int) -> int:
    """How many rows a thread takes at a time, so that none waits long for the last."""
    return max(1, min(most, -(-rows // (4 * torch.get_num_threads()))))


def _hide(scores: Tensor, excluded: Tensor) -> None:
    """Set each row's excluded column, where it is one of them, to -inf."""
    inside = torch.nonzero((excluded >= 0) & (excluded < scores.shape[1])).flatten()
    scores[inside, excluded[inside]] = float("-inf")


def prepared(embeddings: Tensor, cosine: bool) -> Tensor:
    """Embeddings whose dot product is the similarity."""
    return F.normalize(embeddings, dim=-1) if cosine else embeddings


def require_positive(**numbers: int) -> None:
    """Refuse a number below 1 by its name."""
    for name, value in numbers.items():
        if value < 1:
            raise ConfigurationError(f"{name}={value} must be at least 1.")


def _check_shapes(
    queries: Tensor,
    passages: Rows | None,
    count: int,
    similarity: str,
    tie_rank: Tensor | None,
    exclude: Tensor | None,
) -> None:
    if similarity not in get_args(Similarity):
        raise ConfigurationError(f"similarity={similarity!r} is not one of {', '.join(get_args(Similarity))}.")
    if queries.ndim != 2 or (passages is not None and queries.shape[1] != passages.dim):
        shape = None if passages is None else (len(passages), passages.dim)
        raise ConfigurationError(
            f"Embeddings of shapes {tuple(queries.shape)} and {shape} are not (queries, dim) and (passages, dim) of "
            "one model."
        )
    for name, value, length in (("tie_rank", tie_rank, count), ("exclude", exclude, len(queries))):
        if value is not None and value.shape != (length,):
            raise ConfigurationError(f"{name} has shape {tuple(value.shape)}, not {(length,)}.")


def _refuse_broken(embeddings: Tensor, side: str) -> None:
    broken = int((~embeddings.isfinite()).any(dim=1).sum()) if not bool(embeddings.isfinite().all()) else 0
    if broken:
        raise DataError(f"{broken} of {len(embeddings)} {side} embeddings hold a NaN or infinity.")


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Matrix products in true float32, whatever precision the surrounding run has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
