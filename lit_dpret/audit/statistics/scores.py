"""Scores of included and excluded canaries, and their counts at a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_dpret.errors import DataError
from lit_dpret.settings import is_whole

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The guesses at a threshold, by whether they are true."""

    tp: int
    fn: int
    fp: int
    tn: int

    def __post_init__(self) -> None:
        values = (self.tp, self.fn, self.fp, self.tn)
        if any(not is_whole(v) or v < 0 for v in values):
            raise DataError(f"Counts (tp, fn, fp, tn) = {values} must be non-negative integers.")
        if self.members == 0 or self.others == 0:
            raise DataError(f"Counts (tp, fn, fp, tn) = {values} need at least one member and one non-member.")

    @property
    def members(self) -> int:
        return self.tp + self.fn

    @property
    def others(self) -> int:
        return self.fp + self.tn

    @property
    def canaries(self) -> int:
        return self.members + self.others

    @property
    def guesses(self) -> int:
        return self.tp + self.fp


@dataclass(frozen=True, init=False, eq=False)
class CanaryScores:
    """Scores of an attack; higher means "it was trained on".

    Raises:
        DataError: One kind has no scores, they are not one-dimensional, or one is not a number.
    """

    in_scores: Floats  # of the canaries in the training data, shape ``(members,)``, ascending
    out_scores: Floats  # of the canaries that were left out, shape ``(others,)``, ascending
    pooled: Floats  # all scores, ascending, without marking which is which

    def __init__(self, in_scores: ArrayLike, out_scores: ArrayLike) -> None:
        for name, values in (("in_scores", in_scores), ("out_scores", out_scores)):
            array = np.sort(_row(name, values))
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        pooled = np.sort(np.concatenate([self.in_scores, self.out_scores]))
        pooled.setflags(write=False)
        object.__setattr__(self, "pooled", pooled)

    @classmethod
    def of(cls, scores: ArrayLike, included: Sequence[bool] | NDArray[np.bool_]) -> CanaryScores:
        """Build from one score per canary, and whether its coin included it in the training data."""
        values, members = _row("scores", scores), np.asarray(included)
        if members.dtype != np.bool_ or members.shape != values.shape:
            raise DataError(f"included must hold a truth value for each of {len(values)} scores, not {members.shape}.")
        return cls(values[members], values[~members])

    def __len__(self) -> int:
        return len(self.pooled)

    def __repr__(self) -> str:
        return f"CanaryScores(members={len(self.in_scores)}, others={len(self.out_scores)})"

    def highest(self, count: int) -> Counts:
        """Count correct guesses if exactly the ``count`` highest scores are guessed as members.

        Where a tie straddles the edge, the guesses are as wrong as the tie permits.
        """
        edge = self.pooled[-count]
        wrong = min(count, int((self.out_scores >= edge).sum()))
        right = max(int((self.in_scores > edge).sum()), count - wrong)
        return Counts(
            tp=right, fn=len(self.in_scores) - right, fp=count - right, tn=len(self.out_scores) - count + right
        )

    def counts(self, threshold: float) -> Counts:
        """Count correct guesses if every canary with ``score >= threshold`` is guessed as a member."""
        missed = int(np.searchsorted(self.in_scores, threshold, side="left"))
        alone = int(np.searchsorted(self.out_scores, threshold, side="left"))
        return Counts(tp=len(self.in_scores) - missed, fn=missed, fp=len(self.out_scores) - alone, tn=alone)


def roc_hull(scores: CanaryScores) -> tuple[Floats, Ints, Ints]:
    """Return the thresholds that no mixture of two others beats: the vertices of the ROC curve's concave hull.

    Returns:
        Thresholds, ascending, the last of them infinite; true negatives and false negatives at each.
    """
    thresholds = np.append(np.unique(scores.pooled), np.inf)
    alone = np.searchsorted(scores.out_scores, thresholds, side="left")
    missed = np.searchsorted(scores.in_scores, thresholds, side="left")
    hull: list[int] = []
    for index in range(len(thresholds)):
        # Andrew's monotone chain: drop a point that is not strictly above the line around it.
        while len(hull) > 1 and _turn(missed, alone, hull[-2], hull[-1], index) >= 0:
            hull.pop()
        hull.append(index)
    return thresholds[hull], alone[hull], missed[hull]


def _turn(x: Ints, y: Ints, a: int, b: int, c: int) -> int:
    """Return a positive number if b is below the line from a to c, 0 if it is on the line."""
    return int((x[b] - x[a]) * (y[c] - y[a]) - (y[b] - y[a]) * (x[c] - x[a]))


def _row(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise DataError(f"{name} must be one row of scores, not an array of shape {array.shape}.")
    if array.size == 0:
        raise DataError(f"{name} is empty: an audit needs scores of canaries on both sides.")
    broken = int((~np.isfinite(array)).sum())
    if broken:
        raise DataError(f"{name} has {broken} of {array.size} values that are NaN or infinite.")
    return array
