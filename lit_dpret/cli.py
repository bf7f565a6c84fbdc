"""One entry point for `python train.py`, `python -m lit_dpret` and `lit-dpret`.

This is the only module that knows Hydra. It composes the configuration, hands a task the means to
build what it needs, and turns what a user can cause into one line and a non-zero exit.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from hydra.utils import get_class, get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

import lit_dpret
from lit_dpret import errors
from lit_dpret.config import CONFIG_MODULE, STUDIES, format_choices, format_help, groups, names, top_level
from lit_dpret.distributed import rank_watch
from lit_dpret.errors import ConfigurationError, LitDpretError, WorkerError
from lit_dpret.tasks.parts import ComposedRun, Parts, as_typed
from lit_dpret.tasks.silo_command import silo_command
from lit_dpret.tasks.stages import holds_a_run

USER_ERROR = 2
_POSITIONAL = {"compare": ("run_a", "run_b"), "verify": ("card",), "audit": ("run",), "sweep": ("file",)}
_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
_SETTING = re.compile(r"((?:\+\+?|~)?[A-Za-z_][\w./@:-]*)=(.*)", re.DOTALL)
_LARGEST_SEED = 2**32 - 1
_MAY_CHANGE = {  # when a fit goes on: how fast it goes, and where files lie
    "physical_batch_size", "num_workers", "gradient_checkpointing", "grad_cache_rows", "cache_dir", "passage_cache_dir",
    "secret_file", "dataset_ledger", "total_eps", "folder", "root", "pairs", "queries",
    "corpus", "qrels", "path", "file",
}  # fmt: skip
_places: list[tuple[str, Path]] = []  # the setting and the folder of the command that runs
_failed: list[Exception] = []  # what ended it
_outcomes: list[Any] = []  # of a multirun: what its runs in this process have come to
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)
OmegaConf.register_new_resolver("new_name", rank_watch.new_name, use_cache=True, replace=True)
OmegaConf.register_new_resolver("job_name", lambda number: _job_name(int(number)), replace=True)


class _Studies(SearchPathPlugin):
    """Let Hydra find the studies' choices where their folder stands beside the package, which is in a clone."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if STUDIES.is_dir():
            search_path.append("reproduction", f"file://{STUDIES}")


Plugins.instance().register(_Studies)


def build_parts(cfg: DictConfig) -> Parts:
    """The means to build every piece of a run, each only when it is asked for."""

    def node(name: str, **extra: Any) -> Any:
        # Hydra takes a dataclass for a configuration and would hand on a DictConfig: those are given afterwards.
        ready = {key: value for key, value in extra.items() if is_dataclass(value)}
        rest = {key: value for key, value in extra.items() if key not in ready}
        _check_numbers(cfg[name], name)
        with _plain_refusals():
            if not ready:
                return instantiate(cfg[name], **rest)
            return instantiate(cfg[name], _partial_=True, **rest)(**ready)

    def outline(**extra: Any) -> Any:
        target = str(cfg.model._target_)
        if not hasattr(get_class(target), "outline"):
            raise ConfigurationError(
                f"The formulas know encoder-decoder models (model=generator), and {target.rpartition('.')[2]} is none."
            )
        return node("model", _target_=f"{target}.outline", **extra)

    def listed(name: str) -> list[Any]:
        chosen = cfg.get(name) or {}
        return [instantiate(item) for item in chosen.values() if item is not None]

    return Parts(
        run_dir=Path(cfg.run_dir),
        resume=bool(cfg.resume),
        seed=cfg.seed,
        make_privacy=partial(node, "privacy"),
        make_datamodule=partial(node, "datamodule"),
        make_module=partial(node, "model", **_start(cfg)),
        make_outline=outline,
        make_trainer=partial(node, "trainer", _convert_="all"),
        make_callbacks=partial(listed, "callbacks"),
        make_loggers=partial(listed, "logger"),
        make_canaries=lambda: None if cfg.get("canaries") is None else node("canaries"),
        make_federation=lambda: None if cfg.get("federated") is None else node("federated", _convert_="all"),
        make_run=partial(_composed, cfg),
        trained_settings=partial(_trained_settings, cfg),
        trial_of=None if cfg.trial_of is None else Path(cfg.trial_of),
        command=" ".join([_program(), as_typed(_shown_overrides())]).strip(),
    )


def _check_numbers(node: Any, place: str) -> None:
    """Refuse a text or a truth value where a constructor takes nothing but numbers; Python would take true for 1."""
    found: Any = OmegaConf.to_container(node, resolve=True)

    def check(node: Any, place: str) -> None:
        if not isinstance(node, dict):
            return
        try:
            made: Any = get_object(node["_target_"]) if "_target_" in node else lambda: None
            # A constructor hands on to its base what it takes as **budget.
            bases = reversed(made.__mro__) if isinstance(made, type) else ()
            makers: list[Any] = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)] or [made]
            parameters = {name: one for maker in makers for name, one in signature(maker).parameters.items()}
        except (ImportError, AttributeError, TypeError, ValueError, HydraException):
            parameters = {}  # whoever makes it says what is wrong
        for key, value in node.items():
            kinds = str(parameters[key].annotation).split(" | ") if key in parameters else []
            if isinstance(value, bool | str) and kinds and set(kinds) <= {"int", "float", "None"} and value != "???":
                shown = str(value).lower() if isinstance(value, bool) else repr(value)
                raise ConfigurationError(f"{place}.{key}={shown} is no number, and a number belongs there.")
            check(value, f"{place}.{key}")

    check(found, place)


def _trained_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return by full name the settings that decide what a fit trains, and not how fast or from which folder."""
    found: dict[str, Any] = {"seed": cfg.seed}

    def add(node: Any, place: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                add(value, f"{place}.{key}")
            elif key not in _MAY_CHANGE:
                moved = key in ("pretrained", "encoder") and isinstance(value, str)  # a folder may lie elsewhere now
                found[place if key == "_target_" else f"{place}.{key}"] = Path(value).name if moved else value

    for group in ("model", "datamodule", "privacy"):
        add(OmegaConf.to_container(cfg[group], resolve=True), group)
    add({name: cfg.trainer[name] for name in ("max_steps", "max_epochs") if name in cfg.trainer}, "trainer")
    return found


def _composed(cfg: DictConfig, overrides: Sequence[str]) -> ComposedRun:
    """Another run with ``overrides``; of the run that asks only the folder goes into it, where they name none."""
    folder = str(cfg.run_dir).replace("\\", "\\\\").replace("'", "\\'")
    wanted = [f"run_dir='{folder}'", *overrides]
    try:
        if GlobalHydra.instance().is_initialized():
            other = compose("train", overrides=wanted)
        else:
            with initialize_config_module(version_base="1.3", config_module=CONFIG_MODULE):
                other = compose("train", overrides=wanted)
    except (HydraException, OmegaConfBaseException) as error:
        unknown = _UNKNOWN_KEY.search(str(error))
        why = f"{unknown.group(1)} is not a setting" if unknown else str(error).strip().splitlines()[0]
        raise ConfigurationError(f"{why} (in {' '.join(overrides)}).") from error

    def describe(groups: Sequence[str]) -> str:
        plain = {
            name: OmegaConf.to_container(other[name], resolve=True) for name in groups if other.get(name) is not None
        }
        return json.dumps(plain, sort_keys=True, default=str)

    def make() -> tuple[Any, Parts]:
        with _plain_refusals():
            return checked_task(other), build_parts(other)

    return ComposedRun(describe, make)


@contextmanager
def _plain_refusals() -> Iterator[None]:
    """Raise what Hydra wrapped, where it is a refusal of ours: a task knows those, and not Hydra."""
    try:
        yield
    except HydraException as error:
        refusal = next((cause for cause in _causes(error) if isinstance(cause, LitDpretError)), None)
        if refusal is None:
            raise
        raise refusal from error


def _start(cfg: DictConfig) -> dict[str, str]:
    """The model setting that ``init_from`` stands for."""
    if cfg.init_from is None:
        if cfg.init_from_is_public:
            raise ConfigurationError("init_from_is_public=true says something about init_from, which is null.")
        return {}
    if not Path(cfg.init_from).expanduser().is_dir():
        raise ConfigurationError(
            f"init_from={cfg.init_from} is no folder: it takes a run or its model/. For a model of the hub set "
            "model.pretrained or model.encoder."
        )
    key = next((key for key in ("pretrained", "encoder") if key in cfg.model), None)
    if key is None:
        raise ConfigurationError(
            f"init_from={cfg.init_from}: {cfg.model._target_} has neither pretrained nor encoder, so it cannot start "
            "from a saved model."
        )
    from lit_dpret.cards.start import model_folder

    return {key: str(model_folder(cfg.init_from))}


def checked_task(cfg: DictConfig) -> Any:
    """The task of a composed configuration, which takes everything that is chosen beside it.

    Raises:
        ConfigurationError: It does nothing with what is chosen.
    """
    task = instantiate(cfg.task, _convert_="all")
    if cfg.get("canaries") is not None and not getattr(task, "takes_canaries", False):
        raise ConfigurationError("canaries are planted by task=fit; task=canaries has its own, task.canaries.")
    if cfg.get("federated") is not None and not getattr(task, "takes_federation", False):
        raise ConfigurationError("federated= describes a federation, and this task trains none. Add task=federated.")
    if cfg.get("federated") is not None and (ledger := cfg.privacy.get("dataset_ledger")) is not None:
        raise ConfigurationError(
            f"privacy.dataset_ledger={ledger} counts no federation: each silo counts its rounds in its own ledger, and "
            "without federated.privacy.eps nothing is counted. Leave it out, and set federated.privacy.eps."
        )
    if cfg.init_from is not None and not getattr(task, "takes_start", False):
        raise ConfigurationError(
            f"init_from={cfg.init_from} is for task=fit, plan and doctor: no other task starts from a run's model."
        )
    return task


def _check_top_level(cfg: DictConfig) -> None:
    """Refuse what no task reads: a setting that was added with ``+`` and is named nowhere, and a seed that is none."""
    known = {key.name for key in top_level().keys} | set(groups())
    text = OmegaConf.to_yaml(cfg, resolve=False)
    added = {o.lstrip("+").split("=")[0].split(".")[0] for o in _own_overrides() if o.startswith("+")}
    for name in sorted((set(map(str, cfg)) & added) - known):
        if not re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", text):  # ${name} or, among others, ${oc.select:name}
            raise ConfigurationError(f"{_explain_unknown_key(name)} Nothing reads what +{name} adds.")
    if isinstance(cfg.seed, bool) or not isinstance(cfg.seed, int) or not 0 <= cfg.seed <= _LARGEST_SEED:
        raise ConfigurationError(f"seed={cfg.seed!r} is not a whole number from 0 to {_LARGEST_SEED}.")


def run(cfg: DictConfig) -> Any:
    """Run the task of a composed configuration."""
    _check_top_level(cfg)
    task = checked_task(cfg)
    _quieten()  # the task has imported Lightning, which turns its messages on again
    if (started := rank_watch.world_size()) > 1 and not getattr(task, "takes_ranks", False):
        raise ConfigurationError(
            f"{started} processes were started for a task that one process does. Start it without torchrun or srun."
        )
    _note_place()
    _begin_what_is_left(cfg)
    parts = build_parts(cfg)
    parts = replace(parts, make_datamodule=_named_first(parts.make_datamodule, _data_line(cfg, task)))
    trial = None
    if cfg.objective is not None:
        from lit_dpret.tasks.trial import refuse_unprivate_choice

        refuse_unprivate_choice(task, parts.make_privacy(), cfg.objective, knob="objective")
    if cfg.trial_of is not None:
        from lit_dpret.tasks.trial import TrialOf

        trial = TrialOf(cfg.trial_of, task, parts)
    if cfg.objective is not None:
        from lit_dpret.tasks.trial import refuse_private_objective

        sweep = None if trial is None else trial.sweep
        if refuse_private_objective(task, parts.make_callbacks(), cfg.objective, sweep):
            _close_sweep()
    many = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if many or cfg.objective is not None:
        from lit_dpret.tasks.trial import refuse_other_choice

        refuse_other_choice(task, parts, cfg.objective, _swept()[0] if many else ())
    before = dict(os.environ)
    with _one_job():
        try:
            result = task.run(parts)
        finally:
            rank_watch.leave(before)
    if trial is not None:
        trial.finish(_own_overrides(), result)
    return result


def _named_first(make: Callable[..., Any], line: str) -> Callable[..., Any]:
    """Return ``make``, which prints ``line`` when it is called first: no task measures data that it did not name."""
    lines = [line] if rank_watch.is_first() else []

    def made(**extra: Any) -> Any:
        if lines:
            sys.stderr.write(f"{lines.pop()}\n")
        return make(**extra)

    return made


def _data_line(cfg: DictConfig, task: Any) -> str:
    """Say which data a task reads and, where it trains, what it will promise to whom."""
    given = {word.lstrip("+").split("=")[0] for word in _own_overrides()}
    chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    node = cfg.datamodule
    places = [str(node[key]) for key in ("name", "folder", "pairs", "queries", "path", "hub") if node.get(key)]
    name = chosen.get("datamodule") or str(node.get("_target_")).rpartition(".")[2]
    default = "" if given & {"datamodule", "experiment"} else " (the default; choose another with datamodule=)"
    words = [" ".join([name, *places]) + default]
    if split := cfg.task.get("split"):
        words.append(f"split {split}")
    if hasattr(task, "planned_fits"):
        eps = cfg.privacy.get("eps")
        words.append(
            f"privacy {chosen.get('privacy', '')}" + (f" at eps {eps} for one {cfg.privacy.unit}" if eps else "")
        )
    return f"data: {', '.join(words)}"


def _note_place() -> None:
    """Remember where this command writes; Hydra forgets it before an interruption is reported."""
    _places.clear()
    if HydraConfig.initialized():
        known: Any = HydraConfig.get()
        many = known.mode == RunMode.MULTIRUN
        folder = known.sweep.dir if many else known.runtime.output_dir
        _places.append((f"hydra.{'sweep' if many else 'run'}.dir", Path(folder)))


def _close_sweep() -> None:
    """Let only its owner into the folder of a multirun, before its sweeper has a score to write there."""
    known: Any = HydraConfig.get() if HydraConfig.initialized() else None
    if known is not None and known.mode == RunMode.MULTIRUN:
        folder = Path(known.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def _begin_what_is_left(cfg: DictConfig) -> None:
    """Under ``-m``, let ``resume=true`` begin those jobs that an interrupted multirun had not come to."""
    known: Any = HydraConfig.get() if HydraConfig.initialized() else None
    if known is None or known.mode != RunMode.MULTIRUN or not cfg.resume:
        return
    if holds_a_run(Path(known.sweep.dir)) and not holds_a_run(Path(cfg.run_dir)):
        with read_write(cfg):
            cfg.resume = False


@contextmanager
def _one_job() -> Iterator[None]:
    """Let the ranks that Lightning starts repeat this job of a multirun, not the whole multirun, in its folder."""
    known: Any = HydraConfig.get() if HydraConfig.initialized() else None
    if known is None or known.mode != RunMode.MULTIRUN:
        yield
        return
    before = sys.argv
    options = [a for a in before[1:] if "=" not in a and a not in ("-m", "--multirun")]
    with read_write(known), open_dict(known):
        known.run.dir = known.runtime.output_dir
    sys.argv = [before[0], *options, *known.overrides.task]
    try:
        yield
    finally:
        sys.argv = before


def _objective(cfg: DictConfig, result: Any) -> Any:
    """Return the result that ``objective`` names, for a sweeper such as Optuna, or all of them."""
    if cfg.objective is None:
        return result
    if not isinstance(result, dict) or cfg.objective not in result:
        known = ", ".join(result) if isinstance(result, dict) and result else "none"
        raise ConfigurationError(f"objective={cfg.objective} is no result of this task. Its results: {known}.")
    return float(result[cfg.objective])


def _own_overrides() -> list[str]:
    """The settings of this run; of one job of many under ``-m``."""
    if HydraConfig.initialized():
        return list(HydraConfig.get().overrides.task)
    return _shown_overrides()


def _swept() -> tuple[list[str], list[list[str]] | None]:
    """Return the names that ``-m`` varies, and each run's settings; None for these where a sweeper chooses them."""
    known: Any = HydraConfig.get()
    params = [f"{name}={value}" for name, value in (known.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    found = parser.parse_overrides([*params, *(a for a in sys.argv[1:] if "=" in a and a[:1] != "-")])
    found = [one for one in found if not re.match("hydra[./]", one.key_or_group)]
    runs = None
    if known.sweeper._target_.endswith(".BasicSweeper"):
        runs = BasicSweeper.split_arguments(found, None)[0]
    return [one.get_key_element() for one in found if one.is_sweep_override()], runs


def _job_name(number: int) -> str:
    """Name the folder of a job: its number, which is unique, and a word for each setting that is varied."""
    names, _ = _swept()
    given = dict(setting.partition("=")[::2] for setting in HydraConfig.get().overrides.task)

    def plain(text: str) -> str:
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:24]

    words = [f"{plain(name.rpartition('.')[2])}_{plain(given.get(name, ''))}" for name in names]
    return "-".join([str(number), *words])[:64].rstrip("-.")


def _one_of_many(cfg: DictConfig) -> Any:
    """Run one job of a multirun: before the first, tell what all cost; none begins where one of them cannot be made."""
    from lit_dpret.tasks.multirun import Outcomes, tell_cost

    _quieten()  # the import has let Lightning speak again
    known: Any = HydraConfig.get()
    result: Any = None
    try:
        if _failed:
            raise _failed[0]
        varied, runs = _swept()
        if known.job.num == 0 and rank_watch.is_first() and runs is not None:
            try:
                tell_cost([_composed(cfg, run) for run in runs], varied)
            except LitDpretError as error:
                _failed.append(error)
                raise
        if not _outcomes:
            _outcomes.append(Outcomes(Path(known.sweep.dir)))
        result = run(cfg)
        return _objective(cfg, result)
    except BaseException as error:
        result = error
        raise
    finally:
        if _outcomes:
            _outcomes[0].add(Path(cfg.run_dir), _own_overrides(), result)


@hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name="train")
def _hydra_main(cfg: DictConfig) -> Any:
    if HydraConfig.get().mode == RunMode.MULTIRUN:  # the other jobs run, and Hydra tells of one that failed at the end
        return _one_of_many(cfg)
    try:
        return _objective(cfg, run(cfg))
    except Exception as error:
        # Hydra would print every override before the error, whose line says what it is about.
        _failed.append(error)
        return None


def main() -> None:
    """Console entry; exits with status 2 and one line on what a user can mend."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    errors.on_command_line = True
    _quieten()
    rank_watch.begin()
    interrupted = _note_interrupt()
    try:
        if sys.argv[1:2] == ["silo"]:
            silo_command(sys.argv[2:])
            return
        if sys.argv[1:2] == ["list"]:
            sys.stdout.write(f"{listing(sys.argv[2:])}\n")
            return
        if sys.argv[1:2] in (["--help"], ["-h"]):
            sys.stdout.write(f"{format_help(_program())}\n")
            return
        if sys.argv[1:2] == ["--version"]:
            sys.stdout.write(f"lit-dpret {lit_dpret.__version__}\n")
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
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        # Lightning answers Ctrl-C by SystemExit(1); on several ranks one may first notice that another is gone.
        causes = list(_causes(error))
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes) or (
            interrupted() and any(isinstance(cause, WorkerError) or _lost_rank(cause) for cause in causes)
        ):
            if rank_watch.is_started_by_launcher():  # the first process tells it, and takes another status for a defect
                raise SystemExit(0) from None
            _stop(f"interrupted. {_way_on()}", 130)
        if type(error).__name__ == "SIGTERMException":  # Lightning's SystemExit without a code, which would be 0
            _stop(f"ended by SIGTERM. {_way_on()}", 143)
        if not isinstance(error, Exception):
            raise
        told_elsewhere = any(getattr(cause, "told_by_rank", None) is not None for cause in _causes(error))
        if told_elsewhere:  # by the rank that it happened on, which may still be writing what it has to
            rank_watch.wait_for_launcher()
            raise SystemExit(USER_ERROR) from None
        line = explain(error)
        if line is None:
            raise
        _stop(line, USER_ERROR)


def _note_interrupt() -> Callable[[], bool]:
    """Raise KeyboardInterrupt on Ctrl-C, as Python does; returns what tells whether there was one."""
    found: list[int] = []

    def note(signum: int, frame: Any) -> None:
        found.append(signum)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # neither ignored nor somebody else's
        signal.signal(signal.SIGINT, note)
    return lambda: bool(found)


def _way_on() -> str:
    """Say how a command that was ended goes on."""
    for knob, folder in _places:
        if holds_a_run(folder):
            place = as_typed([f"{knob}={folder}"])
            return f"The same command with {place} resume=true goes on from the last checkpoint."
    return "Nothing was begun yet: the same command starts it."


def listing(arguments: list[str]) -> str:
    """``lit-dpret list`` and ``lit-dpret list GROUP``: what can be chosen.

    Raises:
        ConfigurationError: There is no such group, or more than one was named.
    """
    if len(arguments) > 1:
        raise ConfigurationError(f"list takes one group of settings at most, not {' '.join(arguments)}.")
    return format_choices(arguments[0] if arguments else None)


def with_task(arguments: list[str]) -> list[str]:
    """``doctor privacy.eps=3`` as ``task=doctor privacy.eps=3``; a word that names no task is refused.

    Example:
        >>> with_task(["plan", "privacy.eps=3"])
        ['task=plan', 'privacy.eps=3']
        >>> with_task(["compare", "runs/a", "runs/b", "task.level=0.9"])
        ['task=compare', "task.run_a='runs/a'", "task.run_b='runs/b'", 'task.level=0.9']
        >>> with_task(["verify", "runs/a"])
        ['task=verify', "task.card='runs/a'"]

    Raises:
        ConfigurationError: The first argument is neither a setting, nor an option, nor a task, or ``compare`` is
            not followed by two runs, ``verify`` by one card, ``audit`` by one run or ``sweep`` by one file; or a
            setting is written as an option.
    """
    for argument in arguments:
        name = argument.lstrip("-").split("=")[0]
        if (
            argument.startswith("-")
            and "=" in argument
            and name.split(".")[0] in {*groups(), *(key.name for key in top_level().keys)}
        ):
            raise ConfigurationError(f"{argument} is no option: a setting has no dashes, {argument.lstrip('-')}.")
    if not arguments or "=" in arguments[0] or arguments[0][:1] in "-+~":
        return arguments
    tasks = names("task")
    if arguments[0] not in tasks:
        words = ", ".join([*tasks, "list", "silo"])
        raise ConfigurationError(f"{arguments[0]!r} is neither a setting (name=value) nor a task: {words}.")
    knobs = _POSITIONAL.get(arguments[0], ())
    return [f"task={arguments[0]}", *_by_place(arguments[0], knobs, arguments[1:])]


def quoted(argument: str) -> str:
    """Return a setting with its value in quotes, where it is a plain text that Hydra's grammar does not take.

    Example:
        >>> quoted("datamodule.pairs=my log.jsonl"), quoted("task.card=a=b"), quoted("privacy.eps=3")
        ("datamodule.pairs='my log.jsonl'", "task.card='a=b'", 'privacy.eps=3')
    """
    found = _SETTING.fullmatch(argument)
    if found is None or set(found[2]) & set("'\"{}[](),$"):  # lists, mappings, sweeps and references are Hydra's
        return argument
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        value = re.sub(r"\\+\Z", lambda run: run[0] * 2, found[2])  # only there they are escapes
        return f"{found[1]}='{value}'"
    return argument


def _by_place(task: str, knobs: tuple[str, ...], arguments: list[str]) -> list[str]:
    """``RUN_A RUN_B ...`` as settings of a task that takes them; all by place, or all by name."""
    given = list(takewhile(lambda argument: "=" not in argument and argument[:1] not in "-+~", arguments))
    if knobs and len(given) not in (0, len(knobs)):
        words = " ".join(knob.upper() for knob in knobs)
        raise ConfigurationError(
            f"{task} takes {words} and then settings, not {len(given)} words: lit-dpret {task} {words}. A path that "
            f"holds '=' goes in as task.{knobs[0]}='PATH'."
        )
    if not knobs:
        return arguments
    quoted = [path.replace("\\", "\\\\").replace("'", "\\'") for path in given]
    return [f"task.{knob}='{path}'" for knob, path in zip(knobs, quoted, strict=False)] + arguments[len(given) :]


def _quieten() -> None:
    """Leave the terminal to what the user asked for; what goes wrong is still said."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("lightning.pytorch", "bm25s"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # dp_accounting says of each Renyi order that it leaves out that it does; epsilon is the least of the others.
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


def explain(error: BaseException) -> str | None:
    """One line for what a user can cause; None for a defect of ours, which keeps its traceback."""
    for cause in _causes(error):
        if isinstance(cause, LitDpretError):
            return str(cause)
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            file = cause.filename2 or cause.filename or "no file named"  # of two, the second is written to
            return f"the disk is full ({file}). Free space, then resume=true."
        if isinstance(cause, OSError) and cause.errno == errno.EEXIST and Path(cause.filename or "").is_file():
            return f"{cause.filename} is a file, and a folder is needed there. Choose another hydra.run.dir."
        if isinstance(cause, OSError) and cause.errno in _CANNOT_WRITE and cause.filename:
            return f"{cause.filename}: {cause.strerror}. Choose another hydra.run.dir, or mend the permissions."
        if isinstance(cause, RuntimeError) and "PytorchStreamWriter" in str(cause):
            return "a checkpoint could not be written (is the disk full?). Free space, then resume=true."
        if (lost := _lost_rank(cause)) is not None:
            return str(lost)
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _explain_composition(error)
    return None


def _lost_rank(error: BaseException) -> WorkerError | None:
    """Return the error behind a broken connection between ranks; a command that never loaded them has none."""
    ranks = sys.modules.get("lit_dpret.distributed.ranks")
    found: WorkerError | None = None if ranks is None else ranks.lost_rank(error)
    return found


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _explain_composition(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read as a setting: write its value in quotes, \"name='VALUE'\"."
    unknown = _UNKNOWN_KEY.search(text)
    if unknown:
        return _explain_unknown_key(unknown.group(1))
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        return f"{missing.group(1)} must be given on the command line."
    choice = re.search(r"Could not find '([^']+)/([^']+)'", text)
    if choice:
        group, name = choice.groups()
        return f"{group}={name} does not exist. Choose one of {', '.join(names(group))}."
    if text.startswith("Error in call to target") and error.__cause__ is not None:  # what a constructor choked on
        where, cause = re.search(r"full_key: (\S+)", text), " ".join(str(error.__cause__).split()).rstrip(".!")
        place = where.group(1) if where else "a part of the configuration"
        if place == "trainer" and re.search("gpu|cuda|tpu|accelerator", cause, re.IGNORECASE):
            return f"trainer cannot be made: {cause}. Choose a trainer.accelerator that is here, or trainer=cpu."
        return f"{place} cannot be made: {cause}."
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return first.strip()


def _composed_again(without: str = "") -> DictConfig:
    """Return the configuration of this command, to explain what is wrong with it."""
    overrides = [o for o in _shown_overrides() if o.split("=")[0].lstrip("+~") not in (without, "hydra.run.dir")]
    GlobalHydra.instance().clear()
    with initialize_config_module(version_base="1.3", config_module=CONFIG_MODULE):
        return compose("train", overrides=overrides)


def _explain_unknown_key(key: str) -> str:
    group, _, name = key.rpartition(".")
    try:
        cfg = _composed_again(without=key)
        node: Any = OmegaConf.select(cfg, group) if group else cfg
        known = sorted(str(k) for k in node if not str(k).startswith("_"))
    except Exception:
        return f"{key} is not a setting."
    where = f"of {group}" if group else "at the top"
    return f"{key} is not a setting: there is no {name!r} {where}. Settings {where}: {', '.join(known) or 'none'}."


def _program() -> str:
    """Return how this program was called, as it is typed: only a clone has ``train.py``."""
    called = {"train.py": "python train.py", "__main__.py": "python -m lit_dpret"}
    return called.get(Path(sys.argv[0]).name, "lit-dpret")


def _shown_overrides() -> list[str]:
    return [argument for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
