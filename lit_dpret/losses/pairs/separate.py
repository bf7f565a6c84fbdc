"""Losses that are a sum of separate terms for every pair, without a softmax that couples a row.

Let d be the largest absolute coefficient on the diagonal, and o the largest off it. One record moves the gradient by
d + 2 m o, and by twice that if it is replaced (docs/derivations.md). With a fixed normaliser this grows without limit
in n: choose a normaliser near the size of the batch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dpret.losses.pairs.base import PairwiseLoss, Relation, checked_normaliser, checked_positive, eye_like
from lit_dpret.losses.similarity import checked_temperature
from lit_dpret.settings import require_choice


@dataclass(frozen=True, kw_only=True)
class _SeparateLoss(PairwiseLoss):
    """The common part of sums over pairs."""

    def _supremum(self, n: int, relation: Relation) -> float:
        diagonal, other = self._largest_coefficients()
        return (1 if relation == "add_or_remove" else 2) * (diagonal + 2 * (n - 1) * other)

    @abstractmethod
    def _largest_coefficients(self) -> tuple[float, float]:
        """Return the largest absolute coefficient on the diagonal, and off it."""


@dataclass(frozen=True, kw_only=True)
class SigmoidPairLoss(_SeparateLoss):
    """A separate logistic loss for every pair: the loss of SigLIP.

    Row i is ``-log s(z_ii + b) - (a / (n0 - 1)) sum_{j != i} log s(-z_ij - b)`` with z = S / t, s the logistic
    function, a = ``negative_weight`` and b = ``bias``. The sensitivity is below (1 + 2 a m / (n0 - 1)) / t for *any*
    scores: with ``dot`` the radius may be left open.
    """

    proved: ClassVar[bool] = True

    temperature: float  # divides the similarity; positive
    bias: float = 0.0  # added to the scores after division; SigLIP starts at -10. Public
    negative_weight: float = 1.0  # a, the total weight of a row's negatives relative to its positive
    n0: float | None = None  # the public normaliser, above 1; null takes the expected size of a sub-batch

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_temperature(self.temperature)
        checked_positive("negative_weight", self.negative_weight)
        checked_positive("bias", self.bias, above=-math.inf)
        if self.n0 is not None:
            checked_positive("n0", self.n0, above=1.0)

    @property
    def _needs_range(self) -> bool:
        return False

    @property
    def _weight(self) -> float:
        return self.negative_weight / (checked_normaliser(self.n0, type(self).__name__) - 1.0)

    def _row_losses(self, table: Tensor) -> Tensor:
        logits = table / self.temperature + self.bias
        negatives = (F.softplus(logits) * (1.0 - eye_like(table))).sum(-1)
        return F.softplus(-logits.diagonal(dim1=-2, dim2=-1)) + self._weight * negatives

    def _coefficients(self, table: Tensor) -> Tensor:
        logits = table / self.temperature + self.bias
        own = torch.eye(table.shape[-1], dtype=torch.bool, device=table.device)
        return torch.where(own, -torch.sigmoid(-logits), self._weight * torch.sigmoid(logits)) / self.temperature

    def _largest_coefficients(self) -> tuple[float, float]:
        top = self.high / self.temperature
        diagonal, other = _logistic(top - self.bias), self._weight * _logistic(top + self.bias)
        return diagonal / self.temperature, other / self.temperature


@dataclass(frozen=True, kw_only=True)
class KernelPairLoss(_SeparateLoss):
    """Positives pull at a constant rate, negatives push by a kernel, as in kernel contrastive learning.

    Row i is ``-S_ii / t + (k / n0) sum_{j != i} exp((S_ij - M) / t)`` with k = ``negative_weight``. For cosine the
    exponential is a Gaussian kernel of the distance. The sensitivity is (1 + 2 k m / n0) / t.
    """

    proved: ClassVar[bool] = True

    temperature: float  # divides the similarity; positive
    negative_weight: float = 1.0  # k, the largest total weight of a row's negatives relative to its positive
    n0: float | None = None  # the public normaliser, above 0; null takes the expected size of a sub-batch

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_temperature(self.temperature)
        checked_positive("negative_weight", self.negative_weight)
        if self.n0 is not None:
            checked_positive("n0", self.n0)

    @property
    def _weight(self) -> float:
        return self.negative_weight / checked_normaliser(self.n0, type(self).__name__)

    def _kernel(self, table: Tensor) -> Tensor:
        return self._weight * ((table - self.high) / self.temperature).exp() * (1.0 - eye_like(table))

    def _row_losses(self, table: Tensor) -> Tensor:
        return self._kernel(table).sum(-1) - table.diagonal(dim1=-2, dim2=-1) / self.temperature

    def _coefficients(self, table: Tensor) -> Tensor:
        return (self._kernel(table) - eye_like(table)) / self.temperature

    def _largest_coefficients(self) -> tuple[float, float]:
        return 1.0 / self.temperature, self._weight / self.temperature


@dataclass(frozen=True, kw_only=True)
class SpreadoutPairLoss(_SeparateLoss):
    """Push every query away from the other rows' passages: the paper's spreadout regulariser.

    Row i is ``sum_{j != i} S_ij^2 / N``. With the fixed, public N = n0 - 1 the sensitivity is 4 M m / (n0 - 1), and
    twice that with a replacement. With the realised N = n - 1 (the paper's Definition 2.3) it is 6 M (4 M for n = 2),
    and 8 M with a replacement.
    """

    proved: ClassVar[bool] = True

    normaliser: Literal["fixed", "realised"] = "fixed"
    n0: float | None = None  # the fixed public normaliser, above 1; null takes the expected size of a sub-batch

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.loss.normaliser", self.normaliser, ("fixed", "realised"))
        if self.n0 is not None:
            checked_positive("n0", self.n0, above=1.0)

    def _divisor(self, n: int) -> float:
        if self.normaliser == "realised":
            return float(max(n - 1, 1))
        return checked_normaliser(self.n0, type(self).__name__) - 1.0

    def _row_losses(self, table: Tensor) -> Tensor:
        return (table.square() * (1.0 - eye_like(table))).sum(-1) / self._divisor(table.shape[-1])

    def _coefficients(self, table: Tensor) -> Tensor:
        return 2.0 * table * (1.0 - eye_like(table)) / self._divisor(table.shape[-1])

    def _largest_coefficients(self) -> tuple[float, float]:
        return 0.0, 2.0 * self.high / (checked_normaliser(self.n0, type(self).__name__) - 1.0)

    def _supremum(self, n: int, relation: Relation) -> float:
        if self.normaliser == "fixed":
            return super()._supremum(n, relation)
        if relation == "replace_one":
            return 0.0 if n == 1 else 8.0 * self.high
        return self.high * (0.0, 4.0, 6.0)[min(n, 3) - 1]


def _logistic(x: float) -> float:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
