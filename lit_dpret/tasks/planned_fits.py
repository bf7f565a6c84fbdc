"""The private trainings that a task will make, planned as their own accountants will plan them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lit_dpret.audit.canaries.planting import plant_blanks
from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.callbacks.planning import plan_run
from lit_dpret.cards.start import Start
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.releases import Release
from lit_dpret.privacy.ledger.run_ledger import forthcoming_releases
from lit_dpret.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class PlannedFit:
    """A private training that is still to be made.

    Args:
        plan: Its plan.
        steps: Its length.
        start: The run whose model it starts from.
    """

    plan: PrivacyPlan
    steps: int
    start: Start | None = None

    @property
    def releases(self) -> list[Release]:
        """What its own ledger will charge: a shuffled epoch as a whole."""
        return forthcoming_releases([], self.plan.release(), first=0, until=self.steps)


def plan_fit(
    mode: Any, data: Any, trainer: Any, *, make_module: Any, callbacks: list[Any] | None = None
) -> list[PlannedFit]:
    """The plan of one training, as a list; an empty one where it is under a mode that makes no release.

    Args:
        mode: The privacy mode.
        data: The datamodule, read already.
        trainer: Says how long.
        make_module: Makes the module, given ``privacy``; called for modes whose noise depends on the loss.
        callbacks: Of the training; its accountant may pay for steps in advance and name a start, and an audit among
            them plants canaries.

    Raises:
        ConfigurationError: What will run cannot be known from this, or nothing could be claimed for it.
    """
    if mode.guarantee != "dp":
        return []
    accountants = [one for one in callbacks or [] if isinstance(one, PrivacyAccountant)]
    reserve = sum(one.resume_reserve for one in accountants)
    start = next((found for one in accountants if (found := one.start()) is not None), None)
    if start is not None:
        start.check(mode)
    for one in callbacks or []:
        if not hasattr(one, "plant_canaries"):
            continue
        if not hasattr(one, "planned_units"):
            raise ConfigurationError(
                f"callbacks: {type(one).__name__} plants canaries and does not say how many (planned_units), so the "
                "run cannot be planned. Leave it out."
            )
        plant_blanks(data, one.planned_units(mode, data))
    module = make_module(privacy=mode) if mode.calibrated_to_loss else None
    planned = plan_run(trainer, mode, data, module=module, reserve=reserve)
    return [] if planned.plan is None else [PlannedFit(planned.plan, planned.steps, start)]
