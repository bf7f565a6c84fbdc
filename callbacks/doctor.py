"""Examine a run without training: which traps are absent, present, or impossible?

The examination calls what a fit calls, in the same order, and stops before the first release; it clips a few units and
discards the results. A fit stops at the first refusal; the examination reports all of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import lightning as L

from lit_dpret.callbacks.fixed_shapes import attach_batches
from lit_dpret.callbacks.log_gate import rehearsed
from lit_dpret.callbacks.own_code import (
    refuse_first_asked,
    refuse_other_units,
    refuse_remembering_collation,
    refuse_replaced_sampler,
)
from lit_dpret.callbacks.planning import PlannedRun, accountant_of, plan_run, refuse_unread_rows
from lit_dpret.callbacks.refusals import complaints, refuse_endless_losses, refuse_protected_queries
from lit_dpret.callbacks.traps import SEVERITIES, TRAPS, Severity, Stage, Trap
from lit_dpret.cards.forecast import cautions
from lit_dpret.errors import LitDpretError, told
from lit_dpret.privacy.accounting.coupled_sensitivity import Coupling
from lit_dpret.privacy.batches import PADDING, UnitBatch
from lit_dpret.privacy.budget import LARGE_DELTA, large_delta, show_delta
from lit_dpret.privacy.noise import KeyedStream, load_secret
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.sampling import PrivateBatchSampler

Status = Literal["passed", "by construction", "refused", "declared", "not reached", "does not apply", "yours"]

REHEARSED_UNITS = 8
# Search this many steps' draws for units that have rows; a data set without any is found much earlier.
REHEARSED_STEPS = 20


@dataclass(frozen=True)
class Finding:
    """The finding for one trap (``T1`` and so on; ``other`` for a refusal outside the list).

    ``refused``: a fit would raise ``text``. ``declared``: a fit would run, and its card would say so. ``not reached``:
    an earlier refusal is in the way. ``yours``: no examination can see it. ``text`` says what is true instead, or what
    to do.
    """

    trap: str
    title: str
    status: Status
    text: str
    severity: Severity | None = None


@dataclass
class Examination:
    """All findings about one run: one for each trap, and one for each further refusal."""

    privacy: str
    findings: list[Finding] = field(default_factory=list)
    planned: PlannedRun | None = None

    @property
    def refused(self) -> list[Finding]:
        """The findings that a fit would raise."""
        return [finding for finding in self.findings if finding.status == "refused"]

    def to_dict(self) -> dict[str, Any]:
        plan = None if self.planned is None else self.planned.plan
        return {
            "privacy": self.privacy,
            "verdict": "refused" if self.refused else "passed",
            "findings": [asdict(finding) for finding in self.findings],
            "cautions": [] if plan is None else [told(caution) for caution in cautions(plan)],
            "plan": None if plan is None else plan.to_dict(),
        }

    def format(self) -> str:
        width, lines = max(len(finding.status) for finding in self.findings), []
        for finding in self.findings:
            status = finding.status.upper() if finding.status == "refused" else finding.status
            cost = "" if finding.severity is None else f" ({SEVERITIES[finding.severity][0]})"
            lines.append(f"{finding.trap:5} {status:{width}}  {finding.title}{cost}")
            lines.append(f"{'':5} {'':{width}}  {finding.text}")
        if yours := [finding.trap for finding in self.findings if finding.status == "yours"]:
            lines.append(f"For you to check, since no program can: {', '.join(yours)}.")
        if self.planned is not None and self.planned.plan is not None:
            plan = self.planned.plan
            promise = (
                f"within epsilon = {plan.budget.eps:g} at delta = {show_delta(plan.budget.delta)} "
                f"(unit = {plan.budget.unit}, neighbours = {plan.budget.neighbours})."
            )
            if not plan.proved:
                promise = "and no epsilon: the sensitivity is refuted."
            lines.append(
                f"Planned: {self.planned.steps} steps by {plan.law.describe()}, noise multiplier "
                f"{plan.noise_multiplier:.4g}, {promise}"
            )
            lines += [f"note: {told(caution)}" for caution in cautions(plan)]
        return "\n".join(lines)


def examine(trainer: L.Trainer, module: Any, data: Any) -> Examination:
    """Examine what ``trainer.fit(module, datamodule=data)`` would run; ``data`` must be set up.

    Nothing is released and no weight is changed. If there is no secret yet, one is created, as in a fit. Returns one
    finding for each trap, and one for each further refusal.
    """
    mode = getattr(module, "privacy", None)
    look = _Look()
    look.done("settings", complaints(trainer, module, data))
    planned: PlannedRun | None = None
    if hasattr(mode, "guarantee") and hasattr(data, "attach"):
        planned = _rest(look, trainer, module, data)
    guarantee, name = getattr(mode, "guarantee", "dp"), getattr(mode, "name", type(module).__name__)
    found = [finding for trap in TRAPS for finding in look.findings(trap, guarantee, name)]
    listed = {trap.name for trap in TRAPS}
    found += [
        Finding("other", "Refused for another reason", "refused", str(e)) for e in look.refusals if e.trap not in listed
    ]
    plan = None if planned is None else planned.plan
    instead: dict[str, tuple[Status, str]] = {}
    if plan is not None and plan.coupling is not None:
        instead["T11"] = _bounded(plan, plan.coupling)
    if plan is not None and plan.budget.delta > LARGE_DELTA:
        instead["T29"] = "yours", f"Delta is below 1/n, or declared, but {large_delta(plan.budget.delta, None)}"
    if guarantee == "dp":
        instead |= {trap: ("declared", text) for trap, text in _declared(module, trainer.callbacks).items()}  # type: ignore[attr-defined]
    for at, finding in enumerate(found):
        if finding.status == "passed" and finding.trap in instead:
            status, text = instead[finding.trap]
            found[at] = replace(finding, status=status, text=told(text))
    return Examination(name, found, planned)


class _Look:
    def __init__(self) -> None:
        self.refusals: list[LitDpretError] = []
        self._done: set[Stage] = set()

    def done(self, stage: Stage, refusals: list[LitDpretError]) -> None:
        self._done.add(stage)
        self.refusals += refusals

    @contextmanager
    def at(self, stage: Stage) -> Iterator[None]:
        try:
            yield
        except LitDpretError as error:
            self.refusals.append(error)
        else:
            self._done.add(stage)

    def passed(self, stage: Stage) -> bool:
        return stage in self._done

    def findings(self, trap: Trap, guarantee: str, mode: str) -> list[Finding]:
        def found(status: Status, text: str) -> Finding:
            return Finding(trap.name, trap.title, status, text if status == "refused" else told(text), trap.severity)

        refused = [str(e) for e in self.refusals if e.trap == trap.name]
        if refused:
            return [found("refused", text) for text in refused]
        if guarantee not in trap.modes:
            return [found("does not apply", f"privacy={mode} makes no claim that this could break.")]
        if trap.stage == "construction":
            return [found("by construction", trap.instead)]
        if trap.stage == "elsewhere":
            return [found("yours", trap.instead)]
        if not self.passed(trap.stage):
            return [
                found("not reached", f"Not checked: the {trap.stage} was not reached, or refused for another reason.")
            ]
        return [found("passed", trap.instead)]


def _rest(look: _Look, trainer: L.Trainer, module: Any, data: Any) -> PlannedRun | None:
    """Examine everything after the settings, in the order of a fit; each stage as far as earlier ones allow."""
    accountant, mode = accountant_of(trainer), module.privacy
    planned: PlannedRun | None = None
    try:
        refuse_unread_rows(module, data)
    except LitDpretError as error:  # nothing below could be computed
        look.refusals.append(error)
        return None
    with look.at("settings"):
        refuse_protected_queries(trainer, module, data)
        if mode.guarantee == "dp":
            refuse_endless_losses(module)
    with look.at("plan"):
        reserve, start = getattr(accountant, "resume_reserve", 0), None if accountant is None else accountant.start()
        planned = plan_run(trainer, mode, data, module=module, reserve=reserve, start=start)
    with look.at("secret"):
        run_dir = getattr(accountant, "run_dir", None) or Path(trainer.default_root_dir)
        if mode.noise_seed is None:
            load_secret(mode.secret_file, run_dir=run_dir)
    if planned is None:
        return None
    # Never the run's own streams: draws made here must reveal nothing about the run.
    stream = KeyedStream(secrets.token_bytes(32), "doctor")
    sampler = planned.sampler(data, stream)
    with look.at("loader"):
        attach_batches(trainer, module, data, sampler)
        loader = data.train_dataloader()
        refuse_replaced_sampler(loader, sampler)
        refuse_first_asked(loader, sampler)
        refuse_other_units(loader, sampler)
    with look.at("engine"):
        mode.attach(module, planned.plan, stream)
    if mode.guarantee == "dp" and look.passed("engine") and look.passed("loader"):
        batches: list[UnitBatch] = []
        with look.at("loader"):
            batches = _some_batches(loader, sampler)
        if batches:
            with look.at("rehearsal"), rehearsed(trainer, module):
                refuse_remembering_collation(module, loader.dataset, sampler)
                module.rehearse(batches)
    return planned


def _some_batches(loader: Any, sampler: PrivateBatchSampler) -> list[UnitBatch]:
    """Return a few units that have rows, as two physical batches of one step; none if a unit would be alone."""
    drawn = {
        draw.unit: draw
        for step in range(REHEARSED_STEPS)
        for batch in sampler.physical_batches(step)
        for draw in batch
        if draw.unit != PADDING
    }
    items = (loader.dataset[draw] for draw in drawn.values())
    most = REHEARSED_UNITS if sampler.n_max is None else min(REHEARSED_UNITS, 2 * sampler.n_max)
    chosen = list(islice((item for item in items if len(item[1])), most))
    half = len(chosen) // 2
    parts = [part for part in (chosen[:half], chosen[half:]) if len(part) > 1]
    return [
        loader.collate_fn([(replace(draw, step=0, part=number, last=False), rows) for draw, rows in part])
        for number, part in enumerate(parts)
    ]


def _bounded(plan: PrivacyPlan, coupling: Coupling) -> tuple[Status, str]:
    """State the bound instead of "no row changed the loss of another one" if a mode proves one."""
    text = (
        f"The loss couples units, and that is counted: {coupling.describe(plan.max_grad_norm)}; one unit moves the sum "
        f"by at most {plan.sensitivity:g}. No layer keeps statistics of a batch."
    )
    if coupling.claim == "refuted":
        text += " That number is refuted: a fit would run, and its card would state no epsilon."
    return "passed" if coupling.claim == "proved" else "declared", text


def _declared(module: Any, callbacks: list[Any]) -> dict[str, str]:
    """Return, by trap, the leaks that settings of the module and the callbacks ask for."""
    asked = {}
    shown = [leak for callback in callbacks if (leak := getattr(callback, "declared_leak", None))]
    if getattr(module, "log_private_loss", False):
        shown.insert(0, "model.log_private_loss=true logs the loss of private rows.")
    if shown:
        asked["T25"] = " ".join(shown)
    seed = getattr(getattr(module, "privacy", None), "noise_seed", None)
    if seed is not None:
        asked["T21"] = f"privacy.noise_seed={seed} keys the noise with a published number."
    return {trap: f"{text} A fit would run; its card would state no epsilon." for trap, text in asked.items()}
