"""`task=plan`: what a run would promise and cost, before any training."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_dpret.callbacks.planning import planned_steps
from lit_dpret.costs.slices import check_devices, predict
from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.privacy.modes import GaussianMode
from lit_dpret.privacy.plan import PrivacyPlan, describe_plan
from lit_dpret.privacy.plan_text import format_plan
from lit_dpret.privacy.sampling import steps_per_epoch
from lit_dpret.report.plan_figure import can_draw, draw_plan
from lit_dpret.tasks.parts import Parts, check_run_dir
from lit_dpret.tasks.plan_cost import estimate, format_cost, from_slices, measure

_PATIENCE = 3.0


class _Progress:
    """What is being computed, on stderr, once it has taken longer than a few seconds."""

    def __init__(self) -> None:
        self._begun, self._last = time.monotonic(), ""

    def __call__(self, what: str) -> None:
        """Say ``what`` is computed now, each thing once."""
        waited = time.monotonic() - self._begun
        if waited > _PATIENCE and what != self._last:
            self._last = what
            sys.stderr.write(f"plan, {waited:.0f} s: {what}\n")
            sys.stderr.flush()


class Plan:
    """Print, write and draw the plan: noise, epsilon under each law and relation, ceilings, time and memory.

    Args:
        units: The public number of units; null counts them in the datamodule.
        epochs: The length of the run in passes, instead of ``trainer.max_steps``.
        measure: Run a few batches of random token ids through the clipping engine, for time and memory: of the model
            (``true``), or of slices of it (``slices``), from which those of the whole are told.
        device: Also predict time and memory on accelerators of that name (`lit_dpret.costs.work`); null: do not.
        world_size: How many of them.
        strategy: ``ddp``, ``fsdp``, ``zero1``, ``zero2`` or ``zero3``.
        plot: Draw ``plan.png``; null draws it where matplotlib is installed.

    Raises:
        ConfigurationError: A number is out of range, or ``plot`` is asked for and matplotlib is missing.
    """

    def __init__(
        self,
        *,
        units: int | None = None,
        epochs: float | None = None,
        measure: bool | Literal["slices"] = False,
        device: str | None = None,
        world_size: int = 1,
        strategy: str = "ddp",
        plot: bool | None = None,
    ) -> None:
        if units is not None and (isinstance(units, bool) or not isinstance(units, int) or units < 1):
            raise ConfigurationError(f"task.units={units} must be a whole number of at least 1.")
        if epochs is not None and not (isinstance(epochs, (int, float)) and 0 < epochs < math.inf):
            raise ConfigurationError(f"task.epochs={epochs} must be a positive number.")
        if not isinstance(measure, bool) and measure != "slices":
            raise ConfigurationError(f"task.measure={measure} must be true, false or slices.")
        if device is not None:
            check_devices(device, world_size, strategy)
        elif (world_size, strategy) != (1, "ddp"):
            raise ConfigurationError(
                f"task.world_size={world_size} and task.strategy={strategy} are of a prediction: name task.device too."
            )
        if not isinstance(plot, bool) and plot is not None:
            raise ConfigurationError(f"task.plot={plot} must be true or false.")
        self.units = units
        self.epochs = epochs
        self.measure = measure
        self.device, self.world_size, self.strategy = device, world_size, strategy
        self.plot = can_draw() if plot is None else plot

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``plan.json`` and ``plan.png`` and print the tables; returns sigma and epsilon."""
        mode = parts.make_privacy()
        if mode.guarantee != "dp":
            raise ConfigurationError(f"task=plan needs a private mode; privacy={mode.name} promises nothing to plan.")
        if self.plot and not can_draw():
            draw_plan({}, parts.run_dir)
        check_run_dir(parts.run_dir, min_free_mb=1)
        progress = _Progress()
        data = parts.make_datamodule()
        units = self.units
        if units is None:
            data.prepare_data()
            data.setup("fit")
            data.use_unit(mode.unit, mode.neighbours)
            units = data.n_units
        per_epoch = steps_per_epoch(data, mode.public_units(units))
        trainer = _trainer(parts)
        steps = planned_steps(trainer, per_epoch) if self.epochs is None else max(1, round(self.epochs * per_epoch))
        progress("the noise that the budget needs")
        module = parts.make_module(privacy=mode) if mode.calibrated_to_loss else None
        plan = mode.plan(data, units=units, steps=steps, module=module)
        progress("time and memory")
        costs = self._costs(parts, mode, plan, trainer, progress)
        facts = {**describe_plan(plan, progress), "cost": costs}
        (parts.run_dir / "plan.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        if self.plot and plan.proved:
            progress("plan.png")
            draw_plan(facts, parts.run_dir / "plan.png")
        sys.stdout.write(f"{format_plan(facts)}\n\n{format_cost(costs)}\n")
        return {"noise_multiplier": plan.noise_multiplier, "epsilon": facts["epsilon"] if plan.proved else math.inf}

    def _costs(
        self, parts: Parts, mode: GaussianMode, plan: PrivacyPlan, trainer: Any, progress: Callable[[str], None]
    ) -> dict[str, Any]:
        """What a step takes; where only an estimate was asked for, a model that cannot be had is no error."""
        device, precision = trainer.strategy.root_device, str(trainer.precision)
        try:
            outline = parts.make_outline(privacy=mode)
            costs = {"estimate": estimate(outline, plan, device, precision=precision)}
        except LitDpretError as error:
            if self.measure or self.device:
                raise
            return {"why": str(error)}
        if self.device is not None:
            costs["prediction"] = predict(
                outline, batch=plan.denominator, device=self.device, world=self.world_size, strategy=self.strategy
            )
        if self.measure == "slices":
            costs["slices"] = from_slices(outline, plan, device, precision=precision, progress=progress)
        elif self.measure:
            module = parts.make_module(privacy=mode)
            if precision == "bf16-true":
                module.to(torch.bfloat16)
            costs["measurement"] = measure(module, plan, device, autocast=precision == "bf16-mixed")
        return costs


def _trainer(parts: Parts) -> Any:
    """The Trainer of the configuration; on the CPU where its accelerator is not at hand, since nothing will run."""
    try:
        return parts.make_trainer(logger=False)
    except Exception as error:  # whoever builds the Trainer may wrap what Lightning raised
        if not any(isinstance(each, MisconfigurationException) for each in (error, error.__cause__)):
            raise
        return parts.make_trainer(logger=False, accelerator="cpu", devices=1, strategy="auto")
