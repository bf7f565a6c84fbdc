"""Softmax losses on the matrix of similarities; docs/derivations.md proves their suprema.

Formulas use E = exp(2 M / t), the largest ratio of two exponentials in a row. The code computes with 1 / E,
which underflows to 0 where E would overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

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
    """The common part of losses with a temperature."""

    temperature: float  # divides the similarity; positive

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_temperature(self.temperature)

    @property
    def _inverse_ratio(self) -> float:
        """1 / E: the smallest exponential of a score over the largest."""
        return math.exp(-2.0 * self.high / self.temperature)


@dataclass(frozen=True, kw_only=True)
class SoftmaxPairLoss(_TemperedLoss):
    """Softmax of each query's own passage against the batch: InfoNCE, N-pairs, MultipleNegativesRanking.

    Row i is ``-log p_ii`` with p_ij = softmax_j(S_ij / t), so c_ij = (p_ij - 1{i=j}) / t.

    One record moves the gradient by 2 (1 - p_min) + 2 m p_max in units of B / t, where a share is between p_min and
    p_max; a replacement moves it by 4 (1 - p_min) + 2 m p_max. For large n these tend to 2 (1 + E) / t and
    (4 + 2 E) / t.

    The paper's Lemma 4.5 uses one share for both and is too small by 2 (p_max - p_min). ``sensitivity_from=paper``
    selects it to reproduce the paper's experiments. It is **not a guarantee**, and `claim` is ``refuted``.
    """

    proved: ClassVar[bool] = True

    sensitivity_from: Literal["proof", "paper"] = "proof"  # ``paper`` is Lemma 4.5 as printed (only ``add_or_remove``)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.loss.sensitivity_from", self.sensitivity_from, ("proof", "paper"))

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
            if relation != "add_or_remove":
                raise ConfigurationError(
                    f"The paper states Lemma 4.5 for add_or_remove, not for relation={relation!r}. "
                    "Choose privacy.sensitivity=proof, or sensitivity_from='proof' of the loss."
                )
            return 2.0 * (1.0 + (n - 2) * largest_share(n, self._inverse_ratio)) / self.temperature
        return softmax_supremum(n, self._inverse_ratio, relation) / self.temperature


@dataclass(frozen=True, kw_only=True)
class SymmetricSoftmaxPairLoss(_TemperedLoss):
    """The mean of query-to-passage and passage-to-query softmax, the loss of CLIP.

    Row i is ``-(log p_ii + log r_ii) / 2`` with r_ij = softmax_i(S_ij / t) over queries, so
    c_ij = (p_ij + r_ij - 2 * 1{i=j}) / (2 t). A masked pair is masked in both directions.

    The sensitivity is that of `SoftmaxPairLoss`.
    """

    proved: ClassVar[bool] = True

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
    """Softmax with a constant in the denominator, like ``n0 / k`` additional passages with the top score.

    Row i is ``-z_ii + log(sum_j exp z_ij + (n0 / k) exp(M / t))`` with z = S / t and k = ``negative_weight``. Whatever
    the temperature, the sensitivity is at most (2 + k m / n0) / t. A large k gives InfoNCE.
    """

    proved: ClassVar[bool] = True

    negative_weight: float = 1.0  # k, the weight of negatives relative to the constant; positive
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
        """Return the logits of the candidates and, in a last column, of the constant; shape ``(..., n, n + 1)``."""
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
    """Return the supremum of `SoftmaxPairLoss`, in units of B / t."""
    own_rows = 1 if relation == "add_or_remove" else 2
    own = 2.0 * own_rows * (1.0 - least_share(n, inverse_ratio))
    return own + 2.0 * (n - 1) * largest_share(n, inverse_ratio)
