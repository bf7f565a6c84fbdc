r"""Adam without the bias that privacy noise puts into its second moment.

Adam divides by the root of an average of squared gradients. Fed with a noised gradient, that
average is the squared gradient *plus the variance of the noise*; where the noise dominates, every
coordinate is divided by the same constant, and DP-Adam is DP-SGD with momentum. The variance is
public, so it can be subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lit_dpret.errors import ConfigurationError


class DPAdamBC(torch.optim.Optimizer):
    r"""DP-AdamBC (Tang, Shpilevskiy and Lécuyer, AAAI 2024, 2312.14334, Algorithm 1).

    It sees the noised mean gradient :math:`\tilde g = (\sum_i \mathrm{clip}(g_i) + z) / B` with
    :math:`z \sim N(0, \sigma^2 C^2)` and public constants only, so it is post-processing:

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \tilde g_t, \quad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) \tilde g_t^2, \quad
        \theta_t = \theta_{t-1} - \eta \hat m_t / \sqrt{\max(\hat v_t - (\sigma C / B)^2, \gamma')}

    with the usual :math:`\hat m_t = m_t / (1 - \beta_1^t)` and :math:`\hat v_t = v_t / (1 - \beta_2^t)`.

    Args:
        params: fp32 or float64 parameters; lower precision could not hold the difference.
        lr: Learning rate :math:`\eta`.
        noise_std: :math:`\sigma C / B`, the standard deviation of the noise in each coordinate of the
            gradient that arrives here.
        betas: :math:`\beta_1, \beta_2`.
        min_second_moment: The floor :math:`\gamma'`, in squared units of the gradient. None for
            :math:`(\sigma C / B)^2 \sqrt{2 (1 - \beta_2) / (1 + \beta_2)}`: the standard deviation of
            :math:`\hat v` in the long run where the gradient is noise alone, below which the difference
            cannot be told from zero. (This default is ours; the paper tunes an absolute constant.)
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
        if not (math.isfinite(min_second_moment) and min_second_moment > 0):
            raise ConfigurationError(
                f"model.optimizer.min_second_moment={min_second_moment} is not a positive, finite number."
            )
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
                        "the second moment less the noise would be rounding. Set trainer.precision=bf16-mixed."
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns what ``closure`` returned."""
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
