"""Exact nearest neighbours, streamed, in a deterministic order.

A score is the dot product of two embeddings in float64, rounded to float32. A fast matrix product finds the few
candidates that can matter, and these are scored again pair by pair. A bound on the product's rounding error proves that
none was missed; otherwise the query is searched again. Ties are broken as in trec_eval: by id, descending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.matmul_precision import exact_float32
from lit_dpret.retrieval.products import Attempt, Products, bfloat16_pays, prepared
from lit_dpret.retrieval.rows import Rows, TensorRows, as_rows
from lit_dpret.retrieval.scores import canonical_scores
from lit_dpret.retrieval.topk import (
    EMPTY,
    MISSING,
    NO_RANK,
    CandidateBuffer,
    TopK,
    ascending,
    best_of,
    keyed,
    lexicographic_rank,
    merged,
    nonzero,
    places_by_rank,
    ranked,
    smallest,
    top_k_of,
    unpacked,
)
from lit_dpret.threads import on_slices, threads_of_ours, workers

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

QUERY_CHUNK, PASSAGE_CHUNK = 1024, 16_384  # rows of a matrix product
_CPU_BLOCK = 4096  # passages whose scores stay in a processor's cache
_FEW_QUERIES = 512  # up to this many, threads split the passages: each is read once, and products are not too flat
_ONE_BY_ONE = 3  # up to this many queries, products with one vector are faster than those of matrices
_GROUP = 32  # with few queries: scores per group, of which only the highest is looked at first
_AT_ONCE = 2**23  # with few queries: scores held at a time
_ALONE = 2**23  # multiplications for which one thread is enough,
_ALONE_READ = 2**26  # or numbers of passages, with queries that are multiplied one by one
_PAYS_LOW = 2**21  # with few queries: number of scores above which bfloat16 saves more than its extra candidates cost
_BUFFER_BYTES = 256 * 2**20  # for the candidates of queries that are searched together


@threads_of_ours()
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
          `PASSAGE_CHUNK`). Only the scores of one product are held (`_AT_ONCE` scores with few queries), and of
          passages in a file (`FileRows`) little more than a chunk per thread. Memory does not grow with the corpus,
          except for 16 bytes per passage for its rank.

    Args:
        query_embeddings: Tensor or NumPy array of shape ``(queries, dim)``.
        passage_embeddings: The same of shape ``(passages, dim)``; may be on another device, or in a file.
        k: How many passages to return for each query.
        tie_rank: `lexicographic_rank` of the passage ids; without it the earlier passage wins a tie.
        similarity: ``dot``, or ``cosine`` to normalise both sides first.
        exclude: The index of one passage not to return for each query, `MISSING` for none; for collections whose
            queries are passages themselves. Long, shape ``(queries,)``.
        device: Where to compute; by default the device of the queries.

    Raises:
        DataError: An embedding is not finite, or too long for a finite score.
    """
    rows, query_embeddings = as_rows(passage_embeddings), torch.as_tensor(query_embeddings)
    require_positive(k=k)
    check_shapes(query_embeddings, rows, len(rows), similarity, tie_rank, exclude)
    where = query_embeddings.device if device is None else torch.device(device)
    if not len(query_embeddings) or (where.type == "cpu" and len(query_embeddings) <= _FEW_QUERIES):
        refuse_broken(query_embeddings, "query")
        cosine = similarity == "cosine"
        queries = prepared(query_embeddings.detach().to(where).double(), cosine)
        return _search_few(queries, rows, k, None if tie_rank is None else tie_rank.cpu(), exclude, cosine)
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
    return TopK(torch.cat([top.scores for top in found]), torch.cat([top.indices for top in found]))


class SearchStream:
    """A search over passages that arrive in parts and are not stored.

    `result` equals that of `search` over all parts together. The arguments are those of `search`; ``tie_rank``
    covers the ids of all passages still to come.
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
            with torch.no_grad(), exact_float32(self.device), threads_of_ours():
                self._search(rows)
        self._seen += len(rows)

    def result(self) -> TopK:
        """Return the best of all passages so far, on the CPU, exactly ``k`` columns."""
        return ranked(self._best, places_by_rank(self._rank))

    def _search(self, rows: Rows) -> None:
        if self.device.type == "cpu" and len(self._queries) <= _FEW_QUERIES:
            rank = self._rank[self._seen : self._seen + len(rows)]
            exclude = None if self._exclude is None else self._exclude - self._seen
            found = _search_few(self._queries, rows, self.k, rank, exclude, self.cosine)
            keys = torch.cat([self._best, keyed(found, rank)], dim=1)
            self._best = ascending(smallest(keys, self.k)[:, : self.k].contiguous())
            return
        everyone = torch.arange(len(self._queries), device=self.device)
        attempt = self._attempt(rows)
        left = self._narrow(rows, everyone, attempt)
        if len(left):
            self._narrow(rows, left, Attempt(self._products, self._width(rows), None))

    def _settle(self, rows: Rows, candidates: Tensor, of: Tensor, reach: Tensor | None, slack: Tensor) -> None:
        """Take in candidates. Where they prove too little for a query, add all other passages that could be its best.

        ``candidates`` are indices, for the queries ``of``. ``reach`` is the most that any other passage can score,
        None if there is no other. ``slack`` is the largest error of a product.
        """
        self._take_in(rows, candidates, of)
        doubtful = [] if reach is None else torch.nonzero(~(self._kth()[of] > reach)).flatten().tolist()
        for row in doubtful:
            query = of[row : row + 1]
            wide = self._wide(rows, int(query), float(self._kth()[query]) - float(slack[row]))
            known = torch.isin(wide, candidates[row])
            self._take_in(rows, wide[~known][None], query)

    def _width(self, rows: Rows) -> int:
        """Return how many candidates to keep so that float32 rounding errors seldom need a second look."""
        return min(self.k + 64 + self.k // 64, len(rows))

    def _narrow(self, rows: Rows, chosen: Tensor, attempt: Attempt) -> Tensor:
        """Search a piece for some queries; return those for which the attempt proved nothing, still to be searched."""
        products, width, guess = attempt.products, attempt.width, attempt.guess
        queries, kth = products.queries[chosen], self._kth()[chosen.cpu()].to(self.device)
        buffer = CandidateBuffer(len(chosen), width, self.device, guess)
        longest, error = 0.0, 0.0
        for some in _slices(len(rows)):
            part, length = _part(rows, some, self.device, self.cosine)
            low, lost = products.passages(part)
            longest, error = max(longest, length), max(error, lost)
            exclude = None if self._exclude is None else self._exclude[chosen] - self._seen - some.start
            self._compare(buffer, queries, low, some.start, kth - products.slack(longest, error)[chosen], exclude)
        slack = products.slack(longest, error)[chosen]
        short = torch.zeros(len(chosen), dtype=torch.bool, device=self.device)
        if guess is not None:
            short = (buffer.count < width) & (guess > kth - slack)
        enough = torch.nonzero(~short).flatten()
        # A float32 score more than twice the error below the k-th best is not among the k best.
        margin = None if products.low else 2 * slack
        candidates = buffer.indices(self.k, margin)[enough.cpu()]
        of, reach = chosen[enough].cpu(), None
        if width < len(rows):
            reach = (products.at_most(buffer.floor[enough]) + slack[enough]).cpu()
        if products.low:  # queries that it does not settle are searched again, in float32
            proven = self._take_in(rows, candidates, of, reach)
            return torch.cat([chosen[short], chosen[enough[~proven.to(self.device)]]])
        self._settle(rows, candidates, of, reach, slack[enough])
        return chosen[short]

    def _attempt(self, rows: Rows) -> Attempt:
        """Choose how to search a piece first, from a sample spread over it.

        Guess a score that very likely more passages than needed exceed, and the number of candidates that
        low-precision products would need. Both only save work: a query for which they were wrong is searched
        again without them.
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

    def _compare(
        self,
        buffer: CandidateBuffer,
        queries: Tensor,
        part: Tensor,
        start: int,
        at_least: Tensor,
        exclude: Tensor | None,
    ) -> None:
        """Multiply, and add to the buffer the scores that may matter."""
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
        """Do some work for all queries, `QUERY_CHUNK` at a time; on the CPU in several threads."""
        if self.device.type == "cpu":
            on_slices(work, queries, _share(queries, QUERY_CHUNK))
            return
        for first in range(0, queries, QUERY_CHUNK):
            work(slice(first, min(first + QUERY_CHUNK, queries)))

    def _take_in(self, rows: Rows, candidates: Tensor, chosen: Tensor, reach: Tensor | None = None) -> Tensor:
        """Compute the exact scores of a piece's candidates, and keep the best of them and of those before.

        With ``reach``, the highest score that a passage outside the candidates can have, a query is left
        unchanged if such a passage could be among its best. Return for which queries none could.
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

        on_slices(keep, len(chosen), max(128, _share(len(chosen), 256)))  # a thread does not pay for fewer
        return proven

    def _kth(self) -> Tensor:
        """Return the score that a passage must reach to be among the best; -inf while there are fewer than k."""
        return unpacked(self._best[:, -1])[0]

    def _wide(self, rows: Rows, row: int, floor: float) -> Tensor:
        """Return the indices of all passages of the piece that can reach the score from which ``floor`` was lowered."""
        query = self._products.queries[row]
        parts = ((some.start, _part(rows, some, self.device, self.cosine)[0]) for some in _slices(len(rows)))
        return torch.cat([torch.nonzero(part @ query >= floor).flatten().cpu() + start for start, part in parts])


def _search_few(queries: Tensor, rows: Rows, k: int, rank: Tensor | None, exclude: Tensor | None, cosine: bool) -> TopK:
    """Search for few queries (float64, normalised under ``cosine``) on the CPU; the rest is as in `search`.

    Call it inside `threads_of_ours`. Threads split the passages; the scores of up to `_AT_ONCE` pairs are held at a
    time. A passage among the best scores at most the rounding error below the k-th best found so far, and below the
    k-th highest score of any subset. So only passages that reach both are scored again.
    """
    exclude = None if exclude is None else exclude.cpu()
    low = len(queries) * len(rows) >= _PAYS_LOW and bfloat16_pays(queries.device, len(queries))
    products, longest, best = Products(queries, torch.bfloat16 if low else torch.float32), 0.0, None
    pieces = max(1, -(-len(queries) * len(rows) // _AT_ONCE))
    places = range(len(rows) if len(queries) else 0)
    step = max(1, -(-len(places) // pieces))
    whole = exact_float32(queries.device) if len(queries) > _ONE_BY_ONE else nullcontext()  # changes NumPy's in no way
    with torch.no_grad(), whole:
        for start in places[::step]:
            candidates = None
            while candidates is None:
                scores = _Scores(products, rows, places[start : start + step], k, exclude, cosine)
                longest = max(longest, scores.longest)
                floor = scores.kth - 2 * scores.slack
                if best is not None and best.scores.shape[1] == k:
                    floor = np.maximum(floor, best.scores[:, -1].numpy() - scores.slack)
                candidates = scores.above(floor, 4 * k * len(queries) if products.low else None)
                if candidates is None:
                    products = Products(queries, torch.float32)
            found = TopK(canonical_scores(queries, rows, candidates, cosine=cosine), candidates)
            if best is not None:
                found = TopK(*(torch.cat(pair, dim=1) for pair in zip(best, found, strict=True)))
            best = best_of(found, k, rank)
    if isinstance(rows, TensorRows) and places and not cosine:
        rows.keep_longest(longest)
    best = best or TopK(torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long))
    if not (short := k - best.scores.shape[1]):
        return best
    return TopK(F.pad(best.scores, (0, short), value=-math.inf), F.pad(best.indices, (0, short), value=MISSING))


class _Scores:
    """All scores of few queries for a range of passages.

    Guarantees:
        - For each query, ``kth`` is at most its k-th highest score before rounding, and close to it: the k-th highest
          of the maxima of groups of passages. Where fewer than k passages have a score, it is lower than any score.
    """

    def __init__(
        self, products: Products, rows: Rows, places: range, k: int, exclude: Tensor | None, cosine: bool
    ) -> None:
        self._places, self._dtype, queries = places, products.dtype, products.queries
        one_by_one = len(queries) <= _ONE_BY_ONE and not products.low
        numbers = rows.dim * len(places)
        alone = len(queries) * numbers <= _ALONE or (one_by_one and numbers <= _ALONE_READ)
        group = max(1, min(_GROUP, len(places) // (8 * k)))
        # Blocks stay in a cache while they are read, converted, measured or multiplied again.
        at_hand = isinstance(rows, TensorRows) and rows.embeddings.type() == "torch.FloatTensor"
        read_once = len(queries) == 1 and at_hand and rows.longest is not None and not cosine
        most = len(places) if read_once else _CPU_BLOCK
        width = -(-(min(most, len(places)) if alone else _share(len(places), most)) // group)
        blocks = -(-len(places) // (width * group))
        self._table = np.empty((len(queries), blocks, group, width), dtype=np.float32)
        flat = self._table.reshape(len(queries), -1)
        flat[:, len(places) :] = -math.inf
        self._highest = np.empty((len(queries), blocks, width), dtype=np.float32) if group > 1 else self._table[:, :, 0]
        lengths = [0.0] * blocks

        def fill(some: slice) -> None:
            block = some.start // (width * group)
            where = slice(places.start + some.start, places.start + some.stop)
            part, lengths[block] = _part(rows, where, queries.device, cosine)
            _multiply(queries, part, flat[:, some])
            if exclude is not None:
                _hide(torch.from_numpy(flat[:, some]), exclude - where.start)
            if group > 1:
                np.maximum.reduce(self._table[:, block], axis=1, out=self._highest[:, block])

        if alone:
            for start in range(0, len(places), width * group):
                fill(slice(start, min(start + width * group, len(places))))
        else:
            on_slices(fill, len(places), width * group)
        self.longest = max(lengths)
        self.slack = products.slack(self.longest, products.loss(self.longest)).numpy()
        kth = np.full(len(queries), -math.inf, dtype=np.float32)
        if blocks * width >= k:
            highest = self._highest.reshape(len(queries), -1)
            kth = np.partition(highest, blocks * width - k, axis=1)[:, blocks * width - k]
        self.kth = products.at_most(torch.from_numpy(kth), -math.inf).numpy()

    def above(self, floor: NDArray[np.float32], most: int | None) -> Tensor | None:
        """Return for each query the passages that score at least ``floor``, padded with `MISSING`.

        Return None if more than ``most`` groups of passages do: their scores are too close for this precision.
        """
        floor = torch.from_numpy(floor).to(self._dtype).float().numpy()  # rounding keeps the order: what reaches it,
        least = np.maximum(floor, np.finfo(np.float32).min)[:, None]  # reaches it rounded; excludes -inf: no score
        blocks, group, width = self._table.shape[1:]
        row, column = np.divmod(nonzero(self._highest.reshape(len(least), -1) >= least), blocks * width)
        if most is not None and len(row) > most:
            return None
        if group > 1:
            block, column = np.divmod(column, width)
            which, member = np.nonzero(self._table[row, block, :, column] >= least[row])
            row, column = row[which], (block[which] * group + member) * width + column[which]
        place = column + self._places.start
        if len(least) == 1:
            return torch.from_numpy(place[None])
        counts = np.bincount(row, minlength=len(least))
        found = np.full((len(least), counts.max()), MISSING)
        found[row, np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)] = place
        return torch.from_numpy(found)


def _multiply(queries: Tensor, passages: Tensor, out: NDArray[np.float32]) -> None:
    """Write the product of queries and float32 passages on the CPU into ``out``, ``(queries, passages)``."""
    if len(queries) > _ONE_BY_ONE or queries.dtype != torch.float32:
        torch.from_numpy(out).copy_(torch.mm(queries, passages.to(queries.dtype).T))
        return
    for query, scores in zip(queries.numpy(), out, strict=True):
        np.vecdot(passages.numpy(), query, out=scores)


def _part(rows: Rows, some: slice, device: torch.device, cosine: bool) -> tuple[Tensor, float]:
    """Return some passages, ready for the matrix product, and a bound on their lengths."""
    part, longest = rows.chunk(some.start, some.stop).to(device).float(), rows.longest
    if longest is None:
        longest = _longest(part)
    return prepared(part, cosine), 1.0 if cosine else longest


def _longest(passages: Tensor) -> float:
    """Return a bound on the lengths of float32 passages; refuse passages that are broken."""
    if passages.device.type == "cpu":  # with NumPy, which is faster here
        table = passages.numpy()
        with np.errstate(over="ignore"):
            squares = float(np.vecdot(table, table).max())
    else:
        squares = float(passages.square().sum(dim=1).max())
    if not math.isfinite(squares):
        refuse_broken(passages, "passage")
    return math.sqrt(squares + passages.shape[1] * 2.0**-125)  # squares below float32's normal range may become zero


def _slices(rows: int) -> Iterator[slice]:
    """Yield slices of `PASSAGE_CHUNK` rows; the last one may be shorter."""
    return (slice(start, min(start + PASSAGE_CHUNK, rows)) for start in range(0, rows, PASSAGE_CHUNK))


def _sample_rank(width: int, sample: int, passages: int) -> int:
    """Return the rank in a sample whose score ``width`` of all passages very likely exceed."""
    expected = width * sample / passages
    return math.ceil(expected + 4 * math.sqrt(expected) + 4)


def _share(rows: int, most: int) -> int:
    """Return how many rows a thread takes at a time, so that no thread waits long for the last."""
    return max(1, min(most, -(-rows // (4 * workers()))))


def _hide(scores: Tensor, excluded: Tensor) -> None:
    """Set each row's excluded column to -inf, if it is among the columns of ``scores``."""
    inside = torch.nonzero((excluded >= 0) & (excluded < scores.shape[1])).flatten()
    scores[inside, excluded[inside]] = float("-inf")


Similarity = Literal["dot", "cosine"]
_SIMILARITIES = get_args(Similarity)


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
    if similarity not in _SIMILARITIES:
        raise ConfigurationError(f"similarity={similarity!r} is not one of {', '.join(_SIMILARITIES)}.")
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
    """Return a mask ``(rows,)`` of embeddings whose square fits into float32: any two have a finite score."""
    return embeddings.float().square().sum(dim=1).isfinite()


def refuse_broken(embeddings: Tensor, side: str) -> None:
    """Refuse embeddings that are not finite, or too large for a finite score."""
    if float(torch.linalg.vector_norm(embeddings.float())) < 1e19:  # its square still fits into float32
        return
    broken = int((~unbroken(embeddings)).sum())
    if broken:
        raise DataError(
            f"{broken} of {len(embeddings)} {side} embeddings hold a NaN or infinity, or are too long for a finite "
            "score."
        )
