"""One-line messages for user errors, in the terms of the command line; none for defects of this package."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Collection, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from lit_dpret.cli.arguments import shown_overrides
from lit_dpret.config import CONFIG_MODULE, Choice, alike, choices, groups, names
from lit_dpret.errors import LitDpretError, WorkerError

_MOST_MEANT = 3
_MOST_CHOICES = 5  # maximum number of choices to suggest; a setting that many choices have is not a hint
_TYPED = r"[a-z]\w*(?:\.\w+)*"  # the name of a setting
UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
_AGAIN = "then run the command again, with resume=true if its run had started."
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)


def explain(error: BaseException) -> str | None:
    """Return one line for a user error; None for a defect, which keeps its traceback."""
    for cause in causes(error):
        if isinstance(cause, LitDpretError):
            return _by_full_name(str(cause))
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            file = cause.filename2 or cause.filename or "no file named"  # of two, the second is the output
            return f"the disk is full ({file}). Free space, {_AGAIN}"
        if isinstance(cause, OSError) and cause.errno == errno.EFBIG:
            file = cause.filename2 or cause.filename or "a file"
            return f"{file} is larger than the file system or a limit (ulimit -f) allows. Raise the limit, {_AGAIN}"
        if isinstance(cause, OSError) and cause.errno == errno.EEXIST and Path(cause.filename or "").is_file():
            return f"{cause.filename} is a file, but a folder is needed there. Choose another {_folder_knob()}."
        if isinstance(cause, OSError) and cause.errno in _CANNOT_WRITE and cause.filename:
            return f"{cause.filename}: {cause.strerror}. Choose another {_folder_knob()}, or fix the permissions."
        if isinstance(cause, MarkedYAMLError) and cause.problem_mark is not None:  # a file of --config-dir
            return f"{cause.problem_mark.name} is not YAML (line {cause.problem_mark.line + 1}: {cause.problem})."
        if type(cause).__name__ == "SafetensorError" and "Error while serializing" in str(cause):
            return f"weights could not be written ({cause}). Free space, {_AGAIN}"
        if isinstance(cause, RuntimeError) and "PytorchStreamWriter" in str(cause):
            return f"a checkpoint could not be written (is the disk full?). Free space, {_AGAIN}"
        if (lost := lost_rank(cause)) is not None:
            return str(lost)
        if isinstance(cause, ValueError) and str(cause).startswith("Config group override"):  # Hydra's: null, a number
            return _explain_no_choice()
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _explain_composition(error)
    return None


def _folder_knob() -> str:
    return "hydra.sweep.dir" if {"-m", "--multirun"} & set(sys.argv) else "hydra.run.dir"


def lost_rank(error: BaseException) -> WorkerError | None:
    """Return the error behind a broken connection between ranks, for commands that loaded them."""
    ranks = sys.modules.get("lit_dpret.distributed.ranks")
    found: WorkerError | None = None if ranks is None else ranks.lost_rank(error)
    return found


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _explain_composition(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return (
                f"{error.override} is not a setting. Write settings as NAME=VALUE, without spaces around the =, and "
                "put a value that contains spaces in quotes."
            )
        if re.search(r"=[\[{][^\]}]*$", error.override):
            return f"{error.override} ends too early: put the whole setting in quotes, as 'NAME={{KEY: VALUE, ...}}'."
        return f"{error.override} cannot be read as a setting: write its value in quotes, \"name='VALUE'\"."
    if several := re.match(r"Ambiguous value for argument '([^=]+)=", text):
        return (
            f'{several[1]} contains a comma. Write a list as "{several[1]}=[A,B]", a string as '
            f"\"{several[1]}='A, B'\", or add -m for one run with each value."
        )
    if twice := re.match(r"Multiple values for (\w+)\. To override a value use 'override \w+: ([^']+)'", text):
        return f"+{twice[1]}={twice[2]} adds a second choice of {twice[1]}. Leave out the +: {twice[1]}={twice[2]}."
    unknown = UNKNOWN_KEY.search(text)
    if unknown:
        key = unknown.group(1)  # this key may exist, and have received a mapping with a key that does not
        inside = re.search(rf"full_key: ({re.escape(key)}\.\S+)", str(error.__cause__))
        return explain_unknown_key(inside[1] if inside else key, given=key)
    if other := re.match(r"Error merging override ([\w./@]+)=", text):
        return _explain_other_form(other[1])
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        return f"{missing.group(1)} must be given on the command line."
    choice = re.search(r"Could not find '([^'/]+)/([^']+)'", text)
    if choice:
        group, name = choice.groups()
        return f"{group}={name} does not exist. Choose one of {', '.join(names(group))}."
    if text.startswith("Error in call to target") and error.__cause__ is not None:  # an error from a constructor
        where, cause = re.search(r"full_key: (\S+)", text), " ".join(str(error.__cause__).split()).rstrip(".!")
        place = where.group(1) if where else "a part of the configuration"
        cause = cause.split(" HINT: ")[0].rstrip(".")  # the hint names another package; our extras install it
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", cause):
            return explain_unknown_key(f"{place}.{unknown[1]}")
        if place == "trainer" and "precision" in cause.lower():
            return f"trainer.precision: {cause}."
        if place == "trainer" and re.search("gpu|cuda|tpu|xla|accelerator", cause, re.IGNORECASE):
            return f"trainer cannot be built: {cause}. Choose a trainer.accelerator of this machine, or trainer=cpu."
        return f"{place} cannot be built: {cause}."
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return first.strip()


def _explain_no_choice() -> str:
    for group, _, name in (override.partition("=") for override in shown_overrides()):
        if group in groups() and name not in names(group):
            return f"{group}={name} does not exist. Choose one of {', '.join(names(group))}."
    return "A setting has no name. Write settings as NAME=VALUE."


def _composed_again(without: str = "") -> DictConfig:
    overrides = [o for o in shown_overrides() if o.split("=")[0].lstrip("+~") not in (without, "hydra.run.dir")]
    GlobalHydra.instance().clear()
    with initialize_config_module(version_base="1.3", config_module=CONFIG_MODULE):
        return compose("train", overrides=overrides, return_hydra_config=True)


def _by_full_name(line: str) -> str:
    """Name the setting at the start of a line as the user types it: a constructor's ``encoder=x`` is
    ``task.encoder=x``.
    """
    begun = re.match(rf"{_TYPED}(?==)", line)
    if begun is None:
        return line
    try:
        cfg = _composed_again()
    except Exception:
        return line  # the settings of a failed composition are not those in the error
    known = _setting_names(cfg)

    def full(found: re.Match[str]) -> str:
        several = [name for name in known if name.endswith(f".{found[0]}")]
        return several[0] if len(several) == 1 and found[0] not in {*known, *groups()} else found[0]

    return re.sub(rf"(?<![\w.]){_TYPED}(?==)", full, line) if full(begun) != begun[0] else line


def _setting_names(cfg: DictConfig) -> list[str]:

    def below(node: Any, place: str) -> Iterator[str]:
        for key, value in node.items():
            if not str(key).startswith(("_", "hydra")):
                yield f"{place}{key}"
                if isinstance(value, dict):
                    yield from below(value, f"{place}{key}.")

    return list(below(OmegaConf.to_container(cfg, resolve=False), ""))


def _meant(key: str, known: Collection[str]) -> str:
    """Ask for the settings that end in ``key``, in its last part, or in a similar spelling, if these are few."""
    last = key.rpartition(".")[2]
    lasts = {name.rpartition(".")[2] for name in known}
    for tail in (key, *alike(key, known, cutoff=1), last, *alike(last, sorted(lasts))):
        if found := [name for name in known if name == tail or name.endswith(f".{tail}")]:
            return f" Did you mean {' or '.join(found)}?" if len(found) <= _MOST_MEANT else ""
    return ""


def _explain_other_form(key: str) -> str:
    """Show the form of a setting that received a list instead of a mapping, or the reverse."""
    try:
        default: Any = OmegaConf.to_container(OmegaConf.select(_composed_again(without=key), key))
    except Exception:
        return f"{key} takes another kind of value."
    pairs = ", ".join(f"{name}: {value}" for name, value in default.items()) if isinstance(default, dict) else ""
    form = f"'{key}={{{pairs}}}'" if pairs else f"{key}={default}"
    return f"{key} takes another kind of value, for example {form}."


def explain_unknown_key(key: str, *, given: str | None = None) -> str:
    """Name the choices that have the unknown ``key``, or list the existing settings near it.

    ``given`` is the command-line setting that contains it: ``key`` itself, or a mapping.
    """
    group, _, name = key.rpartition(".")
    try:
        cfg = _composed_again(without=given or key)
    except Exception:
        return f"{key} is not a setting."
    there = _setting_names(cfg)
    if key in there:  # it came with a choice, or with the class that the choice names
        return _explain_no_argument(cfg, group, name)
    suggestion = _meant(key, there)
    try:
        node: Any = OmegaConf.select(cfg, group) if group else cfg
        known = sorted(str(k) for k in node if not str(k).startswith(("_", "hydra")))
        chosen = cfg.hydra.runtime.choices.get(group)
    except Exception:
        making = _choices_at(f"{group}.")
        several = [one for one in making if key in {setting.name for setting in one.keys}] or making
        choose = f" Choose {' or '.join(f'{one.group}={one.name}' for one in several)} first." if several else ""
        return f"{key} is not a setting.{choose or suggestion}"
    where = f"in {group}" if group else "at the top"
    where += f"={chosen}" if chosen else ""
    takes = choices(group) if group in groups() and group != "task" else []  # no advice to run another task
    having = [one.name for one in takes if key in {setting.name for setting in one.keys}]
    if any(word.lstrip("+").startswith(f"{group}._target_=") for word in shown_overrides()):
        near = f" Add an argument that only another class has with a plus: +{key}=VALUE."
    elif 0 < len(having) <= _MOST_CHOICES:
        last = having.pop()
        near = f" {group}={', '.join(having)}{' or ' if having else ''}{last} has it."
    else:
        near = suggestion or f" Settings {where}: {', '.join(known) or 'none'}."
    return f"{key} is not a setting: there is no {name!r} {where}.{near}"


def _choices_at(place: str) -> list[Choice]:
    """Return the choices whose settings, other than those of a whole task or experiment, begin with ``place``."""
    found = [one for group in groups() if group != "task" for one in choices(group) if one.target]
    return [one for one in found if any(key.name.startswith(place) for key in one.keys)]


def _explain_no_argument(cfg: DictConfig, group: str, name: str) -> str:
    """Explain how to leave out existing settings that the constructor of ``group`` does not take."""
    node: Any = OmegaConf.to_container(OmegaConf.select(cfg, group), resolve=False)
    made = node.get("_target_")
    try:
        takes = signature(get_object(made)).parameters
        wrong = [str(key) for key in node if not str(key).startswith("_") and key not in takes]
    except Exception:
        wrong = [name]
    chosen = cfg.hydra.runtime.choices
    brought = [
        f"{one.group}={one.name}" for one in _choices_at(f"{group}.{name}.") if chosen.get(one.group) == one.name
    ]
    way = f"Leave out {brought[0]}" if brought else "Remove it: " + " ".join(f"~{group}.{key}" for key in wrong)
    return f"{group}.{name} is not a setting of {made}. {way}."
