"""The few passages of many that can be among the best, kept while scores stream by.

Sorting every score is what makes a search slow. Nearly all scores lie below what is already held, so
they are only compared with it; the others are appended, and cut back when a row is full.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lit_dpret.retrieval.topk import EMPTY, MISSING, NO_RANK, packed, smallest, unpacked

_SPARE = 2  # a row holds so many times its width more before it is cut back


class CandidateBuffer:
    """For each query the passages with the ``width`` highest scores so far.

    Guarantees:
        - Every passage that is not among `indices` scored at most the row's ``floor``, or less than
          what ``add`` was told for it.

    Args:
        queries: How many rows.
        width: How many passages of each query are certain to be kept.
        device: Where the scores are.
        floor: For each query a score below which nothing is kept; so low that ``width`` passages exceed
            it, or the row ends with fewer (``count``).
    """

    def __init__(self, queries: int, width: int, device: torch.device, floor: Tensor | None = None) -> None:
        self.width, self.capacity = width, (1 + _SPARE) * width
        self.keys = torch.full((queries, self.capacity), EMPTY, device=device)
        self.count = torch.zeros(queries, dtype=torch.long, device=device)
        self.floor = torch.full((queries,), float("-inf"), device=device) if floor is None else floor.clone()

    def add(self, rows: slice, scores: Tensor, start: int, at_least: Tensor | None = None) -> None:
        """Take in the scores of some queries for consecutive passages.

        Args:
            rows: The queries.
            scores: float32 or bfloat16, shape ``(rows, passages)``, on the device.
            start: Index of the first passage.
            at_least: A score for each query, below which a passage is of no interest.
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

    def indices(self) -> Tensor:
        """The passages that are left, shape ``(queries, width)``, in no order, on the CPU; `MISSING` as filler."""
        self._cut(slice(0, len(self.keys)))
        ranks = unpacked(self.keys[:, : self.width])[1]
        return ranks.masked_fill_(ranks == NO_RANK, MISSING).cpu()

    def _above(self, rows: slice, scores: Tensor, at_least: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Row and column of every score that matters, and how many there are in each row."""
        floor = self.floor[rows] if at_least is None else torch.maximum(self.floor[rows], at_least)
        floor = floor.to(scores.dtype)  # rounding keeps the order, so what reaches the floor reaches it rounded
        if scores.device.type == "cpu":
            hits = torch.from_numpy(_nonzero(np.greater_equal(*_comparable(scores, floor))))
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
    """Both as NumPy arrays of a kind that it compares as the numbers compare."""
    floor = floor[:, None]
    if scores.dtype != torch.bfloat16:
        return scores.numpy(), floor.numpy()
    if bool((floor > 0).all()):  # there the bits have the order of the numbers
        return scores.view(torch.int16).numpy(), floor.view(torch.int16).numpy()
    return scores.float().numpy(), floor.float().numpy()


def _nonzero(mask: np.ndarray) -> np.ndarray:
    """``flatnonzero`` of a mask nearly all of which is false: eight places are passed over at a time."""
    flat = mask.reshape(-1)
    if len(flat) % 8:
        return np.flatnonzero(flat)
    words = flat.view(np.uint64)
    some = np.flatnonzero(words != 0)
    inner = np.flatnonzero(words[some].view(np.bool_))
    found: np.ndarray = (some[inner >> 3] << 3) | (inner & 7)
    return found
