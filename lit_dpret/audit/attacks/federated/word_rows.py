"""A curious server: detect the words of a silo's batches from the rows of the word-embedding table ("table rows" here).

The gradient of a row is zero where its token is in no text of the batch (Melis et al. 2019, 1805.04049), and paper 004
shares such updates every round. Tokens of *sentences* move rows as well, so evidence about the queries is the
difference from tokens of the collection alone. Weight decay moves all rows by one factor, the median over the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lit_dpret.audit.statistics.error_rates import Rate, rate
from lit_dpret.audit.statistics.metrics import auc
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.errors import DataError

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_ROUNDING = 1e-6
"""How far a table row moves by rounding to float32, as a share of the median row's norm."""
_DEVIATIONS = 6.0


@dataclass(frozen=True, eq=False, repr=False)
class MovedRows:
    """The change of each row of a word-embedding table beyond the common change of all rows."""

    # L2 norms, ``(vocabulary,)``. Movements within float32 rounding are set to 0: rounding grows with a row's length,
    # and would separate frequent from rare words without any update.
    moved: Floats
    kept: float  # the factor by which decay multiplied every row, as the update shows it; 1 without decay
    # Above this a row counts as touched: six robust deviations above the median row, and more than rounding.
    threshold: float

    def __repr__(self) -> str:
        return f"MovedRows({len(self.moved)} rows, {int(self.touched.sum())} touched)"

    @property
    def touched(self) -> NDArray[np.bool_]:
        return np.asarray(self.moved > self.threshold)


def moved_rows(before: Floats, after: Floats) -> MovedRows:
    """Measure how far an update moved the rows of a table, without weight decay; most rows must be touched by no text.

    ``before`` is the table that the server sent, ``after`` the one that came back, ``(vocabulary, dim)``.
    """
    if before.shape != after.shape or before.ndim != 2 or not before.size:
        raise DataError(f"Tables of shapes {before.shape} and {after.shape} are not two states of one.")
    squares = np.einsum("ij,ij->i", before, before)
    rows = squares > 0
    if not rows.any():
        raise DataError("Every row of the table is zero, so there is nothing to compare an update with.")
    kept = float(np.median(np.einsum("ij,ij->i", after[rows], before[rows]) / squares[rows]))
    least = _ROUNDING * float(np.median(np.sqrt(squares[rows])))
    moved = np.linalg.norm(after - kept * before, axis=1)
    moved[moved <= least] = 0.0
    spread = float(stats.median_abs_deviation(moved, scale="normal"))
    return MovedRows(moved, kept, max(least, float(np.median(moved)) + _DEVIATIONS * spread))


@dataclass(frozen=True, kw_only=True)
class TokenSeparation:
    """How well an update distinguishes some tokens from others."""

    tokens: int
    others: int
    auc: float  # the probability that one of `tokens` moved further than one of `others`
    recall: Rate  # the share of `tokens` that stand out
    precision: Rate | None  # the share of `tokens` among all that stand out; None where nothing does

    @property
    def prevalence(self) -> float:
        return self.tokens / (self.tokens + self.others)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens, "others": self.others, "prevalence": self.prevalence, "auc": self.auc,
            "recall": self.recall.to_dict(), "precision": None if self.precision is None else self.precision.to_dict(),
        }  # fmt: skip


def separate_tokens(
    rows: MovedRows, tokens: Ids, others: Ids, *, touched_alone: bool = False, confidence: float = 0.95
) -> TokenSeparation | None:
    """Distinguish tokens from others by the change of their rows; None if one kind is empty.

    Args:
        rows: How far the rows moved.
        tokens: Ids to find, without repetition.
        others: Ids that must not be named; none of them among ``tokens``.
        touched_alone: Compare only rows that stand out, to see whether how far a row moved tells more than that it did.
        confidence: Confidence level of the intervals, which assume independent tokens.
    """
    if len(np.intersect1d(tokens, others)):
        raise DataError("A token is in both groups, so the attack cannot be measured.")
    for ids in (tokens, others):
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < len(rows.moved)):
            raise DataError("A token has no row in the table that was attacked: it is of another tokenizer.")
    if touched_alone:
        tokens, others = tokens[rows.touched[tokens]], others[rows.touched[others]]
    if not len(tokens) or not len(others):
        return None
    right, wrong = int(rows.touched[tokens].sum()), int(rows.touched[others].sum())
    base = len(tokens) / (len(tokens) + len(others))
    scores = CanaryScores(rows.moved[tokens], rows.moved[others])
    return TokenSeparation(
        tokens=len(tokens),
        others=len(others),
        auc=auc(scores),
        recall=rate(right, len(tokens), confidence=confidence),
        precision=rate(right, right + wrong, chance=base, confidence=confidence) if right + wrong else None,
    )
