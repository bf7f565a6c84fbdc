"""The private trainings that a task will make, planned as their own accountants will plan them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.callbacks.planning import plan_run
from lit_dpret.privacy.modes import CoupledMode, GaussianMode
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.releases import Release


@dataclass(frozen=True)
class PlannedFit:
    """A private training that is still to be made.

    Args:
        plan: Its plan.
        steps: Its length.
    """

    plan: PrivacyPlan
    steps: int

    @property
    def releases(self) -> list[Release]:
        """What it will let out."""
        return [self.plan.release(self.steps)]


def plan_fit(
    mode: Any, data: Any, trainer: Any, *, make_module: Any, callbacks: list[Any] | None = None
) -> list[PlannedFit]:
    """The plan of one training, as a list; an empty one where it is under a mode that makes no release.

    Args:
        mode: The privacy mode.
        data: The datamodule, read already.
        trainer: Says how long.
        make_module: Makes the module, given ``privacy``; called for modes whose noise depends on the loss.
        callbacks: Of the training; its accountant may pay for steps in advance.
    """
    if not isinstance(mode, GaussianMode):
        return []
    reserve = sum(one.resume_reserve for one in callbacks or [] if isinstance(one, PrivacyAccountant))
    module = make_module(privacy=mode) if isinstance(mode, CoupledMode) else None
    planned = plan_run(trainer, mode, data, module=module, reserve=reserve)
    return [] if planned.plan is None else [PlannedFit(planned.plan, planned.steps)]
