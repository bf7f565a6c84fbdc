"""A privacy mode of one's own: DP-SGD that trains half of the coordinates of each weight, chosen by a public seed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_dpret.privacy.modes import DPSGD, PrivacyMode


class Masked(DPSGD):
    """Clip each unit's gradient, zero half of the sum's coordinates, add noise to all of them.

    Guarantees:
        - Zeroing coordinates makes no vector longer, so one unit moves the masked sum by at most ``max_grad_norm``, and
          the noise of `DPSGD` covers it. The mask follows from ``mask_seed`` alone and is public.

    Args:
        mask_seed: Which coordinates are kept.
        settings: As for `DPSGD`.
    """

    name: ClassVar[str] = "masked"
    strategies = PrivacyMode.strategies  # one device: what was tested

    def __init__(self, *, mask_seed: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.mask_seed = mask_seed

    def facts(self) -> dict[str, Any]:
        return {"masked_share": 0.5, "mask_seed": self.mask_seed}

    def take(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.mask_seed)
        sums = super().take()
        return {name: sums[name] * self._kept(sums[name], generator) for name in sorted(sums)}

    def _kept(self, total: Tensor, generator: torch.Generator) -> Tensor:
        return (torch.rand(total.shape, generator=generator) < 0.5).to(total)
