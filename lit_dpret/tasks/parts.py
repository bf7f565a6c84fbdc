"""The arguments of a task: a run folder and factories for the rest, without Hydra."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from lit_dpret.cards.text import without_repetition
from lit_dpret.errors import ConfigurationError, StorageError

CHECKPOINTS = "checkpoints"
"""The folder in a run that holds its checkpoints."""

_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+")


@dataclass(frozen=True)
class ComposedRun:
    """Another run of this program, composed but not started."""

    describe: Callable[[Sequence[str]], str]
    make: Callable[[], tuple[Any, Parts]]


def no_outline(**settings: Any) -> Any:
    """Refuse to outline a model without a given method."""
    raise ConfigurationError("The cost formulas support encoder-decoder models only (model=generator).")


@dataclass(frozen=True)
class Parts:
    """Factories for the pieces of a run; nothing is built, read or downloaded before its call."""

    run_dir: Path
    make_privacy: Callable[..., Any]
    make_datamodule: Callable[..., Any]
    make_module: Callable[..., Any]
    make_trainer: Callable[..., Any]
    make_outline: Callable[..., Any] = no_outline
    make_callbacks: Callable[[], list[Any]] = list
    make_loggers: Callable[..., list[Any]] = lambda **_: []  # a stage passes its own folder as ``run_dir``
    make_canaries: Callable[[], Any] = lambda: None
    make_federation: Callable[[], Any] = lambda: None
    make_run: Callable[[Sequence[str]], ComposedRun] | None = None
    trained_settings: Callable[[], dict[str, Any]] = dict
    trial_of: Path | None = None
    start: Mapping[str, Any] = field(default_factory=dict)  # the accountant's ``init_from`` and ``init_from_is_public``
    resume: bool = False
    seed: int = 0
    command: str = field(default="python train.py")

    def read_data(self, stage: str = "fit", **settings: Any) -> Any:
        """Build the datamodule, let it download missing files, and read it."""
        data = self.make_datamodule(**settings)
        data.prepare_data()
        data.setup(stage)
        return data

    def federation(self) -> Any:
        """Return the federation plan of the task."""
        plan = self.make_federation()
        if plan is None:
            raise ConfigurationError("This task needs a federation. Add federated=inprocess, simulation or flower.")
        return plan

    def command_again(self, *how: str) -> str:
        """Return the command that repeats this run, without ``resume=`` and words that begin with ``how``."""
        return as_typed([word for word in words_of(self.command) if not word.startswith(("resume=", *how))])


def as_typed(words: Sequence[str]) -> str:
    """Return a command for a shell: words that the shell would change are quoted, and lists stay readable.

    Example:
        >>> print(as_typed(["train.py", "task.only=[a,b]", "task.root=${oc.env:DATA}"]))
        train.py task.only=[a,b] 'task.root=${oc.env:DATA}'
    """
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


def words_of(command: str) -> list[str]:
    """Return the words of a command, as a shell splits it."""
    try:
        return shlex.split(command)
    except ValueError:  # a lone quote mark in a value
        return command.split()


T = TypeVar("T")


def some_of(knob: str, given: Sequence[T] | None, known: Collection[T]) -> list[T]:
    """Return the members of ``known`` that a setting names, each once and in order; all if it names none."""
    chosen = list(known if given is None else given)
    if not chosen or set(chosen) - set(known) or len(set(chosen)) < len(chosen):
        raise ConfigurationError(
            f"{knob}={chosen} must name at least one of {', '.join(map(str, known)) or 'nothing'}, each once."
        )
    return [one for one in known if one in chosen]


def require_budgets(knob: str, values: Sequence[float | None], *, some: bool = False) -> None:
    """Refuse epsilons that are not all different and positive; with ``some``, also an empty list."""
    wrong = any(value is not None and not 0 < value < float("inf") for value in values)  # None means no privacy
    if wrong or (some and not values) or len(set(values)) < len(values):
        raise ConfigurationError(f"{knob}={list(values)} must be different positive, finite numbers.")


def by_hash(name: str, salt: bytes = b"") -> bytes:
    """Return the sort key for public samples: an order of ids independent of their meaning."""
    return sha256(salt + name.encode("utf-8", "surrogatepass")).digest()


def say(*lines: str) -> None:
    """Print lines unchanged; rich would interpret brackets, as in a path or a setting, as markup."""
    for line in lines:
        print(line, flush=True)


def say_unaccounted(card: Mapping[str, Any], knob: str = "task.tuning_data") -> None:
    """Print on stderr if a card with an epsilon does not cover the choice of settings."""
    if card["claim"]["epsilon"] is not None and not card["tuning"]["accounted"]:
        sys.stderr.write(f"on the card: {without_repetition(card['tuning']['text'])} ({knob})\n")


def check_run_dir(folder: Path, *, min_free_mb: float) -> None:
    """Refuse a run folder that cannot be written or is on a nearly full disk."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        raise StorageError(
            f"hydra.run.dir={folder} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    free = shutil.disk_usage(folder).free / 2**20
    if free < min_free_mb:
        raise StorageError(
            f"hydra.run.dir={folder} has {free:.0f} MB of free disk, less than the {min_free_mb:.0f} MB that the "
            "run may need. Free space, choose another folder, or lower task.min_free_mb where the task has it."
        )


def check_output(name: str, value: str, *, folder: bool) -> None:
    """Refuse a path, given as the setting ``name``, where no file or ``folder`` can be written."""
    path = Path(value).expanduser()
    try:
        if path.is_dir() and not folder:
            raise ConfigurationError(f"{name}={value} is a folder, but a file is written there. Name a file.")
        if path.exists() and folder and not path.is_dir():
            raise ConfigurationError(f"{name}={value} is a file, but a folder is needed there. Name a folder.")
        there = next(found for found in (path, *path.absolute().parents) if found.exists())
    except OSError as error:
        raise ConfigurationError(f"{name}={value} cannot be written: {error.strerror}.") from error
    if there != path and not there.is_dir():
        raise ConfigurationError(f"{name}={value} cannot be written: {there} is a file.")
    if not os.access(there, os.W_OK):
        raise ConfigurationError(f"{name}={value} cannot be written: you have no write permission for {there}.")
