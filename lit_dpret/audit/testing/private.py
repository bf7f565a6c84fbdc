"""``assert_private``: test whether a training step satisfies the assumptions of an (eps, delta) claim."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lit_dpret.audit.testing.epsilon_audit import check_epsilon
from lit_dpret.audit.testing.noise_checks import check_noise_of_empty_steps, check_noise_of_full_steps
from lit_dpret.audit.testing.probe import Inputs, probing
from lit_dpret.audit.testing.sum_checks import check_independence, check_sensitivity, quiet_weights
from lit_dpret.errors import ConfigurationError, PrivacyViolation
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan


@dataclass(frozen=True)
class PrivacyReport:
    """Measurements of ``assert_private`` on a module that passed."""

    sensitivity: float  # the most that one unit moved the sum, divided by the bound; at most 1 up to rounding
    noise: float  # the measured standard deviation of the noise, divided by the planned one
    eps_lower_bound: float  # the lower bound that the statistical audit found; at most ``eps``
    eps: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The amount of testing."""

    max_units: int = 8  # how many units are tried one by one
    trials: int = 500  # releases of each of the two neighbouring inputs in the statistical audit
    seed: int = 0  # keys all randomness: the same seed gives the same result


def assert_private(
    module: nn.Module,
    batch: Any,
    eps: float,
    delta: float,
    *,
    per_row_loss: Callable[[Any], Tensor] | None = None,
    privacy: DPSGD | None = None,
    unit_ids: Tensor | None = None,
    **effort: int,
) -> PrivacyReport:
    """Test a module's own training step on a few rows of data.

    The test runs one logical step over the whole batch, with noise calibrated so that this one step is
    (eps, delta)-DP:

    * *noise*: without any data, each coordinate of each trainable parameter gets noise of the planned
      deviation, fresh in each step, attempt and parameter. With data it gets the same, once per step.
    * *independence*: a unit adds the same to the sum alone, with other units, in any physical batch size and
      next to padding.
    * *sensitivity*: two batches that differ in one unit, run with the same randomness, move the sum and the
      optimizer's input by at most the clipping bound (twice that for a replaced unit).
    * *epsilon*: the releases of two neighbouring batches, over repeated runs, cannot be distinguished better than
      (eps, delta) allows.

    It does not test how batches are drawn, the accountant's result over many steps, or what a run reveals in addition
    to its updates. The weights of the module are not changed.

    Args:
        module: A ``PrivateModule``, whose ``privacy`` mode is tested; or any module, with ``per_row_loss``.
        batch: A dict of tensors whose first axis is the rows, as ``per_row_loss`` takes it; or a list of rows
            for the module's ``collate_rows``, which also tests padding that depends on the batch. To catch a loss
            that couples rows only when there are many, pass as many rows as a physical batch has.
        eps: The claim for one step; the audit can refute values up to 3.6 with the default ``trials``.
        delta: The claim.
        per_row_loss: The loss of each row, ``(rows,)``, for a module that is not a ``PrivateModule``.
        privacy: The mode to use with ``per_row_loss``; ``DPSGD(eps=eps)`` by default.
        unit_ids: The unit of each row, ``(rows,)``, from 0 without gaps; by default each row is a unit.
        effort: ``max_units``, ``trials`` and ``seed`` of `Effort`.

    Returns:
        The measurements.

    Raises:
        PrivacyViolation: An ``AssertionError`` whose first word is the property that does not hold.
        ConfigurationError: The test could not fail (too few units, rows without a gradient, too few trials), or
            something is missing or not a tensor.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(3, 1)
        >>> rows = {"x": torch.randn(6, 3), "y": torch.randn(6)}
        >>> report = assert_private(
        ...     net, rows, 1.0, 1e-5, per_row_loss=lambda r: (net(r["x"]).squeeze(-1) - r["y"]) ** 2
        ... )
        >>> report.eps_lower_bound <= 1.0
        True
    """
    __tracebackhide__ = True  # pytest shows the line of the test, not the frames below
    try:
        if other := sorted(effort.keys() - Effort.__dataclass_fields__.keys()):
            takes = ", ".join(Effort.__dataclass_fields__)
            raise ConfigurationError(f"assert_private has no argument {other[0]}. Its further arguments are {takes}.")
        tested = _private_module(module, per_row_loss, privacy, eps)
        return _tested(tested, batch, eps, delta, unit_ids, Effort(**effort))
    except (PrivacyViolation, ConfigurationError) as error:
        raise error.with_traceback(None) from None


def _tested(
    tested: PrivateModule, batch: Any, eps: float, delta: float, unit_ids: Tensor | None, tried: Effort
) -> PrivacyReport:
    mode: Any = tested.privacy
    if mode.guarantee != "dp":
        raise PrivacyViolation(f"mode: privacy={mode.name} adds no noise and promises nothing about a step.")
    if mode.candidates != "rows":
        raise ConfigurationError(
            f"assert_private tests losses that are a sum over units, under privacy=dp_sgd; privacy={mode.name} bounds "
            "something else, and lit_dpret.losses.check_declared_bounds tests a loss of pairs."
        )
    inputs = Inputs.build(batch, unit_ids)
    plan = PrivacyPlan.build(
        PrivacyBudget(eps=eps, delta=delta, unit=mode.unit, neighbours=mode.neighbours),
        PlainSamplingRequest(sampling="full_batch", expected_batch_size=inputs.units),
        steps=1,
        max_grad_norm=mode.max_grad_norm,
        n_public=None,
        clip=mode.clip,
        clip_groups=mode.clip_groups,
        clip_fraction_budget=mode.clip_fraction_budget or 0.0,
        engine=mode.engine,
        mode=mode.name,
    )
    if type(mode).plan is not DPSGD.plan:  # a custom mode states its own sensitivity
        plan = replace(plan, sensitivity=_sensitivity(mode, tested))
    with probing(tested, inputs, plan, tried.seed) as probe:
        noise = check_noise_of_empty_steps(probe)
        check_noise_of_full_steps(probe, (None, 2))
        quiet = quiet_weights(probe, range(min(tried.max_units, inputs.units)))
        check_independence(probe, quiet)
        sensitivity, unit = check_sensitivity(probe, quiet)
        found = check_epsilon(probe, unit, quiet[unit], eps, delta, tried.trials)
    return PrivacyReport(sensitivity, noise, found, float(eps), float(delta))


def _sensitivity(mode: Any, module: PrivateModule) -> float:
    """Return how far one unit moves the sum by the mode's own plan; it may differ from ``max_grad_norm``."""
    asked = copy.copy(mode)
    asked.noise_multiplier = 1.0  # nothing needs to be calibrated
    request = PlainSamplingRequest(sampling="poisson", expected_batch_size=1)
    return float(asked.plan(request, units=10**9, steps=1, module=module).sensitivity)


class _Wrapped(PrivateModule):
    """Any module with a given loss, as a ``PrivateModule``."""

    def __init__(self, inner: nn.Module, loss: Callable[[Any], Tensor], privacy: DPSGD) -> None:
        super().__init__(privacy=privacy, optimizer=OptimizerSpec())
        self.inner = inner
        self._loss = loss
        if (parameter := next(inner.parameters(), None)) is not None:
            self.to(parameter.device)  # moves nothing; lets Lightning know the parameters' device

    def per_row_loss(self, rows: Any) -> Tensor:
        return self._loss(rows)


def _private_module(
    module: nn.Module, loss: Callable[[Any], Tensor] | None, privacy: DPSGD | None, eps: float
) -> PrivateModule:
    if isinstance(module, PrivateModule):
        if loss is not None or privacy is not None:
            raise ConfigurationError(
                f"{type(module).__name__} is a PrivateModule, which has its own loss and privacy mode. Leave out "
                "per_row_loss and privacy."
            )
        return module
    if loss is None:
        raise ConfigurationError(f"{type(module).__name__} is not a PrivateModule: give its loss as per_row_loss.")
    return _Wrapped(module, loss, privacy or DPSGD(eps=eps))
