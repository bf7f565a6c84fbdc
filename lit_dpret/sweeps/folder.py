"""The folder of a sweep: its plan, its reservations, and the results of its trials.

``sweep.json`` is written before anything is reserved and never changed. Each finished trial writes its results to
``trials/ID/trial.json``. So several processes, and agents of W&B, can work in one folder.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.files import read_json, write_whole
from lit_dpret.privacy.accounting.releases import Release
from lit_dpret.privacy.budget import AccountantName, PrivacyBudget
from lit_dpret.privacy.ledger.dataset_file import Charge
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.sweeps.file import SweepFile, Trial

SCHEMA = "lit-dpret/sweep/1"
SWEEP = "sweep.json"
TRIALS = "trials"
DONE = "trial.json"


@dataclass(frozen=True, kw_only=True)
class SweepTerms:
    """The terms for counting and comparing the trials of a sweep."""

    # The budget of the private trials: their unit, neighbours and delta; None if no trial is private.
    budget: PrivacyBudget | None
    accountant: AccountantName = "pld"  # of the private trials
    dataset_ledger: Path | None = None  # the ledger that adds up their releases
    total_eps: float | None = None  # the limit of that ledger
    ledger_delta: float | None = None  # the delta that the limit holds at
    metric_data: str  # the data on which trials are compared
    planned: Mapping[str, Any] | None = None  # the joint epsilon of all of them
    # Number of trials that train on private data without any privacy; None if this was not checked.
    without_privacy: int | None = None
    # The releases on which trials under ``privacy=synthetic`` train, each once, and null for all others.
    releases: Sequence[str | None] | None = None


@dataclass(frozen=True)
class SweepFolder:
    """A planned sweep: its folder, and the content of its ``sweep.json``."""

    folder: Path
    facts: Mapping[str, Any]

    @classmethod
    def plan(
        cls, folder: Path, file: SweepFile, trials: Sequence[Trial], places: Sequence[Charge | Sequence[Release]],
        terms: SweepTerms,
    ) -> SweepFolder:  # fmt: skip
        """Record a new sweep: a file's trials, and the planned charge of each private run.

        Nothing is reserved yet.
        """
        budget, ledger = terms.budget, terms.dataset_ledger
        charged = [Charge.of(place).to_dict() for place in places]
        facts = {
            "schema": SCHEMA,
            "id": secrets.token_hex(4),
            "fingerprint": file.fingerprint(),
            "trials": [{"id": trial.id, "settings": trial.overrides} for trial in trials],
            "metric": dict(file.metric),
            "metric_data": terms.metric_data,
            "dataset_ledger": None if ledger is None else str(ledger.expanduser().resolve()),
            "total_eps": terms.total_eps,
            "ledger_delta": terms.ledger_delta,
            "accountant": terms.accountant,
            "planned": terms.planned,
            "without_privacy": terms.without_privacy,
            "releases": terms.releases,
            "places": [place["releases"] for place in charged],
            "parts": [place.get("parts") for place in charged],
            "budget": None if budget is None else budget.to_dict(),
        }  # fmt: skip
        write_whole(folder / SWEEP, json.dumps(facts, indent=2, default=str) + "\n")
        return cls(folder, facts)

    @classmethod
    def read(cls, folder: str | Path) -> SweepFolder:
        """Read a planned sweep."""
        path = Path(folder).expanduser() / SWEEP
        if not path.exists():
            raise ConfigurationError(f"{folder} holds no {SWEEP}: plan the sweep first, with task=sweep.")
        return cls(path.parent, read_json(path, SCHEMA))

    def require(self, file: SweepFile, dataset_ledger: Path | None, total_eps: float | None, metric_data: str) -> None:
        """Refuse to continue a sweep planned with another file or other settings."""
        ledger = None if dataset_ledger is None else str(dataset_ledger.expanduser().resolve())
        limit = self.facts["total_eps"] if total_eps is None else total_eps
        now = {"dataset_ledger": ledger, "total_eps": limit, "metric_data": metric_data}
        for knob, value in now.items():
            if self.facts[knob] != value:
                raise ResumeError(
                    f"task.{knob}={value}, but the sweep in {self.folder} was planned with {self.facts[knob]}. Restore "
                    "it, or choose another hydra.run.dir."
                )
        if self.facts["fingerprint"] != file.fingerprint():
            raise ResumeError(
                f"{self.folder} holds a sweep that was planned from another file than task.file={file.path} is now. "
                "Restore it, or choose another hydra.run.dir."
            )

    @property
    def id(self) -> str:
        """The sweep's permanent identity."""
        return str(self.facts["id"])

    @property
    def places(self) -> list[Charge]:
        """The planned charge of each private run of its trials."""
        found = zip(self.facts["places"], self.facts["parts"], strict=True)
        return [Charge.from_dict({"releases": place, "parts": parts}) for place, parts in found]

    def trial_folder(self, name: str) -> Path:
        """Return the folder of a trial."""
        return self.folder / TRIALS / name

    def result(self, name: str) -> dict[str, Any] | None:
        """Return the result of a finished trial; None if it is not finished."""
        try:
            found = json.loads((self.trial_folder(name) / DONE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results of all finished trials, by folder; W&B's agents name their own folders."""
        folders = sorted(path.parent.name for path in (self.folder / TRIALS).glob(f"*/{DONE}"))
        return {name: result for name in folders if (result := self.result(name)) is not None}

    def ledger(self, budget: PrivacyBudget | None = None, *, trial: bool = False) -> DatasetLedger | None:
        """Return the ledger that counts its trials; None if none of them is private.

        ``budget`` is a trial's own, or null for the plan's; a ``trial`` takes over one of the reservations.
        """
        if self.facts["dataset_ledger"] is None or self.facts["budget"] is None:
            return None
        return DatasetLedger(
            self.facts["dataset_ledger"],
            total_eps=self.facts["total_eps"],
            budget=budget or PrivacyBudget(**self.facts["budget"]),
            accountant=self.facts["accountant"],
            sweep=self.id if trial else None,
            group="privacy" if trial else "task",
        )

    @property
    def parameters(self) -> dict[str, set[str]]:
        """The settings that the file names for its trials, with their planned values."""
        found: dict[str, set[str]] = {}
        for trial in self.facts["trials"]:
            for setting in trial["settings"]:
                name, _, value = setting.partition("=")
                found.setdefault(name, set()).add(value)
        return found

    def describe(self) -> dict[str, Any]:
        """Return the public facts of the sweep, for a trial's own ledger and card."""
        facts = self.facts
        return {
            "id": self.id,
            "trials": len(facts["trials"]),
            "private_runs": len(facts["places"]),
            "releases": facts.get("releases"),
            "varied": sorted(name for name, values in self.parameters.items() if len(values) > 1),
            "metric": facts["metric"].get("name"),
            **{key: facts[key] for key in ("without_privacy", "metric_data", "planned", "total_eps", "ledger_delta")},
        }


def trial_ledger(sweep: SweepFolder, budget: PrivacyBudget, *, own: DatasetLedger | None, mode: str) -> DatasetLedger:
    """Return the ledger in which a private trial takes over a reservation of its sweep."""
    if own is not None:
        raise ConfigurationError(
            f"privacy.dataset_ledger={own.path} in a trial: a sweep's ledger is set by its plan. Pass it to task=sweep "
            "as task.dataset_ledger, and leave this one null."
        )
    ledger = sweep.ledger(budget, trial=True)
    if ledger is None:
        raise ConfigurationError(
            f"trial_of={sweep.folder} planned no private run, but this one is under privacy={mode}. Plan a sweep "
            "that includes it."
        )
    if (known := sweep.facts["ledger_delta"]) is not None and (found := ledger.terms()["delta"]) != known:
        raise ConfigurationError(
            f"trial_of={sweep.folder} was planned with a limit at delta {known}, and its ledger {ledger.path} "
            f"counts at delta {found}: it is a different ledger. Restore the plan's ledger, or make a new plan."
        )
    return ledger


def write_result(folder: Path, settings: Sequence[str], metrics: Mapping[str, Any]) -> None:
    """Record a finished trial and its result, readable by the owner alone, since scores may use private queries."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    write_whole(
        folder / DONE, json.dumps({"settings": list(settings), "metrics": numbers}, indent=2) + "\n", owner_only=True
    )
