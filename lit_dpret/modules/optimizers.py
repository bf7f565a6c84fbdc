"""Optimizers by name. Under a private mode they receive only noised gradients, so any optimizer is allowed.

An optimizer receives the clipped sum plus noise, divided by a public constant. Whatever it does with
that costs no privacy (post-processing); optimizers differ in how well they cope with the noise:

* ``sgd``: DP-SGD (Abadi et al., 2016), optionally with momentum over the noised gradients.
* ``adam``, ``adamw``: DP-Adam (Li et al., 2021, 2110.05679): Adam on the noised gradient. Its
  second moment is the squared gradient plus the variance of the noise.
* ``adam_bc``: DP-AdamBC (Tang et al., 2023, 2312.14334): that variance is subtracted.
* ``adafactor``: DP-Adafactor (Adafactor of Shazeer and Stern, 2018, 1804.04235, on the noised
  gradient): second moments of matrices are kept as row and column averages, in which the noise of
  many coordinates averages out to its variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from lit_dpret.distributed.handover import MasterWeights, needs_masters
from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import require_choice, require_number


class DPAdamBC(torch.optim.Optimizer):
    r"""DP-AdamBC (Tang, Shpilevskiy and Lécuyer, AAAI 2024, 2312.14334, Algorithm 1).

    Adam divides by the root of an average of squared gradients. For a noised gradient that average is the squared
    gradient *plus the variance of the noise*: if noise dominates, DP-Adam is DP-SGD with momentum. The variance is
    public, so it can be subtracted.

    It reads only the noised mean gradient :math:`\tilde g = (\sum_i \mathrm{clip}(g_i) + z) / B` with
    :math:`z \sim N(0, \sigma^2 C^2)` and public constants, so it is post-processing:

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \tilde g_t, \quad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) \tilde g_t^2, \quad
        \theta_t = \theta_{t-1} - \eta \hat m_t / \sqrt{\max(\hat v_t - (\sigma C / B)^2, \gamma')}

    with the usual :math:`\hat m_t = m_t / (1 - \beta_1^t)` and :math:`\hat v_t = v_t / (1 - \beta_2^t)`.

    Args:
        params: fp32 or float64 parameters; lower precision could not represent the difference.
        lr: Learning rate :math:`\eta`.
        noise_std: :math:`\sigma C / B`, the standard deviation of the noise in each coordinate of the
            gradient that it receives.
        betas: :math:`\beta_1, \beta_2`.
        min_second_moment: The floor :math:`\gamma'`, in squared units of the gradient. None for
            :math:`(\sigma C / B)^2 \sqrt{2 (1 - \beta_2) / (1 + \beta_2)}`: the long-run standard deviation of
            :math:`\hat v` if the gradient is noise alone, below which the difference cannot be
            distinguished from zero. (This default is ours; the paper tunes an absolute constant.)
        weight_decay: Decoupled, ``param *= 1 - lr * weight_decay``: added to the gradient, it would
            enter the second moment.

    Raises:
        ConfigurationError: A value is out of range, or a parameter has less than 32 bits.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        noise_std: float,
        betas: tuple[float, float] = (0.9, 0.999),
        min_second_moment: float | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        if not (math.isfinite(noise_std) and noise_std > 0):
            raise ConfigurationError(
                f"model.optimizer.name=adam_bc subtracts the variance of the noise, and noise_std={noise_std} is not a "
                "positive, finite number. Choose model.optimizer.name=adam."
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigurationError(f"model.optimizer.betas={tuple(betas)} must lie in [0, 1).")
        if min_second_moment is None:
            min_second_moment = noise_std**2 * math.sqrt(2 * (1 - betas[1]) / (1 + betas[1]))
        require_number("model.optimizer", {"min_second_moment": min_second_moment})
        defaults = {
            "lr": lr,
            "noise_std": float(noise_std),
            "betas": tuple(betas),
            "min_second_moment": float(min_second_moment),
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype not in (torch.float32, torch.float64):
                    raise ConfigurationError(
                        f"model.optimizer.name=adam_bc needs parameters in float32 or float64, not {parameter.dtype}: "
                        "subtracting the noise from the second moment would leave rounding errors. Set "
                        "trainer.precision=bf16-mixed."
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        steps = float(state["step"])
        mean: torch.Tensor = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square: torch.Tensor = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        unbiased = (square / (1 - beta2**steps)).sub_(group["noise_std"] ** 2)
        root = unbiased.clamp_(min=group["min_second_moment"]).sqrt_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**steps))


Schedule = Literal["constant", "linear", "cosine"]
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adam_bc": DPAdamBC,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
}
# Settings that not every optimizer has, each with the optimizers that do.
_LARGEST_LR_OF_ADAM = 100.0
_KNOBS: dict[str, tuple[str, ...]] = {
    "betas": ("adam", "adamw", "adam_bc"),
    "eps": ("adam", "adamw", "adafactor"),
    "momentum": ("sgd",),
    "min_second_moment": ("adam_bc",),
    "clip_threshold": ("adafactor",),
    "beta2_decay": ("adafactor",),
}
# 1e-30 under the root, as in the paper (section 8). PyTorch's default 1.2e-7 also bounds the row averages
# from below, and the squares of a noised mean gradient are often smaller than that.
_ADAFACTOR_EPS = (1e-15, 1e-3)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer to build, and the schedule of its learning rate.

    Args:
        name: ``adam``, ``adamw``, ``adam_bc``, ``adafactor`` or ``sgd``; see the module's docstring.
        lr: Peak learning rate. For ``adafactor`` it is relative to the root mean square of each
            parameter, and bounded by 1/sqrt(step).
        schedule: ``constant``, ``linear`` or ``cosine`` decay to zero over the planned steps.
        warmup_steps: Steps of linear warm-up.
        weight_decay: Passed to the optimizer.
        betas: Decay rates of the averages of ``adam``, ``adamw`` and ``adam_bc``; null for the optimizer's default.
        momentum: For ``sgd``.
        eps: The term added to the denominator of ``adam`` and ``adamw``; for ``adafactor`` the root of the smallest
            second moment. null for the default (1e-15 for ``adafactor``).
        min_second_moment: For ``adam_bc``: the floor of the second moment after the noise variance is
            subtracted; null derives it from that variance.
        clip_threshold: For ``adafactor``: the root mean square that an update is scaled down to,
            at least 1; null is 1.
        beta2_decay: For ``adafactor``: exponent of the decay of the second moment; null is -0.8.

    Raises:
        ConfigurationError: A value is out of range, or the optimizer does not have a setting that is given.
    """

    name: str = "adam"
    lr: float = 1e-3
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    momentum: float = 0.0
    eps: float | None = None
    min_second_moment: float | None = None
    clip_threshold: float | None = None
    beta2_decay: float | None = None

    needs_noise: ClassVar[tuple[str, ...]] = ("adam_bc",)

    def __post_init__(self) -> None:
        require_choice("model.optimizer.name", self.name, tuple(OPTIMIZERS))
        require_choice("model.optimizer.schedule", self.schedule, get_args(Schedule))
        if not 0 < self.lr < math.inf:
            raise ConfigurationError(f"model.optimizer.lr={self.lr} must be a positive, finite number.")
        if self.name.startswith("adam") and self.lr > _LARGEST_LR_OF_ADAM:
            raise ConfigurationError(
                f"model.optimizer.lr={self.lr} is far too large: a step of {self.name} moves each weight by about that "
                "much. Usual values are 1e-5 to 0.1."
            )
        for knob, owners in _KNOBS.items():
            value = getattr(self, knob)
            if value is not None and not (knob == "momentum" and value == 0) and self.name not in owners:
                raise ConfigurationError(
                    f"model.optimizer.{knob}={value} would be ignored: it belongs to {', '.join(owners)}, not to "
                    f"model.optimizer.name={self.name}. Leave it out."
                )
        require_number("model.optimizer", self, "eps", "min_second_moment", null=True)
        if self.clip_threshold is not None and not 1 <= self.clip_threshold < math.inf:
            raise ConfigurationError(f"model.optimizer.clip_threshold={self.clip_threshold} must be at least 1.")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"model.optimizer.momentum={self.momentum} must lie in [0, 1).")
        if self.beta2_decay is not None and not -1 <= self.beta2_decay < 0:
            raise ConfigurationError(f"model.optimizer.beta2_decay={self.beta2_decay} must lie in [-1, 0).")

    @property
    def uses_noise_std(self) -> bool:
        return self.name in self.needs_noise

    def build(self, parameters: Iterable[nn.Parameter], *, steps: int, noise_std: float = 0.0) -> Any:
        """Return the optimizer of the trainable parameters, or Lightning's pair of optimizers and schedulers.

        Parameters in half precision are optimized as float32 copies (`lit_dpret.distributed.handover`). ``steps`` is
        the planned number, 0 if unknown; ``noise_std`` is ``PrivacyMode.gradient_noise_std``, for ``adam_bc`` alone.
        """
        chosen = [parameter for parameter in parameters if parameter.requires_grad]
        if not chosen:
            raise ConfigurationError(
                "The model has no trainable parameter, so nothing would be trained. Unfreeze a part of it "
                "(requires_grad_(True))."
            )

        def make(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
            return OPTIMIZERS[self.name](weights, **self._options(noise_std))

        optimizer = MasterWeights(chosen, make) if needs_masters(chosen) else make(chosen)
        if self.schedule == "constant" and self.warmup_steps == 0:
            return optimizer
        if self.schedule != "constant" and steps <= 0:
            raise ConfigurationError(
                f"model.optimizer.schedule={self.schedule} needs trainer.max_steps, to know where to end."
            )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.factor(step, steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def _options(self, noise_std: float) -> dict[str, Any]:
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.betas is not None:
            options["betas"] = tuple(self.betas)
        if self.name == "sgd":
            options["momentum"] = self.momentum
        elif self.name == "adam_bc":
            options |= {"noise_std": noise_std, "min_second_moment": self.min_second_moment}
        elif self.name == "adafactor":
            least, scale = _ADAFACTOR_EPS
            options["eps"] = (least if self.eps is None else self.eps, scale)
            options |= {} if self.clip_threshold is None else {"d": self.clip_threshold}
            options |= {} if self.beta2_decay is None else {"beta2_decay": self.beta2_decay}
        elif self.eps is not None:
            options["eps"] = self.eps
        return options

    def factor(self, step: int, steps: int) -> float:
        """Return the share of the peak learning rate at ``step`` of ``steps``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
