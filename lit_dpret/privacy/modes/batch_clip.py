"""Naive-DP: clip the gradient of a whole sub-batch (Kong, Munoz Medina and Ribero, 2310.03104, section 5).

When one unit is removed the others remain, so the clipped gradient can turn from one point of the ball to the opposite
one: it moves by 2C, not by C.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_dpret.distributed.strategies import SUMS_ADD_UP, Supported
from lit_dpret.privacy.accounting.coupled_sensitivity import Bounded, Relation
from lit_dpret.privacy.clipping.base import LEAST_FACTOR, refuse_batch_mixing, room_for_rounding, trainable
from lit_dpret.privacy.modes.base import GradientSums
from lit_dpret.privacy.modes.coupled import CoupledMode
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan


class BatchClip(CoupledMode):
    """Clip the gradient of each sub-batch's mean loss.

    Guarantees:
        - Removing, adding or replacing one unit moves the sum by at most 2 ``max_grad_norm``, for every loss,
          temperature and batch size.
        - A sub-batch whose gradient is not finite, or so large that fp32 could not represent its clip factor,
          contributes zero and is counted.

    Args:
        max_grad_norm: L2 bound C on the gradient of one sub-batch's mean loss.
        l2_sensitivity: The total, 2C, given instead.
        sub_batches: The number of parts of a logical batch; each is clipped, and they are averaged.
    """

    name: ClassVar[str] = "batch_clip"
    strategies: ClassVar[Supported] = SUMS_ADD_UP
    clips_whole_batch: ClassVar[bool] = True
    bounded: ClassVar[Bounded] = "sub_batch"
    bounds_any_rows: ClassVar[bool] = True

    def _sensitivity(self, n_max: int, change: Relation, loss: Any) -> float:
        # Whatever a missing unit does to the mean gradient, both vectors have norm at most C.
        return 2.0

    def _denominator(self, draft: PrivacyPlan, parts: int) -> float:
        # Each sub-batch gives one mean, so the sum is over sub-batches and not over units.
        return float(parts)

    def attach(self, module: nn.Module, plan: PrivacyPlan | None, stream: KeyedStream) -> None:
        super().attach(module, plan, stream)
        refuse_batch_mixing(module)
        self._sums = GradientSums(module)

    def contribute(self, module: Any, batch: Any) -> None:
        self._refuse_large(int(batch.mask.sum()))
        super().contribute(module, batch)

    def add(self, row_loss: Any, unit_ids: Tensor, mask: Tensor) -> None:
        refuse_batch_mixing(self._module)
        parameters = trainable(self._module)
        self._watch.before()
        with torch.enable_grad():
            loss = row_loss()[mask[unit_ids]].mean()
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        self._watch.after()
        wide = {
            name: gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            for name, gradient in zip(parameters, found, strict=True)
            if gradient is not None
        }
        self.counts.units += int(mask.sum())
        # float64: the norm decides the factor, and squares of large float32 gradients overflow.
        norm = torch.stack([gradient.double().norm() for gradient in wide.values()]).norm() if wide else torch.zeros(1)
        bound = room_for_rounding(self._plan.max_grad_norm, parameters.values())
        factor = float((bound / norm).clamp(max=1.0))
        # NaN times zero is NaN, so such a sub-batch is left out instead of scaled down.
        if not bool(norm.isfinite()) or not bool(loss.isfinite()) or factor < LEAST_FACTOR:
            self.counts.non_finite += 1
            return
        self.counts.clipped += int(norm > self._plan.max_grad_norm)
        self._sums.add({name: gradient * factor for name, gradient in wide.items()})
