"""Exact nearest neighbours, streamed, in a deterministic order.

A score is the dot product of two embeddings in float64, rounded to float32. A fast matrix product finds the few
candidates that can matter, those are scored again pair by pair, and a bound on the product's rounding error proves that
none was missed; else the query is looked through once more. Ties fall as trec_eval lets them: by id, descending.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.matmul_precision import exact_float32
from lit_dpret.retrieval.products import Attempt, Products, bfloat16_pays, prepared
from lit_dpret.retrieval.rows import Rows, as_rows
from lit_dpret.retrieval.scores import canonical_scores
from lit_dpret.retrieval.topk import (
    EMPTY,
    MISSING,
    NO_RANK,
    CandidateBuffer,
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
from lit_dpret.threads import on_slices

__all__ = [
    "MISSING",
    "SearchStream",
    "Similarity",
    "TopK",
    "lexicographic_rank",
    "merged",
    "search",
    "top_k_of",
    "unbroken",
]

QUERY_CHUNK, PASSAGE_CHUNK = 1024, 16_384  # of a matrix product
_CPU_BLOCK = 4096  # passages whose scores stay in a processor's cache
_FEW_QUERIES = 256  # up to so many, threads share out the passages: each is read once, and products are not too flat
_AT_ONCE = 2**23  # scores that are held whole: for fewer, chunks and threads cost more than they save
_FLAT = 32  # up to so many queries, passages times queries is the faster order of a product
_BUFFER_BYTES = 256 * 2**20  # of candidates, for the queries that are searched together


def search(
    query_embeddings: Tensor | NDArray[Any],
    passage_embeddings: Tensor | NDArray[Any] | Rows,
    k: int,
    *,
    tie_rank: Tensor | None = None,
    similarity: Similarity = "dot",
    exclude: Tensor | None = None,
    device: torch.device | str | None = None,
) -> TopK:
    """Return the ``k`` passages with the highest score for every query, on the CPU, in exactly ``k`` columns.

    Guarantees:
        - Scores are float64 dot products rounded to float32, and the passages returned are the first k under (score
          descending, ``tie_rank`` ascending): exact, ties included.
        - Scores and indices do not depend on how many queries and passages are multiplied at a time (`QUERY_CHUNK`,
          `PASSAGE_CHUNK`). No more of their scores are held, and of passages in a file (`FileRows`) little more
          than a chunk: memory does not grow with the corpus, but for 16 bytes of a passage's rank.

    Args:
        query_embeddings: Shape ``(queries, dim)``; a tensor or an array of numpy.
        passage_embeddings: Shape ``(passages, dim)``, the same; may lie on another device, or in a file.
        k: How many passages to return for each query.
        tie_rank: `lexicographic_rank` of the passage ids; without it the earlier passage wins a tie.
        similarity: ``dot``, or ``cosine`` to normalise both sides first.
        exclude: For every query the index of one passage not to return, `MISSING` for none; for collections whose
            queries are passages themselves. Long, shape ``(queries,)``.
        device: Where to compute; where the queries are, by default.

    Raises:
        DataError: An embedding is not finite, or too long for a finite score.
    """
    rows, query_embeddings = as_rows(passage_embeddings), torch.as_tensor(query_embeddings)
    require_positive(k=k)
    check_shapes(query_embeddings, rows, len(rows), similarity, tie_rank, exclude)
    together = max(QUERY_CHUNK, _BUFFER_BYTES // (32 * min(k + 64, max(1, len(rows)))))
    found = []
    for start in range(0, len(query_embeddings), together):
        part = slice(start, start + together)
        stream = SearchStream(
            query_embeddings[part],
            k,
            tie_rank=torch.arange(len(rows)) if tie_rank is None else tie_rank,
            similarity=similarity,
            exclude=None if exclude is None else exclude[part],
            device=device,
        )
        stream.add(rows)
        found.append(stream.result())
    if not found:
        return TopK(torch.empty(0, k), torch.empty(0, k, dtype=torch.long))
    return TopK(torch.cat([top.scores for top in found]), torch.cat([top.indices for top in found]))


class SearchStream:
    """A search over passages that arrive in parts and are not stored.

    `result` is that of `search` over all pieces together. The arguments are those of `search`, with the
    ``tie_rank`` of the ids of all passages that will come.
    """

    def __init__(
        self,
        query_embeddings: Tensor,
        k: int,
        *,
        tie_rank: Tensor,
        similarity: Similarity = "dot",
        exclude: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        require_positive(k=k)
        check_shapes(query_embeddings, None, len(tie_rank), similarity, tie_rank, exclude)
        if len(tie_rank) > NO_RANK:
            raise ConfigurationError(f"{len(tie_rank)} passages are more than the {NO_RANK} that can be ranked.")
        refuse_broken(query_embeddings, "query")
        self.k, self.cosine = k, similarity == "cosine"
        self.device = torch.device(device) if device is not None else query_embeddings.device
        self._queries = prepared(query_embeddings.detach().to(self.device).double(), self.cosine)
        self._products = Products(self._queries, torch.float32)
        low = bfloat16_pays(self.device, len(self._queries))
        self._low = Products(self._queries, torch.bfloat16) if low else None
        self._rank = tie_rank.cpu()
        self._exclude = None if exclude is None else exclude.to(self.device)
        self._best = torch.full((len(self._queries), k), EMPTY)
        self._seen = 0

    def add(self, passages: Tensor | Rows) -> None:
        """Search the next passages; their indices continue from the previous ones."""
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
        """Return the best of all passages so far, on the CPU, exactly ``k`` columns."""
        return ranked(self._best, places_by_rank(self._rank))

    def _search(self, rows: Rows) -> None:
        if self.device.type == "cpu" and len(self._queries) * len(rows) <= _AT_ONCE:
            self._search_at_once(rows)
            return
        everyone = torch.arange(len(self._queries), device=self.device)
        attempt = self._attempt(rows)
        left = self._narrow(rows, everyone, attempt)
        if len(left):
            self._narrow(rows, left, Attempt(self._products, self._width(rows), None))

    def _search_at_once(self, rows: Rows) -> None:
        """Search a piece by all scores that few queries have in it."""
        # A 64th of the passages and no more are found by a partial sort, which takes half the time.
        width = min(self._width(rows), max(self.k + 16, len(rows) // 64), len(rows))
        queries, longest = self._products.queries, 0.0
        asking = queries.repeat(2, 1) if len(queries) == 1 else queries  # a product with a vector runs on one thread
        scores = queries.new_empty(len(queries), len(rows))
        for some in _slices(len(rows)):
            part, length = self._part(rows, some)
            longest = max(longest, length)
            if len(queries) > _FLAT:
                torch.mm(queries, part.T, out=scores[:, some])
            else:
                scores[:, some] = (part @ asking.T)[:, : len(queries)].T
        if self._exclude is not None:
            _hide(scores, self._exclude - self._seen)
        found, slack = scores.topk(width), self._products.slack(longest, 0.0)
        least = self._kth() - slack
        if self.k < width:
            least = torch.maximum(least, found.values[:, self.k - 1] - 2 * slack)
        candidates = found.indices.masked_fill(found.values < least[:, None], MISSING)
        reach = found.values[:, -1] + slack if width < len(rows) else None
        self._settle(rows, candidates, torch.arange(len(queries)), reach, slack)

    def _settle(self, rows: Rows, candidates: Tensor, of: Tensor, reach: Tensor | None, slack: Tensor) -> None:
        """Take in candidates, and for queries for which they prove too little all others that could be among the best.

        ``candidates`` are by index, for the queries ``of``; ``reach`` is the most that another passage can score,
        None where there is none; ``slack`` is what a product can be wrong by.
        """
        self._take_in(rows, candidates, of)
        doubtful = [] if reach is None else torch.nonzero(~(self._kth()[of] > reach)).flatten().tolist()
        for row in doubtful:
            query = of[row : row + 1]
            wide = self._wide(rows, int(query), float(self._kth()[query]) - float(slack[row]))
            known = torch.isin(wide, candidates[row])
            self._take_in(rows, wide[~known][None], query)

    def _width(self, rows: Rows) -> int:
        """Return how many candidates to keep, so that rounding errors of float32 seldom need a second look."""
        return min(self.k + 64 + self.k // 64, len(rows))

    def _narrow(self, rows: Rows, chosen: Tensor, attempt: Attempt) -> Tensor:
        """Search a piece for some queries; returns those for which the attempt proved nothing, still to be searched."""
        products, width, guess = attempt.products, attempt.width, attempt.guess
        queries, kth = products.queries[chosen], self._kth()[chosen.cpu()].to(self.device)
        buffer = CandidateBuffer(len(chosen), width, self.device, guess)
        longest, error, lock = 0.0, 0.0, threading.Lock()
        few = self.device.type == "cpu" and len(chosen) <= _FEW_QUERIES

        def look(some: slice) -> None:
            nonlocal longest, error
            part, length = self._part(rows, some)
            low, lost = products.passages(part)
            scores = queries @ low.T if few else None
            exclude = None if self._exclude is None else self._exclude[chosen] - self._seen - some.start
            with lock:
                longest, error = max(longest, length), max(error, lost)
                at_least = kth - products.slack(longest, error)[chosen]
                if scores is None:
                    self._compare(buffer, queries, low, some.start, at_least, exclude)
                    return
                if exclude is not None:
                    _hide(scores, exclude)
                buffer.add(slice(0, len(chosen)), scores, some.start, at_least)

        if few:
            most = PASSAGE_CHUNK if len(chosen) <= _FEW_QUERIES // 4 else _CPU_BLOCK
            on_slices(look, len(rows), max(1024, _share(len(rows), most)))
        else:
            for some in _slices(len(rows)):
                look(some)
        slack = products.slack(longest, error)[chosen]
        short = torch.zeros(len(chosen), dtype=torch.bool, device=self.device)
        if guess is not None:
            short = (buffer.count < width) & (guess > kth - slack)
        enough = torch.nonzero(~short).flatten()
        # In float32 a passage more than twice the error behind the k-th best is not among the k best.
        margin = None if products.low else 2 * slack
        candidates = buffer.indices(self.k, margin)[enough.cpu()]
        of, reach = chosen[enough].cpu(), None
        if width < len(rows):
            reach = (products.at_most(buffer.floor[enough]) + slack[enough]).cpu()
        if products.low:  # what it does not settle is searched again, in float32
            proven = self._take_in(rows, candidates, of, reach)
            return torch.cat([chosen[short], chosen[enough[~proven.to(self.device)]]])
        self._settle(rows, candidates, of, reach, slack[enough])
        return chosen[short]

    def _attempt(self, rows: Rows) -> Attempt:
        """Decide how to search a piece first, from a sample spread over it.

        It guesses a score that more passages than needed exceed, very likely, and how many candidates the
        products of low precision would need. Both only save work: a query for which they were wrong is
        searched again without.
        """
        sample, width = min(max(len(rows) // 48, 2048), 16_384), self._width(rows)
        if len(rows) < 4 * sample or _sample_rank(width, sample, len(rows)) > sample // 2:
            return Attempt(self._products, width, None)
        places = torch.linspace(0, len(rows) - 1, sample, dtype=torch.float64).long()
        passages = prepared(rows.take(places).to(self.device).float(), self.cosine)
        products, few = self._products, slice(None, None, max(1, len(self._queries) // 64))
        if self._low is not None:
            scores = products.queries[few] @ passages.T
            needed = self._low.candidates(scores, passages, few, width, len(rows))
            if needed - width <= len(rows) // 100:
                products, width = self._low, needed
        rank = _sample_rank(width, sample, len(rows))
        guess = self._products.queries.new_empty(len(self._queries))

        def draw(part: slice) -> None:
            guess[part] = (self._products.queries[part] @ passages.T).topk(rank, dim=1).values[:, -1]

        self._each(draw, len(guess))
        return Attempt(products, width, guess.to(products.dtype).float())

    def _part(self, rows: Rows, some: slice) -> tuple[Tensor, float]:
        """Return some passages ready for the matrix product, and their greatest length."""
        part = rows.chunk(some.start, some.stop).to(self.device).float()
        longest = float(torch.linalg.vector_norm(part, dim=1).max())
        if not math.isfinite(longest):
            refuse_broken(part, "passage")
        return prepared(part, self.cosine), 1.0 if self.cosine else longest

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
        block = _CPU_BLOCK if self.device.type == "cpu" else PASSAGE_CHUNK

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
        """Do something for all queries, `QUERY_CHUNK` at a time; on the CPU by several threads."""
        if self.device.type == "cpu":
            on_slices(work, queries, _share(queries, QUERY_CHUNK))
            return
        for first in range(0, queries, QUERY_CHUNK):
            work(slice(first, min(first + QUERY_CHUNK, queries)))

    def _take_in(self, rows: Rows, candidates: Tensor, chosen: Tensor, reach: Tensor | None = None) -> Tensor:
        """Score candidates of a piece as a score is defined, and keep the best of them and those before.

        With ``reach``, the highest score that a passage not among the candidates can have, a query is left
        as it was where such a passage could be among the best; returns for which queries it could not.
        """
        if self._exclude is not None:
            banned = candidates + self._seen == self._exclude.cpu()[chosen, None]
            candidates = candidates.masked_fill(banned, MISSING)
        scores = canonical_scores(self._queries[chosen], rows, candidates, cosine=self.cosine)
        proven = torch.ones(len(chosen), dtype=torch.bool)

        def keep(part: slice) -> None:
            some, of = candidates[part], chosen[part]
            indices = torch.where(some == MISSING, MISSING, some + self._seen)
            keys = torch.cat([self._best[of], keyed(TopK(scores[part], indices), self._rank)], dim=1)
            keys = ascending(smallest(keys, self.k)[:, : self.k].contiguous())
            if reach is not None:
                proven[part] = unpacked(keys[:, -1])[0] > reach[part]
            self._best[of[proven[part]]] = keys[proven[part]]

        on_slices(keep, len(chosen), max(128, _share(len(chosen), 256)))  # fewer are done before a thread starts
        return proven

    def _kth(self) -> Tensor:
        """Return the score that a passage must reach to be among the best; -inf while there are fewer than k."""
        return unpacked(self._best[:, -1])[0]

    def _wide(self, rows: Rows, row: int, floor: float) -> Tensor:
        """Return every passage of the piece that can reach the score that ``floor`` was lowered from, by index."""
        query = self._products.queries[row]
        parts = ((some.start, self._part(rows, some)[0]) for some in _slices(len(rows)))
        return torch.cat([torch.nonzero(part @ query >= floor).flatten().cpu() + start for start, part in parts])


def _slices(rows: int) -> Iterator[slice]:
    """Yield slices of `PASSAGE_CHUNK`, the last one shorter."""
    return (slice(start, min(start + PASSAGE_CHUNK, rows)) for start in range(0, rows, PASSAGE_CHUNK))


def _sample_rank(width: int, sample: int, passages: int) -> int:
    """Return the rank in a sample whose score is exceeded, but for bad luck, by ``width`` of all passages."""
    expected = width * sample / passages
    return math.ceil(expected + 4 * math.sqrt(expected) + 4)


def _share(rows: int, most: int) -> int:
    """Return how many rows a thread takes at a time, so that none waits long for the last."""
    return max(1, min(most, -(-rows // (4 * torch.get_num_threads()))))


def _hide(scores: Tensor, excluded: Tensor) -> None:
    """Set each row's excluded column, where it is one of them, to -inf."""
    inside = torch.nonzero((excluded >= 0) & (excluded < scores.shape[1])).flatten()
    scores[inside, excluded[inside]] = float("-inf")


Similarity = Literal["dot", "cosine"]


def require_positive(**numbers: int) -> None:
    """Refuse a number below 1 by name."""
    for name, value in numbers.items():
        if value < 1:
            raise ConfigurationError(f"{name}={value} must be at least 1.")


def check_shapes(
    queries: Tensor,
    passages: Rows | None,
    count: int,
    similarity: str,
    tie_rank: Tensor | None,
    exclude: Tensor | None,
) -> None:
    """Refuse embeddings, ranks and exclusions with inconsistent shapes."""
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


def unbroken(embeddings: Tensor) -> Tensor:
    """Return which embeddings have a square within float32, ``(rows,)``: any two of them have a finite score."""
    return embeddings.float().square().sum(dim=1).isfinite()


def refuse_broken(embeddings: Tensor, side: str) -> None:
    """Refuse embeddings that are not finite, or too large for a finite score."""
    broken = int((~unbroken(embeddings)).sum())
    if broken:
        raise DataError(f"{broken} of {len(embeddings)} {side} embeddings hold a NaN or infinity, or are too long.")
