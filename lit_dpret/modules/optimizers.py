"""Optimizers by name. Under a private mode they see noised gradients only, so any of them will do.

DP-Adam is Adam fed with the clipped, noised mean gradient (Li et al., 2021); nothing in the
optimizer itself is private.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.budget import require_choice

Schedule = Literal["constant", "linear", "cosine"]
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Which optimizer to build, and how its learning rate moves.

    Args:
        name: ``adam``, ``adamw`` or ``sgd``.
        lr: Peak learning rate.
        schedule: ``constant``, ``linear`` or ``cosine`` decay to zero over the planned steps.
        warmup_steps: Steps of linear warm-up.
        weight_decay: Handed to the optimizer.
        betas: Adam's averages; null keeps the optimizer's own.
        momentum: For ``sgd``.
        eps: Adam's denominator floor; null keeps the optimizer's own.
    """

    name: str = "adam"
    lr: float = 1e-3
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    momentum: float = 0.0
    eps: float | None = None

    def __post_init__(self) -> None:
        require_choice("model.optimizer.name", self.name, tuple(OPTIMIZERS))
        require_choice("model.optimizer.schedule", self.schedule, get_args(Schedule))
        if not self.lr > 0:
            raise ConfigurationError(f"model.optimizer.lr={self.lr} must be positive.")

    def build(self, parameters: Iterable[nn.Parameter], *, steps: int) -> Any:
        """The optimizer, or the pair (optimizer, scheduler) that Lightning understands."""
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.name == "sgd":
            options["momentum"] = self.momentum
        else:
            options |= {"betas": tuple(self.betas)} if self.betas is not None else {}
            options |= {"eps": self.eps} if self.eps is not None else {}
        chosen = [parameter for parameter in parameters if parameter.requires_grad]
        if not chosen:
            raise ConfigurationError("The model has no trainable parameter: nothing would be learnt.")
        optimizer = OPTIMIZERS[self.name](chosen, **options)
        if self.schedule == "constant" and self.warmup_steps == 0:
            return optimizer
        if self.schedule != "constant" and steps <= 0:
            raise ConfigurationError(
                f"model.optimizer.schedule={self.schedule} needs trainer.max_steps, to know where to end."
            )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.factor(step, steps))
        return [optimizer], [scheduler]

    def factor(self, step: int, steps: int) -> float:
        """The share of the peak learning rate at ``step`` of ``steps``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
