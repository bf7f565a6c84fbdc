"""`task=sweep`: plan every trial, reserve the total cost, run the trials, and report their results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lit_dpret.callbacks import ProgressLine
from lit_dpret.cards.tuning import TuningData
from lit_dpret.errors import ConfigurationError, LedgerError, LitDpretError, WorkerError
from lit_dpret.files import OutputFile
from lit_dpret.privacy.budget import PrivacyBudget, show_delta, show_epsilon
from lit_dpret.privacy.ledger.dataset_account import RunLock
from lit_dpret.privacy.ledger.dataset_file import Charge, Total
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.settings import Settings
from lit_dpret.sweeps import SweepFile, SweepFolder, Trial, run_trials
from lit_dpret.sweeps.folder import SWEEP, SweepTerms
from lit_dpret.sweeps.report import write_report
from lit_dpret.sweeps.runner import check_command
from lit_dpret.tasks.fit import PlannedFit
from lit_dpret.tasks.multirun import planned_once, planned_together
from lit_dpret.tasks.parts import Parts, check_run_dir, say
from lit_dpret.tasks.trial import check_trial, release_behind


@dataclass(kw_only=True)
class Sweep(Settings):
    """Run a W&B sweep file without a server, in a folder that W&B's agents can share.

    Guarantees:
        - Before the first trial starts, all of them are reserved in the ledger of the data set, or nothing starts.
        - A finished trial is not run again; an interrupted one resumes.
    """

    file: str | Path
    dataset_ledger: OutputFile | None = None
    total_eps: float | None = None
    metric_data: TuningData = "unknown"
    start: bool = True
    offline: bool = True
    give_back: bool = False
    min_free_mb: float = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sweep = SweepFile.read(self.file)
        if self.metric_data == "none" and self.sweep.metric:
            raise ConfigurationError(
                f"task.metric_data=none, but task.file={self.sweep.path} compares its trials by "
                f"{self.sweep.metric['name']}: declare the data on which it is computed."
            )

    def run(self, parts: Parts) -> dict[str, float]:
        """Plan, reserve, run and report; return the number of finished trials and their maximal cost."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        trials = self.sweep.trials(seed=parts.seed)
        if self.start and not self.give_back:
            check_command(self.sweep, trials[0], parts.run_dir)
        with _alone(parts.run_dir):  # two calls that start together plan one sweep
            sweep = self._planned(parts, trials)
            ledger = sweep.ledger()
            if self.give_back:
                if ledger is not None:
                    total = ledger.give_back(sweep.id)
                    say(f"given back; the data set holds epsilon {show_epsilon(total.epsilon)} of {total.total_eps:g}")
                return {"trials": float(len(trials))}
            if ledger is not None:
                total, planned = self._hold(ledger, sweep), sweep.facts["planned"]
                say(
                    f"{len(trials)} trials, {len(sweep.places)} private runs: together epsilon "
                    f"{show_epsilon(planned['epsilon'])} at delta {show_delta(planned['delta'])}; the data set then "
                    f"holds {show_epsilon(total.epsilon)} of {total.total_eps:g} at delta {show_delta(total.delta)} "
                    f"({ledger.path})"
                )
        if not self.start:
            say(f"planned and reserved: start trials with trial_of={sweep.folder} (docs/sweeps.md)")
            return {"trials": 0.0}
        with ProgressLine("sweep", every=0.0) as progress:
            outcome = run_trials(sweep, self.sweep, trials, offline=self.offline, progress=progress)
        report = write_report(sweep)
        say(report.text)
        if outcome.failed:
            first, why = next(iter(outcome.failed.items()))
            raise WorkerError(
                f"{len(outcome.failed)} of {len(trials)} trials failed; {first}: {why.rstrip('.')}. Finished trials "
                "are kept: the same command retries the others, and task.give_back=true releases the budget reserved "
                "for them."
            )
        return {"trials": float(len(outcome.done)), **({} if report.epsilon is None else {"epsilon": report.epsilon})}

    def _hold(self, ledger: DatasetLedger, sweep: SweepFolder) -> Total:
        """Reserve all trials; a new sweep that is refused leaves no plan, so that the user can try another limit."""
        try:
            return ledger.hold(sweep.id, sweep.places, name=str(sweep.folder))
        except LitDpretError:
            if self._new:
                (sweep.folder / SWEEP).unlink(missing_ok=True)
            raise

    # -- the plan ------------------------------------------------------------------------------

    def _planned(self, parts: Parts, trials: Sequence[Trial]) -> SweepFolder:
        if (parts.run_dir / SWEEP).exists():
            sweep = SweepFolder.read(parts.run_dir)
            sweep.require(self.sweep, self.dataset_ledger, self.total_eps, self.metric_data)
            self._new = False
            return sweep
        self._without_privacy = 0
        self._releases: set[str | None] = set()
        self._new = True
        plans: list[PlannedFit] = []
        known: dict[str, list[PlannedFit]] = {}
        with ProgressLine("planning trials") as progress:
            for number, trial in enumerate(trials):
                plans += self._plans_of(parts, trial, known)
                progress(number + 1, len(trials))
        budget = self._one_guarantee([planned.plan for planned in plans])
        planned_total = None
        if budget is not None:
            planned_total = planned_together(plans)
            self._refuse_uncounted(parts, planned_total["epsilon"], budget.delta)
        ledger = self._ledger(budget)
        terms = {} if ledger is None else ledger.terms()
        if budget is not None and self.metric_data == "private" and terms["delta"] > budget.delta:
            raise ConfigurationError(
                f"task.metric_data=private with privacy.delta={budget.delta}: the limit of "
                f"task.dataset_ledger={self.dataset_ledger} covers the choice, and holds at delta {terms['delta']} but "
                "not at a smaller one. Set privacy.delta to that, or choose on public data."
            )
        places = [Charge.of(one.releases, one.start.uncounted(ledger) if one.start else ()) for one in plans]
        counted = SweepTerms(
            budget=budget,
            accountant=plans[0].plan.accountant if plans else "pld",
            dataset_ledger=self.dataset_ledger,
            total_eps=terms.get("total_eps", self.total_eps),
            ledger_delta=terms.get("delta"),
            metric_data=self.metric_data,
            planned=planned_total,
            without_privacy=self._without_privacy,
            releases=sorted(self._releases, key=str),
        )
        return SweepFolder.plan(parts.run_dir, self.sweep, trials, places, counted)

    def _plans_of(self, parts: Parts, trial: Trial, known: dict[str, list[PlannedFit]]) -> list[PlannedFit]:
        """Return the private trainings of one trial; from the cache if an equal trial was planned before."""
        if parts.make_run is None:
            raise ConfigurationError("Run task=sweep from the command line, which composes its trials.")
        composed = parts.make_run([*self.sweep.fixed, *trial.overrides])
        task, own = composed.make()
        mode = own.make_privacy()
        self._without_privacy += mode.guarantee != "dp"
        self._releases.add(release_behind(mode, own))
        check_trial(task, mode, own.make_callbacks(), self.metric_data, self.sweep.metric.get("name"))
        if mode.guarantee == "dp" and '"log_private_loss": true' in composed.describe(("model", "task")):
            raise ConfigurationError(
                f"task.file={self.sweep.path} sets log_private_loss=true under privacy={mode.name}: such a trial has "
                "no claim, and no reservation bounds its cost. Remove that setting."
            )
        return planned_once(composed, task, own, known)

    def _one_guarantee(self, plans: Sequence[PrivacyPlan]) -> PrivacyBudget | None:
        """Return the budget with the units and neighbours of all trials and their smallest delta; None if none is
        private.
        """
        budgets = [plan.budget for plan in plans]
        for knob in ("privacy.unit", "privacy.neighbours", "datamodule.duplicates", "datamodule.unit_by"):
            if len(found := {str(getattr(budget, knob.partition(".")[2])) for budget in budgets}) > 1:
                raise ConfigurationError(
                    f"task.file={self.sweep.path}: its trials have {knob}={' and '.join(sorted(found))}, and "
                    "epsilons of different guarantees do not add up. Run a sweep for each."
                )
        return min(budgets, key=lambda budget: budget.delta, default=None)

    def _ledger(self, budget: PrivacyBudget | None) -> DatasetLedger | None:
        if budget is None or self.dataset_ledger is None:
            return None
        return DatasetLedger(self.dataset_ledger, total_eps=self.total_eps, budget=budget, group="task")

    def _refuse_uncounted(self, parts: Parts, epsilon: float, delta: float) -> None:
        cost = f"all trials together cost epsilon {show_epsilon(epsilon)} at delta {show_delta(delta)}"
        if self.dataset_ledger is None:
            raise ConfigurationError(
                f"task.dataset_ledger=null, but {cost}: set it to the file next to the data that adds up all runs on "
                "the data set, so that one trial's epsilon is not mistaken for the cost of the sweep."
            )
        if self.dataset_ledger.resolve().is_relative_to(parts.run_dir.resolve()):
            raise ConfigurationError(
                f"task.dataset_ledger={self.dataset_ledger} is inside the sweep's folder {parts.run_dir}, where no "
                "other run on the data set would find it. Put it next to the data."
            )
        if self.total_eps is None and not self.dataset_ledger.exists():
            raise ConfigurationError(f"task.total_eps=null with a new task.dataset_ledger: {cost}. Set task.total_eps.")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process plans in ``folder``, then hold the planning lock."""
    lock, waited = RunLock(folder / SWEEP, "plan"), False
    while True:
        try:
            lock.take()
            break
        except LedgerError:
            if not waited:
                say(f"another process plans the sweep in {folder}; waiting for it")
            waited = True
            time.sleep(0.2)
    try:
        yield
    finally:
        lock.release()
