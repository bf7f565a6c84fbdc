"""The slow reference engine: each unit in its own forward and backward pass, by plain autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_dpret.privacy.clipping.base import ClippedSum, ClipStats, RowLoss, accumulator_dtype, check_losses
from lit_dpret.privacy.clipping.recording_check import refuse_hidden_calls
from lit_dpret.privacy.clipping.units import UnitRows


class LoopClipping(ClippedSum):
    """One pass for each unit, in which no other unit takes part; ``privacy.engine=loop``.

    Guarantees:
        - A unit's contribution depends only on its own rows, the weights and random numbers: no value of another unit,
          NaN or infinite ones included, reaches it.
        - A unit whose loss depends on no trainable parameter contributes zero. A batch of only such units is refused,
          unless a unit so far has depended on one.
    """

    units_apart = True
    _reached = False

    def _add(self, row_loss: RowLoss, batch: UnitRows) -> ClipStats:
        norms = torch.zeros(len(self.groups), batch.units, dtype=torch.float64, device=batch.real.device)
        constant = None
        for group in batch.groups:
            for unit, rows in zip(group.units.tolist(), group.rows, strict=True):
                losses = row_loss(rows)
                if isinstance(losses, Tensor) and not losses.requires_grad:
                    constant = losses, len(rows)
                    continue
                norms[:, unit] = self._add_unit(losses, len(rows))
                self._reached = True
        if constant is not None and not self._reached:
            check_losses(*constant)
        self._torn = False
        return self.stats(norms, batch)

    def _add_unit(self, losses: Tensor, rows: int) -> Tensor:
        """Add the clipped gradient of a unit; return its norm in each group, ``(groups,)``."""
        check_losses(losses, rows)
        refuse_hidden_calls(losses)
        parameters = self.parameters
        norms = torch.zeros(len(self.groups), dtype=torch.float64, device=losses.device)
        if not losses.isfinite().all():
            return norms.fill_(torch.nan)
        found: Sequence[Tensor | None] = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
        gradients = {
            name: (g.to_dense() if g.is_sparse else g).to(accumulator_dtype(parameters[name]))
            for name, g in zip(parameters, found, strict=True)
            if g is not None
        }
        for name, gradient in gradients.items():
            norms[self.group_of[name]] += gradient.double().square().sum()
        norms.sqrt_()
        factors = self.factors(norms[:, None]).flatten().tolist()
        self._torn = True  # until the last unit is in: half of a batch must not be released
        for name, gradient in gradients.items():
            # A factor of zero leaves the gradient out, because zero times NaN is NaN.
            if factor := factors[self.group_of[name]]:
                self._sums[name] = self._sums.get(name, 0) + factor * gradient
        return norms
