"""Turn a composed configuration into a task and factories for its parts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import is_dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin

from hydra import compose, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, InstantiationException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import get_class, get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lit_dpret.cli.arguments import own_overrides, program, shown_overrides
from lit_dpret.cli.explanations import UNKNOWN_KEY, causes, explain_unknown_key
from lit_dpret.config import CONFIG_MODULE, STUDIES, choices, groups, top_level
from lit_dpret.distributed import rank_watch
from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.settings import is_number, is_whole
from lit_dpret.tasks.parts import ComposedRun, Parts, as_typed, check_output
from lit_dpret.tasks.resumed_settings import LENGTHS, trained_settings

_LARGEST_SEED = 2**32 - 1
_MODEL_FILES = ("config.json", "modules.json", "net.json", "weights.pt")  # every save_model writes one of these


class _Studies(SearchPathPlugin):
    """Let Hydra find the studies' choices if their folder is next to the package, as in a clone."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if STUDIES.is_dir():
            search_path.append("reproduction", f"file://{STUDIES}")


Plugins.instance().register(_Studies)


def check_types(node: Any, place: str) -> None:
    """Refuse a value whose type the constructor's annotation rules out: Python takes true for 1, any text for true."""
    found: Any = OmegaConf.to_container(node, resolve=True)

    def check(node: Any, place: str) -> None:
        if not isinstance(node, dict):
            return
        try:
            made: Any = get_object(node["_target_"]) if "_target_" in node else lambda: None
            # A constructor may pass its ``**kwargs`` on to its base.
            bases = reversed(made.__mro__) if isinstance(made, type) else ()
            makers: list[Any] = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)] or [made]
            parameters = {name: one for maker in makers for name, one in signature(maker).parameters.items()}
        except (ImportError, AttributeError, TypeError, ValueError, HydraException):
            parameters = {}  # instantiation reports the problem
        for key, value in node.items():
            if key in parameters and value != "???":
                check_type(f"{place}.{key}", value, parameters[key].annotation)
            check(value, f"{place}.{key}")

    check(found, place)


def check_type(name: str, value: Any, annotation: Any) -> None:
    """Refuse a value if the annotation allows only numbers, booleans, texts, lists or mappings, and it is none of
    these.
    """
    kinds = _kinds(annotation) - {"None", "NoneType"}
    outputs = kinds & {"OutputFile", "OutputFolder"}
    kinds = kinds - outputs | ({"Path"} if outputs else set())
    if value is None or not kinds or (isinstance(value, dict) and "_target_" in value):  # an object, built later
        return
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    lists, mappings = ("Sequence[", "list[", "tuple["), ("Mapping[", "dict[")
    if kinds <= {"int", "float"} and not is_number(value):
        raise ConfigurationError(f"{name}={shown} must be a number.")
    if kinds == {"int"} and isinstance(value, float) and not value.is_integer():
        raise ConfigurationError(f"{name}={shown} must be an integer.")
    if kinds == {"bool"} and not isinstance(value, bool):
        raise ConfigurationError(f"{name}={shown} must be true or false.")
    if kinds <= {"str", "Path"} and isinstance(value, list | dict):
        raise ConfigurationError(f"{name}={shown} must be a single string.")
    if kinds <= {"str", "Path"} and "Path" in kinds and isinstance(value, bool | int | float):
        raise ConfigurationError(f"{name}={shown} must be a path. Write it in quotes: \"{name}='{value}'\".")
    if outputs and isinstance(value, str):
        check_output(name, value, folder="OutputFolder" in outputs)
    if all(kind.startswith(lists) for kind in kinds) and not isinstance(value, list):
        one = f": {name}=[{value}]" if isinstance(value, bool | int | float | str) else ""
        raise ConfigurationError(f"{name}={shown} must be a list{one}.")
    if all(kind.startswith(mappings) for kind in kinds) and not isinstance(value, dict):
        raise ConfigurationError(f"{name}={shown} must be a mapping: '{name}={{NAME: VALUE}}'.")


def _kinds(annotation: Any) -> set[str]:
    if not isinstance(annotation, str):
        several = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        return {one.__name__ if isinstance(one, type) else str(one) for one in several}
    return set(re.split(r" \| (?![^\[]*\])", annotation))  # bars inside brackets belong to the element type


def build_parts(cfg: DictConfig) -> Parts:
    """Return factories for every part of a run, each called on demand."""

    def node(name: str, **extra: Any) -> Any:
        # Hydra would turn a dataclass into a DictConfig: existing ones are passed after instantiation, and "all" keeps
        # those that Hydra itself instantiates.
        ready = {
            key: value
            for key, value in extra.items()
            if any(map(is_dataclass, value if isinstance(value, list) else [value]))
        }
        rest = {key: value for key, value in extra.items() if key not in ready}
        check_types(cfg[name], name)
        with _plain_refusals():
            if not ready:
                return instantiate(cfg[name], **rest, _convert_="all")
            made = instantiate(cfg[name], _partial_=True, **rest, _convert_="all")
            try:
                return made(**ready)
            except Exception as error:  # use the wording of Hydra's own call errors
                target = cfg[name]._target_
                raise InstantiationException(f"Error in call to target '{target}'\nfull_key: {name}") from error

    def outline(**extra: Any) -> Any:
        target = str(cfg.model._target_)
        if not hasattr(get_class(target), "outline"):
            raise ConfigurationError(
                "The cost formulas support encoder-decoder models only (model=generator), not "
                f"{target.rpartition('.')[2]}."
            )
        return node("model", _target_=f"{target}.outline", **extra)

    def listed(name: str, run_dir: Path | None = None) -> list[Any]:
        found = cfg
        if run_dir is not None:  # a stage of the run has its own folder for its card
            found = deepcopy(cfg)
            with open_dict(found):
                found.run_dir = str(run_dir)
        chosen = found.get(name) or {}
        for key, item in chosen.items():
            if item is not None:
                check_types(item, f"{name}.{key}")
        return [instantiate(item, _convert_="all") for item in chosen.values() if item is not None]

    return Parts(
        run_dir=Path(cfg.run_dir),
        resume=bool(cfg.resume),
        seed=cfg.seed,
        make_privacy=partial(node, "privacy"),
        make_datamodule=partial(node, "datamodule"),
        make_module=partial(node, "model", **_start(cfg)),
        make_outline=outline,
        make_trainer=partial(node, "trainer"),
        make_callbacks=partial(listed, "callbacks"),
        make_loggers=partial(listed, "logger"),
        make_canaries=lambda: None if cfg.get("canaries") is None else node("canaries"),
        make_federation=lambda: None if cfg.get("federated") is None else node("federated"),
        make_run=partial(composed_run, cfg),
        trained_settings=lambda: trained_settings(_plain_settings(cfg)),
        trial_of=None if cfg.trial_of is None else Path(cfg.trial_of),
        start={name: cfg[name] for name in ("init_from", "init_from_is_public")},
        command=" ".join([program(), as_typed(shown_overrides())]).strip(),
    )


def _plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return the groups that determine what a fit trains, resolved."""
    plain: dict[str, Any] = {"seed": cfg.seed}
    plain |= {group: OmegaConf.to_container(cfg[group], resolve=True) for group in ("model", "datamodule", "privacy")}
    return plain | {"trainer": {name: cfg.trainer[name] for name in LENGTHS if name in cfg.trainer}}


def composed_run(cfg: DictConfig, overrides: Sequence[str]) -> ComposedRun:
    """Compose another run with ``overrides``; it inherits only the folder of this run, unless they name one."""
    folder = str(cfg.run_dir).replace("\\", "\\\\").replace("'", "\\'")
    wanted = [f"run_dir='{folder}'", *overrides]
    try:
        if GlobalHydra.instance().is_initialized():
            other = compose("train", overrides=wanted)
        else:
            with initialize_config_module(version_base="1.3", config_module=CONFIG_MODULE):
                other = compose("train", overrides=wanted)
    except (HydraException, OmegaConfBaseException) as error:
        unknown = UNKNOWN_KEY.search(str(error))
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
    """Raise our own error if Hydra wrapped one; tasks do not know Hydra's."""
    try:
        yield
    except HydraException as error:
        refusal = next((cause for cause in causes(error) if isinstance(cause, LitDpretError)), None)
        if refusal is None:
            raise
        raise refusal from error


def _start(cfg: DictConfig) -> dict[str, str]:
    if cfg.init_from is None:
        if cfg.init_from_is_public:
            raise ConfigurationError(
                "init_from_is_public=true describes init_from, which is null. Set init_from, or leave both out."
            )
        return {}
    if not Path(cfg.init_from).expanduser().is_dir():
        raise ConfigurationError(
            f"init_from={cfg.init_from} is not a folder: it takes a run or its model/. For a model from the "
            "Hugging Face Hub set model.pretrained or model.encoder."
        )
    key = next((key for key in ("pretrained", "encoder") if key in cfg.model), None)
    if key is None:
        raise ConfigurationError(
            f"init_from={cfg.init_from}: {cfg.model._target_} has neither pretrained nor encoder, so it cannot start "
            "from a saved model. Leave init_from out, or choose another model."
        )
    from lit_dpret.cards.start import model_folder

    folder = model_folder(cfg.init_from)
    if not any((folder / name).is_file() for name in _MODEL_FILES):
        raise ConfigurationError(
            f"init_from={cfg.init_from} holds no model (none of {', '.join(_MODEL_FILES)} in {folder}): it takes a run "
            "that trained one, or its model/."
        )
    return {key: str(folder)}


def checked_task(cfg: DictConfig) -> Any:
    """Return the task of a composed configuration, which must accept every chosen group."""
    if missing := sorted(OmegaConf.missing_keys(cfg.task)):  # checked before the task's slow imports
        raise ConfigurationError(_lacking(cfg, missing))
    if sys.stderr.isatty() and rank_watch.is_first() and "torch" not in sys.modules:  # not in a log
        sys.stderr.write("lit-dpret: loading ...\n")
    check_types(cfg.task, "task")
    task = instantiate(cfg.task, _convert_="all")
    if cfg.get("canaries") is not None and not getattr(task, "takes_canaries", False):
        raise ConfigurationError("canaries are for task=fit, fit_scored and plan. Leave canaries out, or set task=fit.")
    if cfg.get("federated") is not None and not getattr(task, "takes_federation", False):
        raise ConfigurationError(
            "federated= describes a federation, which this task does not use. Leave it out, or set task=federated."
        )
    if cfg.get("federated") is not None and (ledger := cfg.privacy.get("dataset_ledger")) is not None:
        raise ConfigurationError(
            f"privacy.dataset_ledger={ledger} does not count a federation: each silo counts its rounds in its own "
            "ledger, and only with federated.privacy.eps. Leave it out, and set federated.privacy.eps."
        )
    if cfg.init_from is not None and not getattr(task, "takes_start", False):
        raise ConfigurationError(
            f"init_from={cfg.init_from} is for task=fit, fit_scored, plan, doctor and membership: no other task "
            "starts from the model of a run. Leave it out."
        )
    return task


def _lacking(cfg: DictConfig, missing: Sequence[str]) -> str:
    name = HydraConfig.get().runtime.choices.get("task") if HydraConfig.initialized() else None
    example = next((one.example for one in choices("task") if one.name == name), "")
    shown = f", for example: {example.replace('python train.py', program())}" if example else "."
    return f"{' and '.join(missing)} must be given on the command line{shown}"


def check_request(cfg: DictConfig, task: Any, parts: Parts) -> None:
    """Refuse an unavailable device and unsupported sampling, before a task reads its data."""
    device = getattr(task, "device", None)
    if isinstance(device, str) and device not in ("cpu", "auto") and not getattr(task, "device_is_elsewhere", False):
        from lit_dpret.distributed.ray_workers import device_named

        device_named(device, knob="task.device")
    if hasattr(task, "planned_fits") and cfg.datamodule.get("sampling") is not None:
        names = ("sampling", "expected_batch_size", "sample_rate", "cap")
        parts.make_privacy().check_request(SimpleNamespace(**{name: cfg.datamodule.get(name) for name in names}))


def check_top_level(cfg: DictConfig) -> None:
    """Refuse unknown settings added with ``+``, and an invalid seed, resume or init_from_is_public."""
    known = {key.name for key in top_level().keys} | set(groups())
    text = OmegaConf.to_yaml(cfg, resolve=False)
    added = {o.lstrip("+").split("=")[0].split(".")[0] for o in own_overrides() if o.startswith("+")}
    for name in sorted((set(map(str, cfg)) & added) - known):
        if not re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", text):  # ${name} or, for example, ${oc.select:name}
            raise ConfigurationError(f"{explain_unknown_key(name)} Nothing reads what +{name} adds.")
    for name in sorted({*map(str, cfg)} & added & {*groups()}):
        found = choices(name)
        places = [key.name for choice in found for key in choice.keys]
        elsewhere = bool(places) and not any(place.startswith(f"{name}.") for place in places)
        if elsewhere or (any(choice.target for choice in found) and "_target_" not in cfg[name]):
            where = f": the choices of {name} set {places[0]} and the like" if elsewhere else f", where {name} is null"
            raise ConfigurationError(
                f"Nothing reads what +{name}. adds{where}. Choose one with {name}=NAME, and set its keys; "
                f"lit-dpret list {name}=NAME prints them."
            )
    for name in ("resume", "init_from_is_public"):
        check_type(name, cfg[name], "bool")
    if not is_whole(cfg.seed) or not 0 <= cfg.seed <= _LARGEST_SEED:
        raise ConfigurationError(f"seed={cfg.seed!r} is not an integer from 0 to {_LARGEST_SEED}.")
