"""`task=plan`: what a run would promise and cost, before any training."""

from __future__ import annotations

import json
import sys

from lit_dpret.callbacks.planning import planned_steps
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.plan import describe_plan, format_plan
from lit_dpret.privacy.sampling import steps_per_epoch
from lit_dpret.tasks.parts import Parts, check_run_dir


class Plan:
    """Print and write the plan: noise, epsilon under each law and relation, attack ceilings.

    Args:
        units: The public number of units; null counts them in the datamodule.
        epochs: The length of the run in passes, instead of ``trainer.max_steps``.
    """

    def __init__(self, *, units: int | None = None, epochs: float | None = None) -> None:
        if units is not None and units < 1:
            raise ConfigurationError(f"task.units={units} must be at least 1.")
        if epochs is not None and not epochs > 0:
            raise ConfigurationError(f"task.epochs={epochs} must be positive.")
        self.units = units
        self.epochs = epochs

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``plan.json`` and print the table; returns sigma and epsilon."""
        mode = parts.make_privacy()
        if not isinstance(mode, DPSGD):
            raise ConfigurationError(f"task=plan needs a private mode; privacy={mode.name} promises nothing to plan.")
        check_run_dir(parts.run_dir, min_free_mb=1)
        data = parts.make_datamodule()
        units = self.units
        if units is None:
            data.prepare_data()
            data.setup("fit")
            data.use_unit(mode.unit, mode.neighbours)
            units = data.n_units
        per_epoch = steps_per_epoch(data, mode.public_units(units))
        if self.epochs is not None:
            steps = max(1, round(self.epochs * per_epoch))
        else:
            steps = planned_steps(parts.make_trainer(logger=False), per_epoch)
        plan = mode.plan(data, units=units, steps=steps)
        facts = describe_plan(plan)
        (parts.run_dir / "plan.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        sys.stdout.write(format_plan(facts) + "\n")
        return {"noise_multiplier": plan.noise_multiplier, "epsilon": plan.epsilon()}
