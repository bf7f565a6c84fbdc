"""`task=plan`: the guarantee and cost of a run, before any training."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_dpret.audit.canaries.suite import plant_blanks
from lit_dpret.cards.forecast import OTHER_BOUND, describe_plan
from lit_dpret.costs.estimate import FACTOR, duration, estimate, from_slices, measure, size
from lit_dpret.costs.prediction import check_devices, predict
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.privacy.modes import GaussianMode
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.report.figures import can_draw, draw_plan, require_matplotlib
from lit_dpret.report.page import render
from lit_dpret.settings import require_whole
from lit_dpret.tasks.fit import plan_fit, released_canaries
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.rulers import cut_texts, rulers_by_words

_PATIENCE = 3.0


class _Progress:
    """Print the current computation to stderr, once it has taken more than a few seconds."""

    def __init__(self) -> None:
        self._begun, self._last = time.monotonic(), ""

    def __call__(self, what: str) -> None:
        """Print that ``what`` is being computed now, each item once."""
        waited = time.monotonic() - self._begun
        if waited > _PATIENCE and what != self._last:
            self._last = what
            sys.stderr.write(f"plan, {waited:.0f} s: {what}\n")
            sys.stderr.flush()


class _Counted:
    """A stand-in for data of which only the number of units is given (``task.units``)."""

    def __init__(self, data: Any, units: int) -> None:
        self._data, self.n_units = data, units

    def __getattr__(self, name: str) -> Any:
        if name == "train_units":  # there are no units to inspect
            raise AttributeError(name)
        return getattr(self._data, name)

    def use_unit(self, unit: str, neighbours: str) -> None:
        """Do nothing: the number already counts units."""

    def plant(self, planted: Any) -> None:
        """Count the planted units."""
        self.n_units += len(planted.units)


@dataclass(kw_only=True)
class Plan:
    """Print, write and draw the plan: noise, epsilon under each law and relation, ceilings, time and memory."""

    takes_start: ClassVar[bool] = True
    takes_canaries: ClassVar[bool] = True
    device_is_elsewhere: ClassVar[bool] = True  # the device need not be on this machine
    units: int | None = None
    epochs: float | None = None
    measure: bool | Literal["slices"] = False
    device: str | None = None
    world_size: int = 1
    strategy: str = "ddp"
    plot: bool | None = None

    def __post_init__(self) -> None:
        require_whole("task", self, 1, "units", null=True)
        if self.epochs is not None and not (isinstance(self.epochs, (int, float)) and 0 < self.epochs < math.inf):
            raise ConfigurationError(f"task.epochs={self.epochs} must be a positive number.")
        if not isinstance(self.measure, bool) and self.measure != "slices":
            raise ConfigurationError(f"task.measure={self.measure} must be true, false or slices.")
        if self.device is not None:
            check_devices(self.device, self.world_size, self.strategy)
        elif (self.world_size, self.strategy) != (1, "ddp"):
            raise ConfigurationError(
                f"task.world_size={self.world_size} and task.strategy={self.strategy} are for a prediction: set "
                "task.device too."
            )
        if not isinstance(self.plot, bool) and self.plot is not None:
            raise ConfigurationError(f"task.plot={self.plot} must be true or false.")
        self.plot = can_draw() if self.plot is None else self.plot

    def run(self, parts: Parts) -> dict[str, float]:
        """Write ``plan.json`` and ``plan.png`` and print the tables; return sigma and epsilon."""
        mode = parts.make_privacy()
        if mode.guarantee != "dp":
            raise ConfigurationError(
                f"task=plan needs a private mode, but privacy={mode.name} has no guarantee to plan. Choose "
                "privacy=dp_sgd."
            )
        if self.plot:
            require_matplotlib()
        check_run_dir(parts.run_dir, min_free_mb=1)
        callbacks, canaries = parts.make_callbacks(), released_canaries(parts)
        progress = _Progress()
        data = parts.make_datamodule()
        mode.check_request(data)
        if self.units is None:
            data.prepare_data()
            data.setup("fit")
        counted: Any = data if self.units is None else _Counted(data, self.units)
        if canaries is not None:
            plant_blanks(counted, canaries.units)
        trainer = _trainer(parts)
        progress("the noise that the budget needs")
        make_module = cache(parts.make_module)  # built at most once, if the noise or the norms depend on it
        how: dict[str, Any] = {"make_module": make_module, "callbacks": callbacks, "epochs": self.epochs}
        (planned,) = plan_fit(mode, counted, trainer, **how)
        plan, reserve = planned.plan, planned.plan.steps - planned.steps
        progress("time and memory")
        costs = self._costs(parts, mode, plan, trainer, progress)
        facts = {**data_facts(data), **describe_plan(plan, progress), "cost": costs}
        if mode.calibrated_to_loss:
            facts["pair_norms"] = mode.norms_cost(make_module(privacy=mode), plan)
        (parts.run_dir / "plan.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        if self.plot and plan.proved:
            progress("plan.png")
            draw_plan(facts, parts.run_dir / "plan.png")
        say(format_plan(facts))
        if reserve:
            note = f"note: {reserve} of the {plan.steps} steps are the reserve for attempts that a kill interrupts"
            say(textwrap.fill(f"{note} (callbacks.accountant.resume_reserve).", 80))
        if self.units is None:
            for caution in cut_texts(data, rulers_by_words(parts.trained_settings())):
                say(textwrap.fill(f"note: {caution}", 80))
        return {"noise_multiplier": plan.noise_multiplier, "epsilon": facts["epsilon"] if plan.proved else math.inf}

    def _costs(
        self, parts: Parts, mode: GaussianMode, plan: PrivacyPlan, trainer: Any, progress: Callable[[str], None]
    ) -> dict[str, Any]:
        """Compute the cost of a step; if only an estimate is wanted, a model that cannot be loaded is not an error."""
        device, precision, secure = trainer.strategy.root_device, str(trainer.precision), mode.secure_rng
        try:
            outline = parts.make_outline(privacy=mode)
            costs = {"estimate": estimate(outline, plan, device, precision=precision, secure_rng=secure)}
        except LitDpretError as error:
            if self.measure or self.device:
                raise
            return {"why": str(error)}
        if self.device is not None:
            costs["prediction"] = predict(
                outline, batch=plan.denominator, device=self.device, world=self.world_size, strategy=self.strategy,
                noise=plan.noise, engine=plan.engine, secure_rng=secure,
            )  # fmt: skip
        if self.measure == "slices":
            costs["slices"] = from_slices(
                outline, plan, device, precision=precision, secure_rng=secure, progress=progress
            )
        elif self.measure:
            module = parts.make_module(privacy=mode)
            if precision == "bf16-true":
                module.to(torch.bfloat16)
            costs["measurement"] = measure(module, plan, device, autocast=precision == "bf16-mixed", secure_rng=secure)
        return costs


def format_plan(facts: Mapping[str, Any]) -> str:
    """Return the facts of `describe_plan`, and ``cost``, as terminal tables: first the claim, then its meaning.

    The first line contains epsilon with its delta, unit and relation. Unproved numbers are not printed.
    """
    told = {"other_bound": OTHER_BOUND, "off_by": FACTOR, "duration": duration, "size": size}
    return render("plan.md", {"cost": None, "pair_norms": None, **facts, **told}).rstrip()


def _trainer(parts: Parts) -> Any:
    """Return the configured Trainer; on the CPU if its accelerator is unavailable, since nothing will run."""
    try:
        return parts.make_trainer(logger=False)
    except Exception as error:  # the caller that builds the Trainer may wrap Lightning's error
        if not any(isinstance(each, MisconfigurationException) for each in (error, error.__cause__)):
            raise
        return parts.make_trainer(logger=False, accelerator="cpu", devices=1, strategy="auto")
