"""A run as a trial of a sweep: registered before it starts, and reported when it is finished."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lit_dpret.callbacks import PrivacyCard, RetrievalEvaluation
from lit_dpret.callbacks.origins import claim_of
from lit_dpret.cards.tuning import AMONG, refuse_other_tuning, refuse_told_as_none, refuse_told_number
from lit_dpret.errors import ConfigurationError
from lit_dpret.sweeps import SweepFolder, write_result
from lit_dpret.tasks.parts import Parts

_RELEASE = ("datamodule.folder", "datamodule.data")  # settings that name the release of ``privacy=synthetic``
_WHOSE = ("data", "whose", "queries", "reference", "tuning_data")  # task settings that say whose the queries are


class TrialOf:
    """The sweep that ``trial_of=folder`` names."""

    def __init__(self, folder: str | Path, task: Any, parts: Parts) -> None:
        run_dir = parts.run_dir
        self.sweep, self.run_dir = SweepFolder.read(folder), run_dir
        if run_dir.resolve().parent != self.sweep.trial_folder("x").resolve().parent:
            raise ConfigurationError(
                f"trial_of={folder}, but hydra.run.dir={run_dir} is not a folder in {folder}/trials: "
                "the sweep would not find the trial. Put it there."
            )
        mode = parts.make_privacy()
        if mode.guarantee != "dp" and self.sweep.facts.get("without_privacy") == 0:
            raise ConfigurationError(
                f"trial_of={folder} with privacy={mode.name}: all trials of that sweep were planned as private, and "
                "their cards say so. Plan a sweep with this trial in it, or leave trial_of null."
            )
        known = self.sweep.facts.get("releases") or [None]
        if None not in known and release_behind(mode, parts) not in known:
            raise ConfigurationError(
                f"trial_of={folder} with privacy={mode.name}: all trials of that sweep were planned on releases that "
                "it names, and this one trains on other data. Plan a sweep with this trial in it, or leave trial_of "
                "null."
            )
        metric = self.sweep.facts["metric"].get("name")
        check_trial(task, mode, parts.make_callbacks(), self.sweep.facts["metric_data"], metric)
        self._left_out = results_without_privacy(task, mode)

    def finish(self, overrides: Sequence[str], result: Any) -> None:
        """Record the trial and its result, on the first rank, without results that no choice may use."""
        if getattr(rank_zero_only, "rank", 0):
            return
        named = self.sweep.parameters
        settings = [override for override in overrides if override.partition("=")[0] in named]
        found = result if isinstance(result, Mapping) else {}
        kept = {name: value for name, value in found.items() if name not in self._left_out}
        write_result(self.run_dir, settings, kept)


def release_behind(mode: Any, parts: Parts) -> str | None:
    """Name the release on which a ``privacy=synthetic`` run trains; None for other runs."""
    data = parts.make_datamodule() if mode.guarantee == "inherited" else None
    return None if getattr(data, "privacy_card_path", None) is None else claim_of(data)


def results_without_privacy(task: Any, mode: Any) -> Sequence[str]:
    """Return the names of a private task's results that come from a model trained on the same data without privacy."""
    found: Sequence[str] = getattr(task, "results_without_privacy", ()) if mode.guarantee == "dp" else ()
    return found


def refuse_unprivate_choice(task: Any, mode: Any, name: str | None, *, knob: str) -> None:
    """Refuse to choose among private runs by a result without privacy."""
    if name in results_without_privacy(task, mode):
        raise ConfigurationError(
            f"{knob}={name} under privacy={mode.name}: that result is from a model trained on the private queries "
            "without privacy, and no epsilon covers a choice by it. Name another result."
        )


def private_scores(task: Any, callbacks: Sequence[Any]) -> list[str]:
    """Return the settings that make a run compute results on private queries, such as ``task.data=private``."""
    said = [(f"task.{name}", getattr(task, name, None)) for name in _WHOSE]
    said += [("callbacks.evaluation.data", one.data) for one in callbacks if isinstance(one, RetrievalEvaluation)]
    return [f"{knob}=private" for knob, value in said if isinstance(value, str) and value == "private"]


def refuse_private_objective(task: Any, callbacks: Sequence[Any], name: str, sweep: SweepFolder | None) -> bool:
    """Refuse an undeclared objective on private queries; return whether it is on private ones."""
    if sweep is not None and sweep.facts["metric_data"] == "none":
        raise ConfigurationError(
            f"objective={name} in a trial of a sweep with task.metric_data=none: a sweeper compares trials by it, but "
            "the cards say that nothing is compared. Plan the sweep with the task.metric_data of the objective."
        )
    if any(name in one.public_metrics for one in callbacks if isinstance(one, RetrievalEvaluation)):
        return False
    declared = sweep is not None and sweep.facts["metric_data"] == "private"
    private = private_scores(task, callbacks)
    if getattr(task, "private_results", False):
        private.append("a task on private queries")
    elif getattr(task, "undeclared_results", False) and (sweep is None or sweep.facts["metric_data"] == "unknown"):
        private.append("results on the DataModule's queries, whose owner is not declared")
    if private and not declared:
        raise ConfigurationError(
            f"objective={name} with {private[0]}: a sweeper records that number for all trials and chooses by it, "
            "which no epsilon covers. Compare on public queries, or set trial_of to a sweep planned with a "
            "task.metric_data that declares their kind (docs/sweeps.md)."
        )
    return bool(private) or declared


def refuse_other_choice(
    task: Any, parts: Parts, objective: str | None, varied: Sequence[str] = (), *,
    releases: Collection[Any] | None = None,
) -> None:  # fmt: skip
    """Refuse cards that state no choice, or another one, in a multirun of private runs without a sweep.

    Such runs train on private data (``planned_fits``), release something else computed from them (``releases_itself``),
    or derive something from several releases: those that ``privacy=synthetic`` trains on, or that the settings in a
    task's ``derives_from`` name (``*`` for anything). A difference in the seed alone is not a choice. ``releases`` are
    the sources of the runs, from `release_behind`; None if they are unknown.
    """
    if parts.trial_of is not None:
        return
    differing = [name for name in varied if name != "seed"]
    mode = parts.make_privacy()
    own = mode.guarantee == "dp" and (hasattr(task, "planned_fits") or getattr(task, "releases_itself", False))
    if not own and not _of_several_releases(task, mode, differing, releases):
        return
    among, way = "several private releases", ""
    if own:
        among = AMONG if hasattr(task, "planned_fits") else "releases of private data"
        way = ", or set trial_of to a planned sweep, whose cost is known (docs/sweeps.md)"
    chooser = f"objective={objective}" if objective is not None else f"-m, which varies {', '.join(differing)}"
    said = [("task.tuning_", {"data": getattr(task, "tuning_data", None)})]
    said += [("callbacks.card.tuning_", one.tuning) for one in parts.make_callbacks() if isinstance(one, PrivacyCard)]
    for knob, tuning in said:
        refuse_told_number(tuning, "-m" if objective is None else "objective", knob=knob)
        if objective is not None or differing:
            refuse_told_as_none(tuning.get("data"), chooser, among, knob=knob, way=way)


def _of_several_releases(task: Any, mode: Any, differing: Sequence[str], releases: Collection[Any] | None) -> bool:
    """Return whether the runs of a multirun are, or may be, derived from several releases."""
    if mode.guarantee == "inherited" and hasattr(task, "planned_fits"):
        return len(set(releases)) > 1 if releases is not None else bool({*differing} & {"datamodule", *_RELEASE})
    return any(fnmatch(name, known) for name in differing for known in getattr(task, "derives_from", ()))


def check_trial(task: Any, mode: Any, callbacks: Sequence[Any], metric_data: str, metric: str | None = None) -> None:
    """Refuse a trial without a bounded cost, or one that contradicts its sweep about the comparison data."""
    if not hasattr(task, "planned_fits"):
        raise ConfigurationError(
            f"trial_of and task.file are for task=fit, fit_scored and pipeline: the releases of {type(task).__name__} "
            "are not known beforehand, so no sweep can plan them."
        )
    refuse_unprivate_choice(task, mode, metric, knob="metric.name")
    for setting in private_scores(task, callbacks):
        if metric_data != "private":
            raise ConfigurationError(
                f"{setting} in a trial of a sweep with task.metric_data={metric_data}: its score uses private queries, "
                "so the cards would misreport the choice by it. Set task.metric_data=private."
            )
    refuse_other_tuning({"data": getattr(task, "tuning_data", None)}, metric_data, knob="task.tuning_")
    for one in callbacks:
        if isinstance(one, PrivacyCard):
            refuse_other_tuning(one.tuning, metric_data)
    evaluated = [one for one in callbacks if isinstance(one, RetrievalEvaluation) and one.data == "private"]
    leak = f"privacy.noise_seed={mode.noise_seed}" if mode.noise_seed is not None else (
        "callbacks.evaluation.data=private" if evaluated else None
    )  # fmt: skip
    if mode.guarantee == "dp" and leak is not None:
        raise ConfigurationError(
            f"{leak} in a trial under privacy={mode.name}: its card would have no claim, and no reservation in the "
            "data-set ledger bounds its cost. Remove it."
        )
