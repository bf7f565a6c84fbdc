"""From what was asked for to what will run: the plan, the law, and how many steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L

from lit_dpret.callbacks.refusals import refuse_false_bound
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.releases import Poisson, SamplingLaw, Shuffle
from lit_dpret.privacy.modes import PrivacyMode
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.sampling import PrivateBatchSampler, steps_per_epoch


@dataclass(frozen=True)
class PlannedRun:
    """What a run will do, decided before its first step.

    Attributes:
        plan: What is promised; None where nothing is.
        law: By which batches are drawn.
        units: How many units there are; private under ``add_or_remove``.
        unit: What a unit is, ``privacy.unit``.
        steps: Logical steps.
        steps_per_epoch: Logical steps in one pass over the units.
        sub_batches: Into how many parts a logical batch falls whose units see each other.
    """

    plan: PrivacyPlan | None
    law: SamplingLaw
    units: int
    unit: str
    steps: int
    steps_per_epoch: int
    sub_batches: int | None = None

    def sampler(self, data: Any, stream: KeyedStream, *, ranks: Ranks | None = None) -> PrivateBatchSampler:
        """The sampler of the law, in batches as ``data`` asks; with ``ranks``, of this rank's part of each draw."""
        return PrivateBatchSampler(
            self.law,
            units=self.units,
            unit=self.unit,
            steps_per_epoch=self.steps_per_epoch,
            physical_batch_size=data.physical_batch_size,
            stream=stream,
            sub_batches=self.sub_batches,
            n_max=None if self.plan is None or self.plan.coupling is None else self.plan.coupling.n_max,
            ranks=ranks,
        )


def plan_run(trainer: L.Trainer, mode: PrivacyMode, data: Any, *, module: Any = None, reserve: int = 0) -> PlannedRun:
    """Plan the run of ``trainer`` on ``data`` under ``mode``.

    Args:
        trainer: States the length.
        mode: States the promise.
        data: States how batches are to be drawn, and holds the units.
        module: What will be trained; a mode for coupled losses reads its loss.
        reserve: Steps that are paid for beyond the length.

    Raises:
        ConfigurationError: Something is missing, out of range, or cannot meet the budget.
    """
    data.use_unit(mode.unit, mode.neighbours)
    refuse_false_bound(mode, data)
    units = data.n_units
    per_epoch = steps_per_epoch(data, mode.public_units(units))
    steps = planned_steps(trainer, per_epoch)
    plan = mode.plan(data, units=units, steps=steps + reserve, module=module)
    if plan is not None:
        return PlannedRun(plan, plan.law, units, mode.unit, steps, per_epoch, mode.sub_batches)
    batch = data.expected_batch_size or max(1, round((data.sample_rate or 1.0) * units))
    law: SamplingLaw = Shuffle(batch_size=min(batch, units), n=units)
    if data.sampling == "poisson":
        law = Poisson(sample_rate=data.sample_rate or min(1.0, batch / units))
    return PlannedRun(None, law, units, mode.unit, steps, per_epoch, mode.sub_batches)


def planned_steps(trainer: L.Trainer, steps_per_epoch: int) -> int:
    """How many logical steps ``trainer`` will take; a private run must know before it starts.

    Raises:
        ConfigurationError: Neither ``max_steps`` nor ``max_epochs`` is set, or one of them is 0.
    """
    epochs = trainer.max_epochs
    by_epochs = epochs * steps_per_epoch if epochs is not None and epochs > 0 else None
    by_steps = trainer.max_steps if trainer.max_steps > 0 else None
    if epochs == 0 or trainer.max_steps == 0:
        raise ConfigurationError(
            f"trainer.max_epochs={epochs} with trainer.max_steps={trainer.max_steps} trains nothing. Set one of them "
            "above 0."
        )
    known = [value for value in (by_epochs, by_steps) if value is not None]
    if not known:
        raise ConfigurationError("A private run must know its length: set trainer.max_steps or trainer.max_epochs.")
    return min(known)
