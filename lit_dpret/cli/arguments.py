"""Command-line arguments: a word for the task, positional paths, quoted values, and the command to repeat."""

from __future__ import annotations

import re
import sys
from itertools import takewhile
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from lit_dpret.config import alike, groups, listed, names, top_level
from lit_dpret.errors import ConfigurationError

_POSITIONAL = {"compare": ("run_a", "run_b"), "verify": ("card",), "audit": ("run",), "sweep": ("file",)}
_SENTENCES = ("task.query", "task.tuning_note", "callbacks.card.tuning_note")  # prose, which may contain any character
_OPTIONS = {  # Hydra's options
    "-m", "--multirun", "-r", "--run", "-h", "--help", "--hydra-help", "--version", "--resolve", "-i", "--info", "-sc",
    "--shell-completion",
}  # fmt: skip
_VALUED_OPTIONS = {
    "-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir",
    "--experimental-rerun",
}  # fmt: skip
_SETTING = re.compile(r"((?:\+\+?|~)?[A-Za-z_][\w./@:-]*)=(.*)", re.DOTALL)


def listing(arguments: list[str]) -> str:
    """Return the output of ``lit-dpret list`` for a group, a choice, a word, or nothing; see `listed`."""
    if len(arguments) > 1:
        raise ConfigurationError(
            f"list takes at most one group, group=choice or word, not {' '.join(arguments)}: for example "
            "lit-dpret list privacy=dp_sgd, or lit-dpret list accountant."
        )
    return listed(*arguments)


def with_task(arguments: list[str]) -> list[str]:
    """Read ``doctor privacy.eps=3`` as ``task=doctor privacy.eps=3``; refuse a word that names no task.

    Example:
        >>> with_task(["plan", "privacy.eps=3"])
        ['task=plan', 'privacy.eps=3']
        >>> with_task(["compare", "runs/a", "runs/b", "task.level=0.9"])
        ['task=compare', "task.run_a='runs/a'", "task.run_b='runs/b'", 'task.level=0.9']
        >>> with_task(["verify", "runs/a"])
        ['task=verify', 'hydra.run.dir=.', 'hydra.output_subdir=null', "task.card='runs/a'"]
        >>> with_task(["plan", "-m", "privacy.eps=1,3"])
        ['-m', 'task=plan', 'privacy.eps=1,3']
    """
    for argument in arguments:
        if "\r" in argument:
            raise ConfigurationError(
                f"{argument!r} contains a carriage return: the script has Windows line endings. Save it with Unix line "
                "endings."
            )
        name = argument.lstrip("-").split("=")[0]
        if (
            argument.startswith("-")
            and "=" in argument
            and name.split(".")[0] in {*groups(), *(key.name for key in top_level().keys)}
        ):
            raise ConfigurationError(
                f"{argument} is not an option. Write the setting without dashes: {argument.lstrip('-')}."
            )
    options, arguments = _apart(arguments)
    if not arguments or "=" in arguments[0] or arguments[0][:1] in ("+", "~"):
        return [*options, *arguments]
    tasks = names("task")
    if arguments[0] not in tasks:
        wholes = [f"experiment={name}" for name in names("experiment") if name == arguments[0]]
        near = [*wholes, *alike(arguments[0], tasks)]
        words = f". Did you mean {near[0]}?" if near else f": {', '.join([*tasks, 'list', 'silo'])}."
        raise ConfigurationError(f"{arguments[0]!r} is neither a setting (name=value) nor a task{words}")
    knobs = _POSITIONAL.get(arguments[0], ())
    nowhere = ["hydra.run.dir=.", "hydra.output_subdir=null"] if arguments[0] == "verify" else []  # it writes nothing
    return [*options, f"task={arguments[0]}", *nowhere, *_by_place(arguments[0], knobs, arguments[1:])]


def _apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return options and the other words separately: Hydra's parser accepts no option between two settings."""
    options: list[str] = []
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, _, value = argument.partition("=")
        if not argument.startswith("-"):
            words.append(argument)
        elif name not in _OPTIONS | _VALUED_OPTIONS:
            raise ConfigurationError(f"{argument} is not an option: lit-dpret --help and --hydra-help list them.")
        else:
            follows = [next(rest, "")] if name in _VALUED_OPTIONS and not value else []
            options += [argument, *filter(None, follows)]
    return options, words


def quoted(argument: str) -> str:
    """Return a setting with its value quoted, if it is plain text that Hydra's grammar does not accept.

    Settings that take sentences, such as a question, are always quoted.

    Example:
        >>> quoted("task.query=can i cancel, and when?")
        "task.query='can i cancel, and when?'"
        >>> quoted("task.card=a=b"), quoted("privacy.eps=3")
        ("task.card='a=b'", 'privacy.eps=3')
    """
    found = _SETTING.fullmatch(argument)
    if found is None or found[2] in ("null", "???") or re.fullmatch(r"(['\"]).*\1", found[2], re.DOTALL):
        return argument
    if found[1] in _SENTENCES:
        return f"{found[1]}={_literal(found[2].replace('${', chr(92) + '${'))}"
    if set(found[2]) & set("{}[](),$"):  # Hydra's syntax for lists, mappings, sweeps and references
        return argument
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return f"{found[1]}={_literal(found[2])}"
    return argument


def _literal(text: str) -> str:
    """Return a text in quote marks; backslashes are escapes only before a quote mark."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda run: run[1] * 2 + (r"\'" if run[2] else ""), text) + "'"


def _by_place(task: str, knobs: tuple[str, ...], arguments: list[str]) -> list[str]:
    """Return ``RUN_A RUN_B ...`` as settings of a task that takes them: all by position, or all by name."""
    given = list(takewhile(lambda argument: "=" not in argument and argument[:1] not in "+~", arguments))
    if knobs and len(given) not in (0, len(knobs)):
        words = " ".join(knob.upper() for knob in knobs)
        raise ConfigurationError(
            f"{task} takes {words} and then settings, not {len(given)} words: lit-dpret {task} {words}. Write a path "
            f"that contains '=' as task.{knobs[0]}='PATH'."
        )
    if not knobs:
        return arguments
    return [f"task.{knob}={_literal(path)}" for knob, path in zip(knobs, given, strict=False)] + arguments[len(given) :]


def program() -> str:
    """Return the command that called this program: only a clone has ``train.py``."""
    called = {"train.py": "python train.py", "__main__.py": "python -m lit_dpret"}
    return called.get(Path(sys.argv[0]).name, "lit-dpret")


def shown_overrides() -> list[str]:
    """Return the settings as the user typed them."""
    return [word for word in sys.argv[1:] if word.startswith("~") or ("=" in word and not word.startswith("-"))]


def own_overrides() -> list[str]:
    """Return the settings of this run; under ``-m``, of its job."""
    if HydraConfig.initialized():
        return list(HydraConfig.get().overrides.task)
    return shown_overrides()
