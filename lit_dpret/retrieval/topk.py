"""The order of a ranking, and its k best.

A passage's key is one integer: its float32 score in the upper half, its tie-breaking rank in the lower. Sorting,
merging and cutting rankings is then sorting integers, so a search in parts gives the order of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.metrics import MISSING as MISSING

NO_RANK = 2**32 - 1
"""The rank of a filler; at most this many passages can be searched."""

_MAGNITUDE = 0x7FFFFFFF


class TopK(NamedTuple):
    """The best passages of every query, best first.

    ``scores`` is float32 of shape ``(queries, k)``, ``indices`` long of the same shape: positions in
    the list of passages, or `MISSING` (with score -inf) if there are no more passages.
    """

    scores: Tensor
    indices: Tensor


def lexicographic_rank(passage_ids: Sequence[str]) -> Tensor:
    """Return every passage's rank in the order that breaks ties: ids descending, as UTF-8 bytes, as trec_eval does.

    Example:
        >>> lexicographic_rank(["d1", "d10", "d2"])
        tensor([2, 1, 0])
    """
    keys = [name.encode("utf-8") for name in passage_ids]
    order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
    for before, after in pairwise(order):
        if keys[before] == keys[after]:
            raise DataError(f"passage id {passage_ids[before]!r} occurs twice; ids must be unique.")
    rank = torch.empty(len(keys), dtype=torch.long)
    rank[torch.tensor(order, dtype=torch.long)] = torch.arange(len(keys))
    return rank


def packed(scores: Tensor, ranks: Tensor) -> Tensor:
    """Return keys whose ascending order is: score (float32, no NaN) descending, then rank ascending."""
    bits = (scores + 0.0).view(torch.int32)
    ascending = bits ^ ((bits >> 31) & _MAGNITUDE)
    return ((~ascending).long() << 32) | ranks


def unpacked(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores and ranks that `packed` encoded in ``keys``."""
    ascending = ~(keys >> 32).int()
    bits = ascending ^ ((ascending >> 31) & _MAGNITUDE)
    return bits.view(torch.float32), keys & NO_RANK


EMPTY = int(packed(torch.tensor([-torch.inf]), torch.tensor([NO_RANK])))
"""The key that sorts after every passage."""


def smallest(keys: Tensor, count: int) -> Tensor:
    """Move the ``count`` smallest keys of each row to its front, with the largest of them at index ``count - 1``.

    The rows are changed in place, except rows of at most ``count`` keys. The other keys are in no particular order;
    on an accelerator they become `EMPTY`.
    """
    if count >= keys.shape[1]:
        return keys
    if keys.device.type == "cpu":
        keys.numpy().partition(count - 1, axis=1)
    else:
        keys[:, :count] = keys.topk(count, dim=1, largest=False).values
        keys[:, count:] = EMPTY
    return keys


def ascending(keys: Tensor) -> Tensor:
    """Sort each row in ascending order; on the CPU in place."""
    if keys.device.type == "cpu":
        keys.numpy().sort(axis=1)
        return keys
    return keys.sort(dim=1).values


def places_by_rank(rank: Tensor) -> Tensor:
    """Return the inverse of a tie rank: the passage at each rank."""
    places = torch.empty_like(rank)
    places[rank] = torch.arange(len(rank))
    return places


def ranked(keys: Tensor, places: Tensor) -> TopK:
    """Return sorted keys as scores and indices; ``places`` is `places_by_rank`."""
    scores, ranks = unpacked(keys)
    missing = ranks == NO_RANK
    indices = places[ranks.masked_fill(missing, 0)] if len(places) else torch.zeros_like(ranks)
    return TopK(scores, indices.masked_fill_(missing, MISSING))


def merged(parts: Sequence[TopK], k: int, *, tie_rank: Tensor) -> TopK:
    """Merge rankings of shards of the passages into the ``k`` best for the same queries, as if searched together.

    Indices count over all shards; each ranking must reach rank ``k`` or cover its whole shard.
    """
    if not parts or k < 1 or len({len(part.scores) for part in parts}) != 1:
        raise ConfigurationError(
            f"{len(parts)} rankings cannot be merged with k={k}: at least one is needed, all of the same queries, and "
            "k of at least 1."
        )
    return first_k(torch.cat([keyed(part, tie_rank) for part in parts], dim=1), k, places_by_rank(tie_rank))


def first_k(keys: Tensor, k: int, places: Tensor) -> TopK:
    """Return the ``k`` smallest of each row of keys as a ranking, padded with `MISSING`."""
    if keys.shape[1] < k:
        keys = torch.cat([keys, keys.new_full((len(keys), k - keys.shape[1]), EMPTY)], dim=1)
    return ranked(ascending(smallest(keys, k)[:, :k].contiguous()), places)


def best_of(top: TopK, k: int, tie_rank: Tensor | None) -> TopK:
    """Return the first ``k`` of rankings in any order, on the CPU; without ``tie_rank`` an index is its own rank.

    This is `first_k` without inverting the rank, which takes 10 ms for a million passages.
    """
    scores, places = top.scores.numpy() + np.float32(0.0), top.indices.numpy()
    bits = scores.view(np.int32)
    ranks = places if tie_rank is None or not len(tie_rank) else tie_rank.numpy()[places]
    keys = (~(bits ^ ((bits >> 31) & _MAGNITUDE))).astype(np.int64) << 32 | ranks
    keys[places == MISSING] = EMPTY
    order = keys.argsort(axis=1)[:, :k]
    row = np.arange(len(order))[:, None]
    return TopK(torch.from_numpy(scores[row, order]), torch.from_numpy(places[row, order]))


def keyed(top: TopK, tie_rank: Tensor) -> Tensor:
    """Return a ranking, in any order, as keys; `MISSING` becomes `EMPTY`."""
    missing = top.indices == MISSING
    if not len(tie_rank):
        return torch.full(top.indices.shape, EMPTY)
    keys = packed(top.scores, tie_rank[top.indices.masked_fill(missing, 0)])
    return keys.masked_fill_(missing, EMPTY)


def top_k_of(scores: Tensor, k: int, tie_rank: Tensor) -> TopK:
    """Return the first ``k`` of one full row of float32 scores, ties by ``tie_rank``, ``(1, min(k, passages))``."""
    k = min(k, len(scores))
    if not k:
        return TopK(torch.empty(1, 0), torch.empty(1, 0, dtype=torch.long))
    floor = scores.topk(k).values[-1]
    kept = torch.from_numpy(np.flatnonzero((scores >= floor).numpy()))
    order = packed(scores[kept], tie_rank[kept]).argsort()[:k]
    return TopK(scores[kept][order][None], kept[order][None])


_SPARE = 2  # a row holds this many times its width in extra keys before it is cut back


class CandidateBuffer:
    """The passages with the ``width`` highest scores so far, for each query.

    Guarantees:
        - Every passage that is not among `indices` scored at most the row's ``floor``, or less than the ``at_least``
          passed to `add` for it.

    The best ``width`` passages of each query are certain to be kept. ``floor`` is for each query a score below which
    nothing is kept; it is low enough that ``width`` passages exceed it, or the row ends with fewer (``count``).
    """

    def __init__(self, queries: int, width: int, device: torch.device, floor: Tensor | None = None) -> None:
        self.width, self.capacity = width, (1 + _SPARE) * width
        self.keys = torch.full((queries, self.capacity), EMPTY, device=device)
        self.count = torch.zeros(queries, dtype=torch.long, device=device)
        self.floor = torch.full((queries,), float("-inf"), device=device) if floor is None else floor.clone()

    def add(self, rows: slice, scores: Tensor, start: int, at_least: Tensor | None = None) -> None:
        """Add the scores of some queries for consecutive passages.

        ``scores`` are float32 or bfloat16, ``(rows, passages)``, on the device. ``start`` is the index of the first
        passage. Passages below ``at_least``, a score for each query, are ignored.
        """
        step = _SPARE * self.width
        if scores.shape[1] > step and bool((self.floor[rows] == float("-inf")).any()):  # nothing to compare with yet
            self.add(rows, scores[:, :step], start, at_least)
            self.add(rows, scores[:, step:], start + step, at_least)
            return
        row, column, fresh = self._above(rows, scores, at_least)
        if self._overflows(rows, fresh):
            self._cut(rows)
            row, column, fresh = self._above(rows, scores, at_least)
            if self._overflows(rows, fresh):
                for left in range(0, scores.shape[1], step):
                    self.add(rows, scores[:, left : left + step], start + left, at_least)
                return
        within = torch.arange(len(row), device=row.device) - (fresh.cumsum(0) - fresh)[row]
        place = row * self.capacity + self.count[rows][row] + within
        self.keys[rows].view(-1)[place] = packed(scores[row, column].float(), column + start)
        self.count[rows] += fresh

    def indices(self, k: int = 0, margin: Tensor | None = None) -> Tensor:
        """Return the remaining passages, unordered, ``(queries, width)``, on the CPU, padded with `MISSING`.

        With ``margin``, a value for each query, drop those more than that below the ``k``-th best score.
        """
        self._cut(slice(0, len(self.keys)))
        scores, ranks = unpacked(self.keys[:, : self.width])
        out = ranks == NO_RANK
        if margin is not None and k < self.width:
            out |= scores < scores.topk(k, dim=1).values[:, -1:] - margin[:, None]
        return ranks.masked_fill_(out, MISSING).cpu()

    def _above(self, rows: slice, scores: Tensor, at_least: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the row and column of every score that matters, and their number in each row."""
        floor = self.floor[rows] if at_least is None else torch.maximum(self.floor[rows], at_least)
        floor = floor.to(scores.dtype)  # rounding keeps the order: what reaches the floor, reaches it rounded
        if scores.device.type == "cpu":
            hits = torch.from_numpy(nonzero(np.greater_equal(*_comparable(scores, floor))))
        else:
            hits = torch.nonzero((scores >= floor[:, None]).view(-1)).view(-1)
        row = hits // scores.shape[1]
        return row, hits - row * scores.shape[1], torch.bincount(row, minlength=len(scores))

    def _overflows(self, rows: slice, fresh: Tensor) -> bool:
        return bool((self.count[rows] + fresh > self.capacity).any())

    def _cut(self, rows: slice) -> None:
        keys = smallest(self.keys[rows], self.width)
        keys[:, self.width :] = EMPTY
        self.count[rows] = self.count[rows].clamp(max=self.width)
        full = self.count[rows] == self.width
        last = unpacked(keys[:, self.width - 1])[0]
        self.floor[rows] = torch.where(full, last, self.floor[rows])


def _comparable(scores: Tensor, floor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return both as NumPy arrays that compare as the numbers do."""
    floor = floor[:, None]
    if scores.dtype != torch.bfloat16:
        return scores.numpy(), floor.numpy()
    if bool((floor > 0).all()):  # then the bits have the order of the numbers
        return scores.view(torch.int16).numpy(), floor.view(torch.int16).numpy()
    return scores.float().numpy(), floor.float().numpy()


def nonzero(mask: np.ndarray) -> np.ndarray:
    """Return ``flatnonzero`` of a mask that is nearly all false, skipping eight positions at a time."""
    flat = mask.reshape(-1)
    if len(flat) % 8:
        return np.flatnonzero(flat)
    words = flat.view(np.uint64)
    some = np.flatnonzero(words != 0)
    inner = np.flatnonzero(words[some].view(np.bool_))
    found: np.ndarray = (some[inner >> 3] << 3) | (inner & 7)
    return found
