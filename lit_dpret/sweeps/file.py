"""Read a W&B sweep file as W&B does: its parameters become trials, its command a command line.

Only searches whose trials can be listed in advance are accepted: ``grid``, and ``random`` over listed values. A search
that chooses the next trial by results (``bayes``) has no list of trials whose cost could be reserved.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from lit_dpret.errors import ConfigurationError
from lit_dpret.files import json_sha256
from lit_dpret.settings import is_whole

_KEYS = {"program", "method", "metric", "parameters", "command", "run_cap", "name", "description", "project", "entity"}
_ENVIRONMENT = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
SHIPPED = files("lit_dpret.configs").joinpath("sweep")
_MACROS = ("${env}", "${interpreter}", "${program}", "${args_no_hyphens}")


@dataclass(frozen=True)
class Trial:
    """One point of a sweep: its varied settings, as (name, value), in the order of the file."""

    settings: tuple[tuple[str, Any], ...]

    @property
    def overrides(self) -> list[str]:
        """The settings as arguments, in the format of W&B's agent."""
        return [f"{name}={value}" for name, value in self.settings]

    @property
    def id(self) -> str:
        """Eight hexadecimal digits, the same for the same point everywhere; also W&B's run id and the folder's name."""
        return json_sha256(self.overrides)[:8]


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """The content of a sweep file."""

    path: Path  # the file
    program: str  # the script, such as ``train.py``
    method: str  # ``grid`` or ``random``
    parameters: Mapping[str, Sequence[Any]]  # the values of each parameter
    command: Sequence[str]  # the command line with W&B's macros
    # ``name`` and ``goal`` of the result by which trials are compared; empty if there is none.
    metric: Mapping[str, str]
    run_cap: int | None = None  # maximum number of trials; None for all of a grid

    @classmethod
    def read(cls, path: str | Path) -> SweepFile:
        """Read and check a file, or one shipped with the package, such as ``quickstart``."""
        file = Path(path).expanduser()
        shipped = {f.name.removesuffix(".yaml"): f for f in SHIPPED.iterdir() if f.name.endswith(".yaml")}
        source = shipped.get(str(path), file) if not file.exists() else file
        try:
            content = yaml.safe_load(source.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(
                f"task.file={path} cannot be read: {error.strerror}. It takes a file, or one of "
                f"{', '.join(sorted(shipped))}."
            ) from error
        except yaml.YAMLError as error:  # its message quotes the file, which may be a log
            line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
            raise ConfigurationError(f"task.file={path} is not YAML (line {line}).") from error
        if not isinstance(content, dict):
            raise ConfigurationError(f"task.file={path} is not a sweep: a W&B sweep file is a mapping with parameters.")
        if unknown := sorted(set(content) - _KEYS):
            raise ConfigurationError(
                f"task.file={path}: {', '.join(unknown)} is not supported by a sweep without a server. Supported keys: "
                f"{', '.join(sorted(_KEYS))}."
            )
        method = content.get("method", "grid")
        if method not in ("grid", "random"):
            raise ConfigurationError(
                f"task.file={path}: method={method} chooses its next trial by results, so the cost of its trials "
                "cannot be reserved. Use grid, or random over listed values; for Optuna see the docs."
            )
        parameters = content.get("parameters")
        if not isinstance(parameters, dict) or not parameters:
            raise ConfigurationError(f"task.file={path} has no parameters to vary.")
        cap = content.get("run_cap")
        if cap is not None and (not is_whole(cap) or cap < 1):
            raise ConfigurationError(f"task.file={path}: run_cap={cap} must be an integer of at least 1.")
        if method == "random" and cap is None:
            raise ConfigurationError(f"task.file={path}: method=random never ends without run_cap. Set one.")
        command = [str(part) for part in content.get("command") or _MACROS]
        if "${args_no_hyphens}" not in command:
            raise ConfigurationError(
                f"task.file={path}: its command lacks ${{args_no_hyphens}}, the trial's settings as name=value."
            )
        return cls(
            path=file,
            program=str(content.get("program", "train.py")),
            method=method,
            parameters={str(name): _values(file, str(name), given) for name, given in parameters.items()},
            command=command,
            metric=_metric(file, content.get("metric") or {}),
            run_cap=cap,
        )

    def trials(self, *, seed: int = 0) -> list[Trial]:
        """Return the trials in the order of W&B's grid, or a public sample (by ``seed``) of ``run_cap``."""
        names = list(self.parameters)
        if self.method == "grid":
            points = itertools.product(*self.parameters.values())
            kept = points if self.run_cap is None else itertools.islice(points, self.run_cap)
            return [Trial(tuple(zip(names, point, strict=True))) for point in kept]
        coins, wanted, found = random.Random(seed), self.run_cap or 1, dict[Trial, None]()
        wanted = min(wanted, math.prod(len(values) for values in self.parameters.values()))
        while len(found) < wanted:
            found[Trial(tuple((name, coins.choice(values)) for name, values in self.parameters.items()))] = None
        return list(found)

    @property
    def fixed(self) -> list[str]:
        """The settings that all trials share: those in the command that are neither macros nor Hydra's own."""
        return [part for part in self.command if "=" in part and not part.startswith(("${", "hydra.", "trial_of="))]

    def command_line(self, trial: Trial, environment: Mapping[str, str]) -> list[str]:
        """Return the command of one trial, with the macros filled in as W&B's agent does.

        ``${envvar:NAME}`` is looked up in ``environment``; a missing variable becomes its own name, as in W&B's agent.
        """
        words: list[str] = []
        for part in self.command:
            if part == "${env}":
                continue  # /usr/bin/env; the environment is passed on unchanged
            if part == "${interpreter}":
                words.append(sys.executable)
            elif part == "${program}":
                words += [self.program] if Path(self.program).is_file() else ["-m", "lit_dpret"]
            elif part == "${args_no_hyphens}":
                words += trial.overrides
            elif part.startswith("${") and part.endswith("}") and not _ENVIRONMENT.fullmatch(part):
                raise ConfigurationError(f"task.file={self.path}: {part} is not one of {', '.join(_MACROS)}.")
            else:
                words.append(_ENVIRONMENT.sub(lambda found: environment.get(found[1], found[1]), part))
        return words

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the trials and how they run."""
        parameters = list(self.parameters.items())  # their order determines the order of trials
        facts = [self.program, self.method, parameters, list(self.command), dict(self.metric), self.run_cap]
        return json_sha256(facts, default=str)


def _values(file: Path, name: str, given: Any) -> list[Any]:
    if isinstance(given, dict) and set(given) <= {"value"} and "value" in given:
        return [given["value"]]
    if isinstance(given, dict) and isinstance(given.get("values"), list) and given["values"]:
        if extra := set(given) - {"values", "distribution"}:
            raise ConfigurationError(
                f"task.file={file}: parameters.{name} has {', '.join(sorted(extra))} in addition to values. Remove "
                "that."
            )
        values = list(given["values"])
        if len({json.dumps(value, default=str) for value in values}) != len(values):
            raise ConfigurationError(f"task.file={file}: parameters.{name} lists a value twice.")
        return values
    raise ConfigurationError(
        f"task.file={file}: parameters.{name} must have value or a list of values; a distribution has no list of "
        "trials whose cost could be reserved."
    )


def _metric(file: Path, given: Any) -> dict[str, str]:
    if not given:
        return {}
    if (
        not isinstance(given, dict)
        or not given.get("name")
        or given.get("goal", "minimize") not in ("minimize", "maximize")
    ):
        raise ConfigurationError(f"task.file={file}: metric needs a name and a goal, minimize or maximize.")
    return {"name": str(given["name"]), "goal": str(given.get("goal", "minimize"))}
