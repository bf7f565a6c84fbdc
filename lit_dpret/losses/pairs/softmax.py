r"""Softmax losses on the matrix of similarities.

The formulas are written with E = exp(2 M / t), the largest ratio of two exponentials in a row, and
computed with 1 / E, which underflows to 0 where E would overflow. With n candidates in the range a
share is at most p_max(n) = E / (E + n - 1) and at least p_min(n) = 1 / (1 + (n - 1) E), and

    m p_max grows with n:  m E / (E + m) = E (1 - E / (E + m)),      p_min falls with n.

**The O(1) of these losses is exp(2 / t).** At a temperature of 1 the bound tends to 16.8 / t; at 0.1
and below it is 2 n / t for every batch that fits in memory, which is the naive bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses.pairs.base import (
    LossClaim,
    PairwiseLoss,
    Relation,
    checked_normaliser,
    checked_positive,
    eye_like,
)
from lit_dpret.losses.similarity import checked_temperature
from lit_dpret.settings import require_choice


@dataclass(frozen=True, kw_only=True)
class _TemperedLoss(PairwiseLoss):
    """What the losses with a temperature share."""

    temperature: float  # divides the similarity; positive

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_temperature(self.temperature)

    @property
    def _inverse_ratio(self) -> float:
        """1 / E: the least over the largest exponential of a score."""
        return math.exp(-2.0 * self.high / self.temperature)


@dataclass(frozen=True, kw_only=True)
class SoftmaxPairLoss(_TemperedLoss):
    r"""Softmax of each query's own passage against the batch: InfoNCE, N-pairs, MultipleNegativesRanking.

    Row i is ``-log p_ii`` with p_ij = softmax_j(S_ij / t), so c_ij = (p_ij - 1{i=j}) / t.

    **Add or remove** (units of B / t): 2 (1 - p_min) + 2 m p_max. *Proof.* Record n's own row weighs
    sum_j |p_nj - 1{j=n}| = 2 (1 - p_nn). In row i < n a share without record n is p'_ij = p_ij / (1 - p_in), so
    p'_ij - p_ij = p_in p'_ij, which sums to p_in over j < n: with its own |c_in| = p_in, the row gives 2 p_in.
    Now p_nn >= p_min and p_in <= p_max. It is attained by query i = -a, passage i = a for i < n, and
    query n = a, passage n = -a: p_nn is least and all p_in largest at once.

    **Replace one**: 4 (1 - p_min) + 2 m p_max. *Proof.* The own row counts twice, old and new. In row i < n
    the shares of the surviving j are q_ij (1 - p_in) and q_ij (1 - p*_in) with the same q that sums to 1, so
    the row gives |p_in - p*_in| + p_in + p*_in = 2 max(p_in, p*_in). Attained by the configuration above
    where the new record has the embeddings of the old one and the opposite gradients.

    **The limit** for large n is 2 (1 + E) / t, and (4 + 2 E) / t for replacement.

    The paper's Lemma 4.5 has 2 (1 + (n - 2) p_max): it uses one share p_n both where it must be
    small (the own row) and where it must be large (the column). It is too small by
    2 (p_max - p_min) for every n >= 2, and a real encoder attains more. ``sensitivity_from=paper``
    selects it to reproduce their experiments; it is **no guarantee**, and `claim` says ``refuted``.
    """

    sensitivity_from: Literal["proof", "paper"] = "proof"  # ``paper`` is Lemma 4.5 as printed (``add_or_remove`` alone)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("loss.sensitivity_from", self.sensitivity_from, ("proof", "paper"))

    @property
    def claim(self) -> LossClaim:
        """``refuted`` for the paper's constant."""
        return super().claim if self.sensitivity_from == "proof" else "refuted"

    def _row_losses(self, table: Tensor) -> Tensor:
        logits = table / self.temperature
        return logits.logsumexp(-1) - logits.diagonal(dim1=-2, dim2=-1)

    def _coefficients(self, table: Tensor) -> Tensor:
        return ((table / self.temperature).softmax(-1) - eye_like(table)) / self.temperature

    def _supremum(self, n: int, relation: Relation) -> float:
        if self.sensitivity_from == "paper":
            self._check_paper(relation)
            return 2.0 * (1.0 + (n - 2) * largest_share(n, self._inverse_ratio)) / self.temperature
        return softmax_supremum(n, self._inverse_ratio, relation) / self.temperature

    def _check_paper(self, relation: Relation) -> None:
        if relation != "add_or_remove":
            raise ConfigurationError(
                f"The paper states Lemma 4.5 for add_or_remove, not for relation={relation!r}. "
                "Choose loss.sensitivity_from=proof."
            )


@dataclass(frozen=True, kw_only=True)
class SymmetricSoftmaxPairLoss(_TemperedLoss):
    r"""The mean of query-to-passage and passage-to-query softmax, the loss of CLIP.

    Row i is ``-(log p_ii + log r_ii) / 2`` with r_ij = softmax_i(S_ij / t) over queries, so
    c_ij = (p_ij + r_ij - 2 * 1{i=j}) / (2 t). A masked pair is masked in both directions.

    **Both relations: the supremum of `SoftmaxPairLoss`**. *Proof.* G is the mean of two sums. The first is
    that of `SoftmaxPairLoss`; the second is the same for the transposed table, in which record k still
    owns row k and column k. A mean moves by at most the larger of the two. It is attained: the
    configuration of `SoftmaxPairLoss` is a symmetric table, and the two directions differ in it with the
    same sign at every pair.
    """

    def _row_losses(self, table: Tensor) -> Tensor:
        logits = table / self.temperature
        return (logits.logsumexp(-1) + logits.logsumexp(-2)) / 2 - logits.diagonal(dim1=-2, dim2=-1)

    def _coefficients(self, table: Tensor) -> Tensor:
        logits = table / self.temperature
        return ((logits.softmax(-1) + logits.softmax(-2)) / 2 - eye_like(table)) / self.temperature

    def _supremum(self, n: int, relation: Relation) -> float:
        return softmax_supremum(n, self._inverse_ratio, relation) / self.temperature


@dataclass(frozen=True, kw_only=True)
class NullMassSoftmaxPairLoss(_TemperedLoss):
    r"""Softmax with a constant in the denominator, like ``n0 / k`` more passages with the top score.

    Row i is ``-z_ii + log(sum_j exp z_ij + (n0 / k) exp(M / t))`` with z = S / t and k = ``negative_weight``.
    With x_ij = exp((S_ij - M) / t) in [1/E, 1] and v = n0 / k, the shares are p_ij = x_ij / (sum_j x_ij + v)
    and c_ij = (p_ij - 1{i=j}) / t. It is the gradient of a real loss, and bounded without exp(2 / t):
    whatever the temperature, the sensitivity is at most (2 + k m / n0) / t. A large k gives InfoNCE.

    **Add or remove** (units of B / t): 1 + (m - 1/E) / (m + 1/E + v) + m h(W). *Proof.* The own row: with Y the
    sum of its other exponentials and x its own, sum_j<n p_nj + 1 - p_nn = 1 + (Y - x) / (Y + x + v), which
    grows with Y <= m and falls with x >= 1/E. In row i < n let W sum the surviving exponentials and x be
    the new one. A surviving share falls by x_ij (1 / (W + v) - 1 / (W + x + v)), so they and p_in give
    x (2 W + v) / ((W + v)(W + x + v)). It grows with x <= 1; at x = 1 call it h(W). The derivative of h has
    the sign of -2 u^2 + 2 u v + v at u = W + v, so h peaks at W = v / (sqrt(v^2 + 2 v) + v) < 1/2, or at
    the nearest end of [m/E, m]. For m >= 1 only the lower end can matter. m h grows with n: while the peak is inside,
    h stays; at W = m/E the logarithm of m h has in y = m/E the derivative
    1/y - 1/(y + v) + 1/(y + v/2) - 1/(y + v + 1) > 0. Finally h(W) <= 1/v, since (2 u - v) v <= u^2.

    **Replace one**: 2 [1 + (m - 1/E) / (m + 1/E + v)] + 2 m / (1 + v + m/E). *Proof.* The own row counts twice.
    In row i < n, with x >= x* (else swap the two records), the survivors and both own terms give
    W / (W + x* + v) - W / (W + x + v) + x / (W + x + v) + x* / (W + x* + v)
    = 1 - v / (W + x* + v) + (x - W) / (W + x + v), which grows with x and with x*; at x = x* = 1 it is
    2 / (W + 1 + v), largest at W = m/E.

    Both are suprema over tables. Embeddings attain them with replacement, in the configuration of
    `SoftmaxPairLoss`, and for add or remove where h peaks at W = m/E. Elsewhere searches over embeddings
    end up to 4 percent lower, since W of the peak asks for scores that the own row does not want.

    **The limit** for large n and a fixed n0 is that of `SoftmaxPairLoss`.
    """

    negative_weight: float = 1.0  # k, how much negatives weigh against the constant; positive
    n0: float | None = None  # the constant's public size, above 0; null takes the expected size of a sub-batch

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_positive("negative_weight", self.negative_weight)
        if self.n0 is not None:
            checked_positive("n0", self.n0)

    @property
    def _null_mass(self) -> float:
        """The constant v, in units of the largest exponential."""
        return checked_normaliser(self.n0, type(self).__name__) / self.negative_weight

    def _shifted(self, table: Tensor) -> Tensor:
        """Logits of the candidates and, in a last column, of the constant; shape ``(..., n, n + 1)``."""
        logits = (table - self.high) / self.temperature
        null = logits.new_full((*logits.shape[:-1], 1), math.log(self._null_mass))
        return torch.cat([logits, null], dim=-1)

    def _row_losses(self, table: Tensor) -> Tensor:
        logits = self._shifted(table)
        return logits.logsumexp(-1) - logits.diagonal(dim1=-2, dim2=-1)

    def _coefficients(self, table: Tensor) -> Tensor:
        return (self._shifted(table).softmax(-1)[..., :-1] - eye_like(table)) / self.temperature

    def _supremum(self, n: int, relation: Relation) -> float:
        v, others, least = self._null_mass, n - 1, self._inverse_ratio
        own_row = 1.0 + (others - least) / (others + least + v)
        if relation == "replace_one":
            return (2.0 * own_row + 2.0 * others / (1.0 + v + others * least)) / self.temperature
        w = max(others * least, v / (math.sqrt(v * v + 2.0 * v) + v))
        other_row = (2.0 * w + v) / ((w + v) * (w + v + 1.0))
        return (own_row + others * other_row) / self.temperature


def largest_share(n: int, inverse_ratio: float) -> float:
    """Return the largest share p_max among n candidates; ``inverse_ratio`` is 1 / E."""
    return 1.0 / (1.0 + (n - 1) * inverse_ratio)


def least_share(n: int, inverse_ratio: float) -> float:
    """Return the least share p_min among n candidates; ``inverse_ratio`` is 1 / E."""
    return 1.0 if n == 1 else inverse_ratio / (inverse_ratio + n - 1)


def softmax_supremum(n: int, inverse_ratio: float, relation: Relation) -> float:
    """Return the supremum proved at `SoftmaxPairLoss`, in units of B / t."""
    own_rows = 1 if relation == "add_or_remove" else 2
    own = 2.0 * own_rows * (1.0 - least_share(n, inverse_ratio))
    return own + 2.0 * (n - 1) * largest_share(n, inverse_ratio)
