"""The single entry point of `python train.py`, `python -m lit_dpret` and `lit-dpret`.

Only this package uses Hydra. It composes the configuration, gives a task the means to build what it needs, and turns
errors that a user can cause into one line and a non-zero exit status.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import lit_dpret
from lit_dpret import errors
from lit_dpret.cli import jobs
from lit_dpret.cli.arguments import listing, own_overrides, program, quoted, with_task
from lit_dpret.cli.composition import build_parts, check_request, check_top_level, checked_task, composed_run
from lit_dpret.cli.explanations import causes, explain, lost_rank
from lit_dpret.config import CONFIG_MODULE, format_help, names
from lit_dpret.distributed import rank_watch
from lit_dpret.errors import ConfigurationError, WorkerError
from lit_dpret.tasks.parts import Parts, as_typed
from lit_dpret.tasks.silo_command import silo_command
from lit_dpret.tasks.stages import holds_a_run

__all__ = [
    "CONFIG_MODULE",
    "USER_ERROR",
    "build_parts",
    "checked_task",
    "explain",
    "listing",
    "main",
    "run",
    "with_task",
]

USER_ERROR = 2
_places: list[tuple[str, Path]] = []  # the setting and the folder of the running command
_failed: list[Exception] = []  # the error that ended it
_outcomes: list[Any] = []  # of a multirun: the outcomes of its runs in this process
OmegaConf.register_new_resolver("new_name", rank_watch.new_name, use_cache=True, replace=True)
OmegaConf.register_new_resolver("settings_folder", jobs.settings_folder, replace=True)
OmegaConf.register_new_resolver("job_name", lambda number: jobs.job_name(int(number)), replace=True)


def run(cfg: DictConfig) -> Any:
    """Run the task of a composed configuration."""
    check_top_level(cfg)
    task = checked_task(cfg)
    _quieten()  # the task has imported Lightning, which re-enables its messages
    if (started := rank_watch.world_size()) > 1 and not getattr(task, "takes_ranks", False):
        raise ConfigurationError(
            f"{started} processes were started, but this task runs in one. Start it without torchrun or srun."
        )
    _note_place()
    jobs.begin_what_is_left(cfg)
    parts = build_parts(cfg)
    check_request(cfg, task, parts)
    if hasattr(task, "planned_fits") and rank_watch.is_first():
        sys.stderr.write(f"run folder: {cfg.run_dir}, model: {_choice('model', cfg.model)}\n")
    parts = replace(parts, make_datamodule=_named_first(parts.make_datamodule, _data_line(cfg, task)))
    trial = _chosen_among(cfg, task, parts)
    before = dict(os.environ)
    with jobs.one_job():
        try:
            result = task.run(parts)
        finally:
            rank_watch.leave(before)
    if trial is not None:
        trial.finish(own_overrides(), result)
    return result


def _chosen_among(cfg: DictConfig, task: Any, parts: Parts) -> Any:
    """Refuse a run whose card would not state the choice that it is part of; return its sweep if it is a trial."""
    many = jobs.multirun() is not None
    if not many and cfg.objective is None and cfg.trial_of is None:
        return None
    from lit_dpret.tasks import trial as choice

    if cfg.objective is not None:
        choice.refuse_unprivate_choice(task, parts.make_privacy(), cfg.objective, knob="objective")
    trial = None if cfg.trial_of is None else choice.TrialOf(cfg.trial_of, task, parts)
    if cfg.objective is not None:
        sweep = None if trial is None else trial.sweep
        if choice.refuse_private_objective(task, parts.make_callbacks(), cfg.objective, sweep):
            jobs.close_sweep()
    if many or cfg.objective is not None:
        varied, known = jobs.swept() if many else ([], None)
        # If the runs are known, all of them were compared before the first (`tell_cost`).
        choice.refuse_other_choice(task, parts, cfg.objective, varied, releases=None if known is None else ())
    return trial


def _named_first(make: Callable[..., Any], line: str) -> Callable[..., Any]:
    """Return ``make``, which prints ``line`` on its first call: every task names its data before it measures."""
    lines = [line] if rank_watch.is_first() else []

    def made(**extra: Any) -> Any:
        if lines:
            sys.stderr.write(f"{lines.pop()}\n")
        return make(**extra)

    return made


def _data_line(cfg: DictConfig, task: Any) -> str:
    """Return the line that names the data a task reads and, if it trains, its privacy promise and unit."""
    given = {word.lstrip("+").split("=")[0] for word in own_overrides()}
    chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    node = cfg.datamodule
    places = [str(node[key]) for key in ("name", "folder", "pairs", "queries", "path", "hub") if node.get(key)]
    name = _choice("datamodule", node)
    default = "" if given & {"datamodule", "experiment"} else " (the default; choose another with datamodule=)"
    words = [" ".join([name, *places]) + default]
    split = cfg.task.get("split")
    if read := getattr(task, "reads", f"split {split}" if split else None):
        words.append(read)
    if hasattr(task, "planned_fits"):
        eps = cfg.privacy.get("eps")
        words.append(
            f"privacy {chosen.get('privacy', '')}" + (f" at eps {eps} for one {cfg.privacy.unit}" if eps else "")
        )
    return f"data: {', '.join(words)}"


def _choice(group: str, node: Any) -> str:
    chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return str(chosen.get(group) or str(node.get("_target_")).rpartition(".")[2])


def _note_place() -> None:
    """Remember where this command writes; Hydra forgets it before an interruption is reported."""
    _places.clear()
    if HydraConfig.initialized():
        known = jobs.multirun()
        folder = HydraConfig.get().runtime.output_dir if known is None else known.sweep.dir
        _places.append((f"hydra.{'run' if known is None else 'sweep'}.dir", Path(folder)))


def _objective(cfg: DictConfig, result: Any) -> Any:
    """Return the result that ``objective`` names, for a sweeper such as Optuna; without it, all results."""
    if cfg.objective is None:
        return result
    if not isinstance(result, dict) or cfg.objective not in result:
        known = ", ".join(result) if isinstance(result, dict) and result else "none"
        raise ConfigurationError(f"objective={cfg.objective} is not a result of this task. Its results: {known}.")
    return float(result[cfg.objective])


class _NoneBegins(BaseException):
    """End a multirun before its first run; otherwise Hydra would start the others and print the settings of each."""


def _together(cfg: DictConfig, *, first: bool) -> Any:
    """Return the joint cost of all runs of a multirun, for a reader and for their ledgers; the ``first`` prints it."""
    from lit_dpret.tasks.multirun import Together, cost_of_all, siblings_facts, tell_cost

    varied, runs = jobs.swept()
    if not rank_watch.is_first():
        return None
    try:
        if runs is None:
            jobs.refuse_other_proposals(cfg)
            return Together([], siblings_facts(None, varied))
        return (tell_cost if first else cost_of_all)([composed_run(cfg, run) for run in runs], varied)
    except Exception as error:  # otherwise the first run would spend budget despite an error in another
        raise _NoneBegins from error


def _one_of_many(cfg: DictConfig) -> Any:
    """Run one job of a multirun. The first prints the cost of all; none starts if one of them is invalid."""
    from lit_dpret.tasks.multirun import Outcomes
    from lit_dpret.tasks.trial import results_without_privacy

    _quieten()  # the import has re-enabled Lightning's messages
    known: Any = HydraConfig.get()
    result: Any = None
    try:
        if not _outcomes:
            _outcomes.append(Outcomes(Path(known.sweep.dir), _together(cfg, first=known.job.num == 0)))
        with _outcomes[0].known(planned=cfg.trial_of is not None):
            result = run(cfg)
        told = _objective(cfg, result)
        if isinstance(result, dict):  # a table invites choosing, and no epsilon covers a choice by these
            hidden = results_without_privacy(checked_task(cfg), build_parts(cfg).make_privacy())
            result = {name: value for name, value in result.items() if name not in hidden}
        return told
    except BaseException as error:
        result = error
        one_by_one = jobs.is_basic(known) and str(known.launcher._target_).endswith(".BasicLauncher")
        if not isinstance(error, Exception) or not one_by_one:  # `_failed` is not seen from other processes
            raise
        _failed.append(error)
        return None
    finally:
        if _outcomes:
            _outcomes[0].add(Path(cfg.run_dir), own_overrides(), result)


@hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name="train")
def _hydra_main(cfg: DictConfig) -> Any:
    if jobs.multirun() is not None:  # the other jobs still run; a failure is reported at the end
        return _one_of_many(cfg)
    try:
        return _objective(cfg, run(cfg))
    except Exception as error:
        # Hydra would print every override before the error, although the error names its subject.
        _failed.append(error)
        return None


def main() -> None:
    """Run the console entry; user errors exit with status 2 and one line."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    errors.on_command_line = True
    warnings.formatwarning = lambda message, *place, **more: f"warning: {message}\n"  # source lines do not help users
    _quieten()
    rank_watch.begin()
    interrupted = _note_interrupt()
    try:
        if sys.argv[1:2] == ["silo"]:
            silo_command(sys.argv[2:])
            return
        if (told := _answer(sys.argv[1:])) is not None:
            sys.stdout.write(f"{told}\n")
            return
        sys.argv[1:] = [quoted(argument) for argument in with_task(sys.argv[1:])]
        _failed.clear()
        _outcomes.clear()
        try:
            _hydra_main()
        finally:
            if _outcomes and rank_watch.is_first():
                _outcomes[0].tell()
        if _failed:
            raise _failed[0]
    except _NoneBegins as none:
        _end(none.__cause__ or none, interrupted())
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        _end(error, interrupted())


def _answer(words: list[str]) -> str | None:
    """Return the output for words that start no task; None for a command."""
    if words[:1] == ["list"]:
        return listing(words[1:])
    if words[:1] in ([], ["--help"], ["-h"], ["help"]):
        return format_help(program())
    if words[1:] in (["--help"], ["-h"]) and words[0] in names("task"):
        return listing([f"task={words[0]}"])
    return f"lit-dpret {lit_dpret.__version__}" if words[0] in ("--version", "version") else None


def _end(error: BaseException, interrupted: bool) -> None:
    """Exit with the status and the line that an error calls for; re-raise an error that is our own defect."""
    behind = list(causes(error))
    # Lightning turns Ctrl-C into SystemExit(1); with several ranks, one may first notice that another is gone.
    if any(isinstance(cause, KeyboardInterrupt) for cause in behind) or (
        interrupted and any(isinstance(cause, WorkerError) or lost_rank(cause) for cause in behind)
    ):
        if rank_watch.is_started_by_launcher():  # the first process reports it; another status would look like a defect
            raise SystemExit(0) from None
        _stop(f"interrupted. {_way_on()}", 130)
    if type(error).__name__ == "SIGTERMException":  # Lightning's SystemExit without a code, which would be 0
        _stop(f"ended by SIGTERM. {_way_on()}", 143)
    if not isinstance(error, Exception):
        raise error
    if any(getattr(cause, "told_by_rank", None) is not None for cause in behind):
        # The rank that failed reports the error, and may still be writing.
        rank_watch.wait_for_launcher()
        raise SystemExit(USER_ERROR) from None
    line = explain(error)
    if line is None:
        raise error
    _stop(line, USER_ERROR)


def _note_interrupt() -> Callable[[], bool]:
    """Raise KeyboardInterrupt on Ctrl-C, as Python does; return a function that says whether that happened."""
    found: list[int] = []

    def note(signum: int, frame: Any) -> None:
        found.append(signum)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # neither ignored nor another handler's
        signal.signal(signal.SIGINT, note)
    return lambda: bool(found)


def _way_on() -> str:
    for knob, folder in _places:
        if holds_a_run(folder):
            place = as_typed([f"{knob}={folder}"])
            made = any(folder.rglob("*.ckpt"))
            first = (
                "from the last checkpoint" if made else "; the interrupted work has no checkpoint yet and starts again"
            )
            return f"The same command with {place} resume=true continues{' ' * made}{first}."
    return "Nothing has started yet: run the same command again."


def _quieten() -> None:
    """Suppress library chatter in the terminal; real warnings still appear."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("lightning.pytorch", "bm25s"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # dp_accounting logs each Renyi order that it skips; epsilon is the minimum over the others.
    logging.getLogger("absl").setLevel(logging.ERROR)
    for message in (
        ".*isinstance.treespec, LeafSpec.*",
        ".*does not have many workers.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*in eval mode at the start of training.*",  # frozen towers are, by design
    ):
        warnings.filterwarnings("ignore", message=message)


def _stop(line: str, status: int) -> None:
    sys.stderr.write(f"error: {line}\n")
    raise SystemExit(status)
