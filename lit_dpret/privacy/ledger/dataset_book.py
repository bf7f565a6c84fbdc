"""What the file of a data-set ledger holds, and which record may follow which.

Reservations of a sweep are held under names of their own until a trial takes one over. A version that
knows of no sweeps counts such a trial twice, and so never too little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lit_dpret.errors import ConfigurationError, LedgerError, schema_problem
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.ledger.chain import Book, ChainedFile
from lit_dpret.privacy.ledger.dataset_charge import Charge

SCHEMA = "lit-dpret/dataset-ledger/1"


@dataclass(frozen=True)
class Entry:
    """The last word on one run."""

    charge: Charge
    head: str
    settled: bool
    name: str
    sweep: str | None = None  # held for a trial of this sweep that has not begun


@dataclass
class DatasetBook:
    """The runs of a data-set ledger; refuses an unknown schema and records out of order."""

    terms: dict[str, Any] | None = None
    identity: str | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    """Reservations of sweeps that a trial has taken over."""

    def check(self, record: Mapping[str, Any]) -> None:
        kind = record.get("kind")
        if kind == "dataset":
            if self.terms is not None:
                raise LedgerError("a data set is begun twice.")
            if problem := schema_problem(record.get("schema"), SCHEMA):
                raise LedgerError(problem)
            _terms(record)
        elif kind in ("reserve", "settle"):
            if self.terms is None:
                raise LedgerError(f"a {kind} before the data set's own record: this is no data-set ledger.")
            if kind == "settle" and record.get("run_id") not in self.entries:
                raise LedgerError(f"run {record.get('run_id')!r} settles what it never reserved.")
            _entry(record)

    def add(self, record: Mapping[str, Any]) -> None:
        if record.get("kind") == "dataset":
            self.terms = _terms(record)
            self.identity = str(record.get("id") or record["hash"])  # files of before there was an id go by the hash
        elif record.get("kind") in ("reserve", "settle"):
            name, entry = str(record["run_id"]), _entry(record)
            if record.get("takes") is not None:
                self.entries.pop(str(record["takes"]), None)
                self.taken.add(str(record["takes"]))
            if entry.settled and name in self.entries and self.entries[name].sweep is not None:
                del self.entries[name]  # given back: no trial took it over
            else:
                self.entries[name] = entry


class DatasetFile(ChainedFile):
    """The file of a data-set ledger; its writers wait for each other."""

    kinds: ClassVar[tuple[str, ...]] = ("dataset", "reserve", "settle", "repair")
    lock_wait: ClassVar[float] = 600.0
    lock_refusal: ClassVar[str] = (
        "has been locked by another run for ten minutes. See what that run is doing, then start this one again."
    )

    @classmethod
    def new_book(cls) -> Book:
        return DatasetBook()

    @property
    def book(self) -> DatasetBook:
        """What the records say."""
        if not isinstance(self._book, DatasetBook):
            raise LedgerError(f"{self.path} is no data-set ledger.")
        return self._book


def _terms(record: Mapping[str, Any]) -> dict[str, Any]:
    try:
        terms = {name: record[name] for name in ("total_eps", "delta", "unit", "neighbours")}
        limit = terms["total_eps"]
        PrivacyBudget(eps=limit, delta=terms["delta"], unit=terms["unit"], neighbours=terms["neighbours"])
    except (KeyError, ConfigurationError) as error:
        raise LedgerError(f"its terms are malformed ({error}).") from error
    return terms


def _entry(record: Mapping[str, Any]) -> Entry:
    run_id = record.get("run_id")
    if not isinstance(run_id, str) or not run_id:
        raise LedgerError(f"{record.get('kind')} record: run_id={run_id!r} is not a run's identity.")
    try:
        charge = Charge.from_dict(record)
    except (KeyError, TypeError, AttributeError, ValueError, LedgerError) as error:
        raise LedgerError(f"{record.get('kind')} record of run {run_id}: malformed releases ({error}).") from error
    sweep = record.get("sweep")
    return Entry(
        charge,
        str(record.get("run_head") or ""),
        record.get("kind") == "settle",
        str(record.get("run")),
        None if sweep is None else str(sweep),
    )
