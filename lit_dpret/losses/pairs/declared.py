"""A loss of one's own, with bounds that its author declares: Theorem 4.2 of paper 002 as a seam."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses.pairs.base import Claim, PairwiseLoss, Relation

Bound = Callable[[int, float, float], float]
"""``(n, low, high)`` to a bound over all tables of n records with scores in ``[low, high]``."""


@dataclass(frozen=True, kw_only=True)
class DeclaredPairLoss(PairwiseLoss):
    r"""Any loss of the table of similarities, for which three bounds are declared.

    For every n, every table of n records in the range, and every record of it (called n):

    - ``g1(n, low, high)`` bounds the record's own row,      sum_j |c_nj|;
    - ``g2(n, low, high)`` bounds its column in other rows,  sum_{i<n} |c_in|;
    - ``l(n, low, high)`` bounds how other rows move,        sum_{j<n} |c_ij - c'_ij| for each i < n.

    **Each must hold on its own.** They may be attained at different tables, and are in softmax; the
    paper's Lemma 4.5 takes one share for all three and comes out too small.

    **Add or remove**: g1 + g2 + (n - 1) l, Theorem 4.2. *Proof.* They bound the three parts of the sum at
    the head of `lit_dpret.losses.pairs.base`. **Replace one**: twice that, a bound. *Proof.* Remove one
    record, then add the other: both batches neighbour the one of n - 1 records. It may be far from the
    supremum.

    Both are taken as the largest over all sizes up to ``n_max``, so that bounds need not grow with n.

    The losses need not be functions of one row each. If they are not, c_ij is the derivative of the
    *sum* of all rows. Records must be treated alike: reordering them reorders the rows and nothing else.

    `check_declared_bounds` searches for tables that refute the declaration; finding none is no proof.

    Example:
        >>> def hinge(table: Tensor) -> Tensor:
        ...     gaps = 0.2 + table - table.diagonal().unsqueeze(1)
        ...     return (gaps.relu() * (1 - torch.eye(len(table)))).sum(1) / 31
        >>> loss = DeclaredPairLoss(
        ...     row_loss=hinge,
        ...     g1=lambda n, low, high: 2 * (n - 1) / 31,
        ...     g2=lambda n, low, high: (n - 1) / 31,
        ...     l=lambda n, low, high: 1 / 31,
        ... )
        >>> loss.sensitivity(32, relation="add_or_remove")
        4.0

    Args:
        row_loss: From a table ``(n, n)`` of scores to losses ``(n,)``, differentiable by autograd.
        g1: Bound on the own row.
        g2: Bound on the own column.
        l: Bound on the movement of another row.
        similarity: ``cosine`` or ``dot``.
        radius: The largest length of an embedding, with ``dot``.
    """

    row_loss: Callable[[Tensor], Tensor]
    g1: Bound
    g2: Bound
    l: Bound  # noqa: E741

    @property
    def claim(self) -> Claim:
        """``declared``: the guarantee is as good as its author's proof."""
        return "declared"

    def declared(self, n: int) -> tuple[float, float, float]:
        """The three bounds for n records.

        Raises:
            ConfigurationError: One of them is negative, NaN or infinite.
        """
        bounds = (self.g1(n, self.low, self.high), self.g2(n, self.low, self.high), self.l(n, self.low, self.high))
        for name, value in zip(("g1", "g2", "l"), bounds, strict=True):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(
                    f"{name}({n}, {self.low:g}, {self.high:g}) = {value}, where a finite bound of at least 0 is needed."
                )
        return bounds

    def _row_losses(self, table: Tensor) -> Tensor:
        if table.dim() > 2:
            return torch.stack([self._row_losses(one) for one in table])
        losses = self.row_loss(table)
        if losses.shape != table.shape[:1]:
            raise ConfigurationError(
                f"row_loss returns shape {tuple(losses.shape)} for a table of shape {tuple(table.shape)}; "
                f"it must return one loss for each row, shape {tuple(table.shape[:1])}."
            )
        return losses

    def _coefficients(self, table: Tensor) -> Tensor:
        with torch.enable_grad():
            searching = table.requires_grad
            leaf = table if searching else table.detach().requires_grad_()
            total = self._row_losses(leaf).sum()
            if not total.requires_grad:
                return torch.zeros_like(table)
            return torch.autograd.grad(total, leaf, create_graph=searching)[0]

    def _supremum(self, n: int, relation: Relation) -> float:
        largest = 0.0
        for size in range(1, n + 1):
            own_row, own_column, other_row = self.declared(size)
            largest = max(largest, own_row + own_column + (size - 1) * other_row)
        return largest if relation == "add_or_remove" else 2.0 * largest

    def _limit(self, relation: Relation) -> float:
        return math.inf  # not known from the declaration

    def _row_weight(self, n: int) -> float:
        return self.declared(n)[0]
