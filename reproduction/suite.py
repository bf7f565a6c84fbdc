"""`task=suite`: all runs of one paper, one after another, and a page with every table and figure of the paper.

A part is another command of this program, as a user would type it; the suite does none of a part's work itself. Parts
whose data are missing are left out, and the page says so.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_dpret.errors import ConfigurationError, LitDpretError
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.settings import require_choice
from lit_dpret.tasks.parts import Parts, say, some_of
from reproduction.report.reproduction import PAPER_002, PAPER_004, PartTold, write_reproduction
from reproduction.study import Study

PAPERS = {paper.name: paper for paper in (PAPER_002, PAPER_004)}


@dataclass(frozen=True, kw_only=True)
class SuitePart:
    """One run of a suite."""

    settings: Sequence[str]  # as on the command line, without the run folder
    more: Sequence[str] = ()  # further settings, placed after those
    sizes: str = ""  # how it differs from the paper's sizes, in words
    needs: Sequence[str] = ()  # names in ``task.data``, all of which have to be given
    packages: Sequence[str] = ()  # that have to be installed
    after: Sequence[str] = ()  # parts whose own run folders it reads
    # The folder of its run within the suite's; null for one with its name. Parts that share a folder share work.
    run_in: str | None = None
    results: str = "."  # the folder from which the page is made, relative to its run folder
    taken: str | None = None  # a folder with the results of an earlier run, shown instead of this part


@dataclass(kw_only=True, eq=False)
class Suite(Study):
    """Run the parts that are not done yet, and report the results of all.

    Guarantees:
        - With ``resume=true`` a finished part is not run again, and an interrupted one continues as its task does.
        - All settings of all parts are composed and checked before the first part begins.
        - The page is written again after every part, so that a stopped suite leaves one.
    """

    paper: str
    parts: Mapping[str, SuitePart]
    data: Mapping[str, str | None] = field(default_factory=dict)
    only: Sequence[str] | None = None
    report_only: bool = False
    quote: bool = True
    note: str = ""
    min_free_mb: float = 500

    def __post_init__(self) -> None:
        require_choice("task.paper", self.paper, tuple(PAPERS))
        self._paper = PAPERS[self.paper]
        self.taken = {name: part.taken for name, part in self.parts.items() if part.taken is not None}
        self.chosen = some_of("task.only", self.only, list(self.parts)) if self.parts or self.only else []
        for place, (name, part) in enumerate(self.parts.items()):
            _known(f"task.parts.{name}.needs", part.needs, self.data)
            _known(f"task.parts.{name}.after", part.after, list(self.parts)[:place])
        for name, given in self.data.items():
            if given is not None and not Path(given).exists():
                raise ConfigurationError(
                    f"task.data.{name}={given} does not exist. Set it to null to leave out what needs it."
                )
        for name, folder in self.taken.items():
            if not Path(folder).is_dir():
                raise ConfigurationError(
                    f"task.parts.{name}.taken={folder} is not a folder. Name the folder of earlier results."
                )

    def run(self, parts: Parts) -> dict[str, float]:
        """Run every part that is not done yet; return how many items of the paper are shown, and how many are not."""
        fingerprint = hashlib.sha256(f"{self.paper} {parts.seed}".encode()).hexdigest()
        self.begin(replace(parts, resume=parts.resume or self.report_only), fingerprint=fingerprint)
        self._run_dir, self._seed = parts.run_dir, parts.seed
        self._command = parts.command_again("task.report_only=")
        todo = [] if self.report_only else [name for name in self.parts if not self._why_not(name, planned=True)]
        for key, given in self.data.items():  # said first, since a user does not wait for the end of the other parts
            needing = [name for name in self.chosen if key in self.parts[name].needs and not self._stages.is_done(name)]
            if given is None and needing and not self.report_only:
                say(f"task.data.{key} is not set: these parts are left out: {', '.join(needing)}")
        runs = {name: self._composed(parts, name) for name in todo}
        known = any(self._told(name).results for name in self.parts)
        if not (self.report_only or todo or known):
            lacking = dict.fromkeys(self._why_not(name, planned=True) for name in self.chosen)
            raise ConfigurationError(
                f"No part of {self.paper} can be run: {' '.join(lacking)} docs/reproduce.md states where to get the "
                "data."
            )
        if self.report_only and not known:
            raise ConfigurationError(f"task.report_only=true: no part in {parts.run_dir} is finished.")

        def work(name: str) -> str:
            self._result(name, *runs[name])
            if name != todo[-1]:
                self._tell()
            return ""

        self.in_turn(todo, str, work, label=f"parts of {self.paper}")
        states = self._tell()
        say(*(f"{number}: {state}" for number, state in states.items()))
        say(*(f"part {told.name} left out: {told.absent}" for told in map(self._told, self.parts) if told.absent))
        say(f"written: {self._run_dir / 'report' / self.paper}.html")
        shown = sum(state == "shown" for state in states.values())
        return {"shown": float(shown), "not_shown": float(len(states) - shown)}

    # -- a part ------------------------------------------------------------------------------

    def _why_not(self, name: str, *, planned: bool) -> str:
        """Return why a part is not run; empty if it is. ``planned`` counts earlier parts that can be run as done."""
        part = self.parts[name]
        if name in self.taken:
            return f"its results are taken from {self.taken[name]}."
        if self._stages.is_done(name):
            return ""
        if name not in self.chosen:
            return "task.only leaves it out."
        for key in part.needs:
            if self.data[key] is None:
                return f"task.data.{key} is not set."
        for package in part.packages:
            if importlib.util.find_spec(package) is None:
                return f"the package {package} is not installed."
        for earlier in part.after:
            if earlier in self.taken:
                return f"it continues the run of {earlier}, of which only the results were taken."
            if reason := self._why_not(earlier, planned=planned):
                return f"it continues {earlier}, which is missing: {reason}"
        return "" if planned else "it was not run yet."

    def _settings(self, name: str) -> list[str]:
        part = self.parts[name]
        again = {_key(word) for word in part.more}
        return [*(word for word in part.settings if _key(word) not in again), *part.more]

    def _folder(self, name: str) -> Path:
        return self._run_dir / (self.parts[name].run_in or name)

    def _composed(self, parts: Parts, name: str) -> tuple[Any, Parts]:
        if parts.make_run is None:
            raise ConfigurationError("Run task=suite from the command line, which composes its parts.")
        folder = str(self._folder(name)).replace("\\", "\\\\").replace("'", "\\'")
        begun = parts.resume and (self._folder(name) / LEDGER_NAME).exists()
        settings = [f"seed={self._seed}", *self._settings(name), f"run_dir='{folder}'"]
        try:
            task, own = parts.make_run([*settings, *(["resume=true"] if begun else [])]).make()
        except LitDpretError as error:
            raise ConfigurationError(f"task.parts.{name}: {error}") from error
        return task, replace(own, resume=parts.resume, command=self._told(name).command)

    def _result(self, name: str, task: Any, own: Parts) -> None:
        def work(_: Path, __: bool) -> dict[str, Any]:
            own.run_dir.mkdir(parents=True, exist_ok=True)
            try:
                scores = task.run(own)
            except LitDpretError as error:
                raise ConfigurationError(f"The part {name} of the suite: {error}") from error
            return {"scores": scores}

        self.once(name, " ".join(self._settings(name)), work, knob=f"task.parts.{name}")

    # -- the page ----------------------------------------------------------------------------

    def _told(self, name: str) -> PartTold:
        part = self.parts[name]
        words = ["python train.py", *self._settings(name), f"hydra.run.dir={self._folder(name)}"]
        command = " ".join(words).replace(f"{Path.cwd()}{os.sep}", "")  # relative to where this run was started
        told = PartTold(name=name, sizes=part.sizes, command=command)
        if name in self.taken:
            folder = Path(self.taken[name])
            sizes = f"Those of an earlier run, stated on its own page in {folder}."
            return replace(told, results=folder, taken=True, sizes=sizes, command=f"(an earlier run: {folder})")
        if self._stages.is_done(name):
            self._stages.result(name)  # reads how long it took
            return replace(told, results=self._folder(name) / part.results, seconds=self._stages.seconds[name])
        return replace(told, absent=self._why_not(name, planned=False))

    def _tell(self) -> dict[str, Any]:
        told, notes = [self._told(name) for name in self.parts], [self.note] if self.note else []
        how: dict[str, Any] = {"command": self._command, "quote": self.quote, "notes": notes}
        return write_reproduction(self._paper, told, self._run_dir / "report", **how)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _known(knob: str, names: Any, known: Any) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(f"{knob}: {unknown[0]!r} is not one of {', '.join(known) or 'none'}.")
