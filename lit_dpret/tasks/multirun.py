"""The runs of one command (``-m``, ``task=sweep``): their total cost before the first, a table after the last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.cards.file import CARD_NAME, read_card
from lit_dpret.cards.text import privacy_line
from lit_dpret.costs.estimate import FACTOR, duration, estimate
from lit_dpret.errors import LitDpretError, ResumeError, UnplannedError
from lit_dpret.files import write_whole
from lit_dpret.privacy.budget import AccountantName, show_delta, show_epsilon
from lit_dpret.privacy.ledger.dataset_file import Charge, EarlierRun, compose_across_runs, composed
from lit_dpret.privacy.ledger.judgement import owed_releases
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, ledger_identity, plans_of, recorded_start
from lit_dpret.privacy.ledger.siblings import among_siblings, tells_of_all
from lit_dpret.report.table import Table, plain
from lit_dpret.sweeps.report import claimed_epsilon, differing
from lit_dpret.tasks.fit import Fit, PlannedFit
from lit_dpret.tasks.parts import ComposedRun, Parts, say
from lit_dpret.tasks.trial import refuse_other_choice, release_behind

RESULTS = "multirun.md"
_PLANNED_BY = ("task", "privacy", "datamodule", "trainer", "callbacks", "canaries")
_COUPLED_BY = ("model", "loss", "negatives")
_ROUNDING = 1e-9  # relative tolerance for an epsilon that is composed again
_MOST_RESULTS = 8  # maximum number of result columns in a terminal


def planned_once(run: ComposedRun, task: Any, parts: Parts, known: dict[str, list[PlannedFit]]) -> list[PlannedFit]:
    """Return the private trainings of a run; from the cache if an equal run was planned before."""
    groups = _PLANNED_BY + (_COUPLED_BY if parts.make_privacy().calibrated_to_loss else ())
    key = run.describe(groups)
    if key not in known:
        known[key] = task.planned_fits(parts)
    return known[key]


def planned_together(plans: Sequence[PlannedFit]) -> dict[str, Any]:
    """Return the joint epsilon of all trainings, at the smallest of their deltas, in the form of `siblings_now`."""
    budget = min((one.plan.budget for one in plans), key=lambda budget: budget.delta)
    value, how = compose_across_runs(
        composed(Charge.of(one.releases, one.start.earlier() if one.start else ()) for one in plans),
        delta=budget.delta, neighbours=budget.neighbours, accountant=plans[0].plan.accountant,
    )  # fmt: skip
    return {"epsilon": value, "delta": budget.delta, "unit": budget.unit, "neighbours": budget.neighbours,
            "accountant": str(how)}  # fmt: skip


@dataclass(frozen=True)
class Together:
    """The runs of one command as a whole, and their cost."""

    words: Sequence[str]  # sentences for a reader, without the cost
    siblings: Mapping[str, Any] | None  # for each run's ledger, in the form of `siblings_now`; None for a single run
    planned: Mapping[str, Any] | None = None  # from `planned_together`
    unit: str = ""  # the unit that the epsilon protects, in words

    @property
    def text(self) -> str:
        """The message before the first run."""
        return self._told(None if self.planned is None else self._cost(self.planned["epsilon"], "as planned, "))

    def after(self, ledgers: Iterable[Path]) -> str:
        """Return the message after the last run: the cost that the ledgers charge, and never less than was planned."""
        if self.planned is None:
            return self._told(None)
        try:
            spent, how = charged_together(ledgers, self.planned)
        except LitDpretError as error:  # the table of results is written all the same
            return self._told(f"What they cost together is not known: {str(error).rstrip('.')}")
        if math.isinf(spent):
            return self._told(
                "Together they have no proved epsilon: the ledger of at least one of them proves nothing, as its card "
                "states"
            )
        planned = self.planned["epsilon"]
        if spent <= planned * (1 + _ROUNDING):
            return self._told(self._cost(planned))
        more = (
            f"more than the {show_epsilon(planned)} that was planned (a step repeated after an interruption is charged "
            "again), "
        )
        return self._told(self._cost(spent, more, how))

    def _cost(self, value: float, told: str = "", how: str = "") -> str:
        planned = self.planned or {}
        return (
            f"Together epsilon {show_epsilon(value)} at delta {show_delta(planned['delta'])} for one {self.unit}, "
            f"{told}composed by {how or planned['accountant']}: this, not the epsilon of one card, holds for anyone "
            "who sees several of the models, or one chosen among them"
        )

    def _told(self, cost: str | None) -> str:
        return "".join(f"{sentence}. " for sentence in [*self.words, *filter(None, [cost])]).rstrip()


def charged_together(ledgers: Iterable[Path], planned: Mapping[str, Any]) -> tuple[float, str]:
    """Return the joint epsilon of these ledgers, at the delta of ``planned``, and the composition method.

    It is infinite if one of them proves nothing. Copies of one ledger count once, by the longest of them.
    """
    found: dict[str, Sequence[Mapping[str, Any]]] = {}
    for path in ledgers:
        records = PrivacyLedger.read(path).records
        if any(plan["plan"] is not None for plan in plans_of(records)):
            key = ledger_identity(records)
            found[key] = max(found.get(key, ()), records, key=len)
    charges = [Charge.of(owed_releases(one), EarlierRun.of_start(recorded_start(one))) for one in found.values()]
    accountant: AccountantName = "rdp" if planned["accountant"] == "rdp" else "pld"
    return compose_across_runs(
        composed(charges), delta=planned["delta"], neighbours=planned["neighbours"], accountant=accountant
    )


def tell_cost(runs: Sequence[ComposedRun], varied: Sequence[str] = ()) -> Together:
    """Print and return the number of runs, their total cost, and their duration, if known."""
    found = cost_of_all(runs, varied)
    say(found.text)
    return found


def cost_of_all(runs: Sequence[ComposedRun], varied: Sequence[str] = ()) -> Together:
    """Return the object whose text `tell_cost` prints."""
    made = [run.make() for run in runs]
    found = _planned(runs, made, varied)
    if found.siblings is not None:
        for _, parts in made:
            _refuse_untold(parts, found.siblings)
    return found


def _refuse_untold(parts: Parts, siblings: Mapping[str, Any]) -> None:
    """Refuse to keep a finished run whose card does not mention all private runs of this command.

    To mention them, the card and ledger would have to be rewritten, and artefacts made from the run name both.
    """
    if not parts.resume or parts.trial_of is not None:
        return
    for path in ledgers_below(parts.run_dir):
        if not (path.parent / CARD_NAME).is_file():
            continue
        records = PrivacyLedger.read(path).records
        private = any(plan["plan"] is not None for plan in plans_of(records))
        ended = private and (records[-1]["kind"], records[-1].get("reason")) == ("end", "finished")
        if ended and not tells_of_all(records, siblings):
            raise ResumeError(
                f"resume=true: {path.parent} holds a finished run of another command, and this one would start more "
                "private runs next to it: its card would not state them, or what a choice among all costs. Request the "
                f"runs that it started with, or start all {siblings['runs']} in another hydra.sweep.dir without "
                "resume=true."
            )


def ledgers_below(run_dir: Path) -> list[Path]:
    """Return the ledger of a run, or those of its stages."""
    return [path for path in (run_dir / LEDGER_NAME, *sorted(run_dir.glob(f"*/{LEDGER_NAME}"))) if path.is_file()]


def _planned(runs: Sequence[ComposedRun], made: Sequence[tuple[Any, Parts]], varied: Sequence[str]) -> Together:
    modes = [parts.make_privacy() for _, parts in made]
    releases = [release_behind(mode, parts) for mode, (_, parts) in zip(modes, made, strict=True)]
    for task, parts in made:
        refuse_other_choice(task, parts, None, varied, releases=[one for one in releases if one is not None])
    private, bare = (sum(mode.guarantee == kind for mode in modes) for kind in ("dp", "none"))
    beside = siblings_facts(len(runs), varied, private_runs=private, without_privacy=bare)
    plans: list[PlannedFit] = []
    known: dict[str, list[PlannedFit]] = {}
    seconds = 0.0
    try:
        for run, (task, parts), mode in zip(runs, made, modes, strict=True):
            if not hasattr(task, "planned_fits"):
                text = "What they cost together is not known beforehand for this task"
                return Together([f"{len(runs)} runs", text], beside)
            found = planned_once(run, task, parts, known) if mode.guarantee == "dp" else []
            plans += found
            seconds += _seconds(task, parts, mode, found)
    except UnplannedError as error:
        why = str(error).rstrip(".")
        return Together([f"{len(runs)} runs", f"What they cost together is not known beforehand: {why}"], beside)
    words = [f"{len(runs)} runs, {len(plans)} private trainings" + (f", {bare} runs without privacy" if bare else "")]
    budgets = [one.plan.budget for one in plans]
    kinds = {(budget.unit, budget.neighbours, budget.duplicates, budget.unit_by) for budget in budgets}
    units = sorted({budget.describe_unit(whole=len(kinds) > 1) for budget in budgets})
    if len(kinds) > 1:
        words.append(f"Their epsilons are for different units and do not add up: {', '.join(units)}")
    planned = planned_together(plans) if plans and len(kinds) == 1 else None
    if planned is not None and beside is not None:
        beside |= {"private_runs": len(plans), "planned": planned}
    if math.isfinite(seconds):
        words.append(f"Training takes {duration(seconds)} here, give or take a factor of {FACTOR:g}")
    return Together(words, beside, planned, units[0] if units else "")


def siblings_facts(
    runs: int | None, varied: Sequence[str], *, private_runs: int | None = None, without_privacy: int | None = None
) -> dict[str, Any] | None:
    """Return the facts that each run's ledger records about all runs of a command; None for a single run.

    ``runs`` is None if a sweeper decides the number.
    """
    if runs is not None and runs < 2:
        return None
    names = [name.lstrip("+") for name in varied]
    return {"runs": runs, "varied": names, "private_runs": private_runs, "without_privacy": without_privacy,
            "planned": None}  # fmt: skip


def _seconds(task: Any, parts: Parts, mode: Any, found: Sequence[PlannedFit]) -> float:
    """Return the duration of a run by the formulas of ``task=plan``; NaN if they do not cover it."""
    if type(task) is not Fit or len(found) != 1:
        return math.nan
    with suppress(LitDpretError):
        trainer = parts.make_trainer(logger=False)
        outline = parts.make_outline(privacy=mode)
        device, precision = trainer.strategy.root_device, str(trainer.precision)
        facts = estimate(outline, found[0].plan, device, precision=precision, secure_rng=mode.secure_rng)
        return float(facts["seconds_of_run"])
    return math.nan


@dataclass
class Outcomes:
    """The results so far of a command's runs: one row each, in order, and their total cost."""

    folder: Path
    together: Together | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    run_dirs: list[Path] = field(default_factory=list)

    def known(self, *, planned: bool) -> AbstractContextManager[None]:
        """Return a context in which a starting run knows of the others; a ``planned`` sweep knows its own trials."""
        return among_siblings(None if planned or self.together is None else self.together.siblings)

    def add(self, run_dir: Path, settings: Sequence[str], result: Any) -> None:
        """Record the result of a run, or the error that ended it."""
        found = dict(result) if isinstance(result, Mapping) else {}
        ended = " ".join(str(result).split()) if isinstance(result, BaseException) else ""
        given = dict(setting.lstrip("+").partition("=")[::2] for setting in settings)
        terms = privacy_line(read_card(run_dir)).partition(", ")[2] if (run_dir / CARD_NAME).is_file() else ""
        self.run_dirs.append(run_dir)
        self.rows.append({"run": run_dir.name, "settings": given, "metrics": found, "error": ended,
                          "epsilon": claimed_epsilon(run_dir), "terms": terms})  # fmt: skip

    def tell(self) -> None:
        """Print the table and write it into the folder of all runs, readable by its owner alone."""
        by_terms: dict[str, list[str]] = {}
        for row in self.rows:
            by_terms.setdefault(row["terms"], []).append(row["run"])
        told = [
            f"{', '.join(runs)}: each run's epsilon alone, at {terms}." for terms, runs in by_terms.items() if terms
        ]
        if self.together is not None and self.together.words:
            told.append(self.together.after(path for folder in self.run_dirs for path in ledgers_below(folder)))
        text = "\n\n".join([self.table().markdown(), *told])
        write_whole(self.folder / RESULTS, f"{text}\n", owner_only=True)
        say(text, f"written: {self.folder / RESULTS}")

    def table(self) -> Table:
        """Return the settings and results in which the runs differ, with the epsilon of each card."""
        settings = differing([row["settings"] for row in self.rows])
        metrics = differing([row["metrics"] for row in self.rows if not row["error"]])[:_MOST_RESULTS]
        failed = any(row["error"] for row in self.rows)
        lines = [
            [row["run"], *(row["settings"].get(name, "") for name in settings),
             "–" if row["epsilon"] is None else show_epsilon(row["epsilon"]),
             *(plain(row["metrics"].get(name)) for name in metrics), *([row["error"]] if failed else [])]
            for row in self.rows
        ]  # fmt: skip
        numeric = frozenset(range(1 + len(settings), 2 + len(settings) + len(metrics)))
        return Table(["run", *settings, "epsilon", *metrics, *(["error"] if failed else [])], lines, numeric=numeric)
