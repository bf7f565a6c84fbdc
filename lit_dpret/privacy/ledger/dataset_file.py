"""The file of a data-set ledger: the charge of each run, the permitted order of records, and the total.

The total composes the releases of all runs as one list; docs/derivations.md says where that is proved. Runs that begin
with the weights of one earlier run have seen one release of these weights. A charge names that run, and a sum over
charges counts it once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, cast

from lit_dpret.errors import ConfigurationError, LedgerError, UnsupportedAccountingError, schema_problem
from lit_dpret.privacy.accounting.composition import check_supported, epsilon
from lit_dpret.privacy.accounting.releases import NonPrivateRelease, Release, merge, release_from_dict
from lit_dpret.privacy.budget import AccountantName, Neighbours, PrivacyBudget
from lit_dpret.privacy.ledger.chain import Book, ChainedFile
from lit_dpret.privacy.ledger.run_ledger import events_of

TOTAL_EVENT = "dataset_total"
"""The event in a run's ledger that holds the total of its data set at the end of the run."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """The epsilon of everything released or reserved from one data set."""

    epsilon: float  # of all runs together; infinite where one of them has no guarantee
    delta: float  # the delta at which it holds
    accountant: str  # how it was composed: ``pld``, ``rdp``, or a phrase where only basic composition was possible
    total_eps: float  # the limit
    runs: int  # the number of charged runs
    running: int  # how many of them hold a reservation: they are running, or were killed and not resumed

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; an infinite epsilon is null."""
        return asdict(self) | {"epsilon": self.epsilon if math.isfinite(self.epsilon) else None}


def noted_total(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the last total recorded in a run's ledger, as `Total.to_dict` gives it; None without one."""
    noted = events_of(records, TOTAL_EVENT)
    return {item.name: noted[-1].get(item.name) for item in fields(Total)} if noted else None


def compose_across_runs(
    releases: Sequence[Release], *, delta: float, neighbours: Neighbours, accountant: AccountantName = "pld"
) -> tuple[float, str]:
    """Return the epsilon of the releases of all runs together at ``delta``, and the composition used.

    If one accountant judges all releases, it composes them at once: first ``rdp``, then ``pld`` if ``rdp`` was
    requested; otherwise first ``pld``, then ``rdp``. If neither judges them all, each accountant's releases get an
    equal share of ``delta``, and the epsilons add up.
    """
    releases = merge(releases)
    names: tuple[AccountantName, ...] = ("rdp", "pld") if accountant == "rdp" else ("pld", "rdp")
    for name in names:
        try:
            return epsilon(releases, delta=delta, neighbours=neighbours, accountant=name), name
        except UnsupportedAccountingError:
            continue
    groups: dict[AccountantName, list[Release]] = {}
    for release in releases:
        groups.setdefault(_judge_of(release, names, neighbours), []).append(release)
    # Basic composition: epsilons and deltas of the groups add up.
    share = delta / len(groups)
    parts = [epsilon(group, delta=share, neighbours=neighbours, accountant=name) for name, group in groups.items()]
    return math.fsum(parts), f"basic composition of {' and '.join(groups)}, delta / {len(groups)} each"


def _judge_of(release: Release, names: Sequence[AccountantName], neighbours: Neighbours) -> AccountantName:
    """Return the first accountant that judges the release's law; any will do where there is no law to judge."""
    if isinstance(release, NonPrivateRelease):
        return names[0]
    try:
        check_supported(release.law, names[0], neighbours)
        return names[0]
    except UnsupportedAccountingError:
        check_supported(release.law, names[1], neighbours)
        return names[1]


@dataclass(frozen=True)
class EarlierRun:
    """A run whose model other runs start from.

    Two are the same only if all fields are equal: copies of one run folder that were continued separately share only
    the identity.
    """

    run: str  # its permanent identity, as `ledger_identity` gives it
    head: str  # the last record of a step in its ledger: records that a resume at the end adds release nothing
    releases: tuple[Release, ...]  # the cost of its model

    @classmethod
    def of_start(cls, start: Mapping[str, Any] | None) -> tuple[EarlierRun, ...]:
        """Return the run of a start recorded in a ledger, as a tuple; empty if the start cost nothing."""
        if start is None or not start["releases"]:
            return ()
        releases = tuple(release_from_dict(release) for release in start["releases"])
        return (cls(str(start["runs"][0]), str(start["head"]), releases),)

    def to_dict(self) -> dict[str, Any]:
        return {"run": self.run, "head": self.head, "releases": [release.to_dict() for release in self.releases]}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> EarlierRun:
        releases = tuple(release_from_dict(release) for release in facts["releases"])
        return cls(str(facts["run"]), str(facts["head"]), releases)


@dataclass(frozen=True)
class Charge:
    """The charge of one run; created by `of`."""

    own: tuple[Release, ...]  # its own releases, merged
    earlier: tuple[EarlierRun, ...] = ()  # the runs that it starts from and that nothing else in the ledger counts

    @classmethod
    def of(cls, given: Charge | Sequence[Release], earlier: Sequence[EarlierRun] = ()) -> Charge:
        """Return the charge itself, or the charge of these releases."""
        return given if isinstance(given, Charge) else cls(tuple(merge(given)), tuple(earlier))

    @property
    def releases(self) -> list[Release]:
        """All releases, as if no other run started from the same model."""
        return composed([self])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: all releases and, if there are earlier runs, their parts."""
        whole = {"releases": [release.to_dict() for release in self.releases]}
        if not self.earlier:
            return whole
        own = [release.to_dict() for release in self.own]
        return whole | {"parts": {"own": own, "earlier": [run.to_dict() for run in self.earlier]}}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Charge:
        """Read what `to_dict` wrote."""
        whole, parts = [release_from_dict(release) for release in facts["releases"]], facts.get("parts")
        if parts is None:
            return cls(tuple(whole))
        own = tuple(release_from_dict(release) for release in parts["own"])
        charge = cls(own, tuple(EarlierRun.from_dict(run) for run in parts["earlier"]))
        # The file holds both, so that a reader without the parts cannot be shown less.
        if charge.releases != whole:
            raise LedgerError("its parts are not the releases that it states.")
        return charge


def composed(charges: Iterable[Charge]) -> list[Release]:
    """Return the releases of several runs together, each earlier run counted once."""
    charges = list(charges)
    # Once, however many runs begin with the same model: its releases happened once.
    earlier = dict.fromkeys(run for charge in charges for run in charge.earlier)
    parts = [*(charge.own for charge in charges), *(run.releases for run in earlier)]
    return merge(release for part in parts for release in part)


SCHEMA = "lit-dpret/dataset-ledger/1"


@dataclass(frozen=True)
class Entry:
    """The latest state of one run."""

    charge: Charge
    head: str
    settled: bool
    name: str
    sweep: str | None = None  # set if held for a trial of this sweep that has not begun
    delta: float | None = None  # of its claim, if smaller than the file's


@dataclass
class DatasetBook:
    """The runs of a data-set ledger; it refuses an unknown schema and records out of order."""

    terms: dict[str, Any] | None = None
    identity: str | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    """Reservations of sweeps that a trial has taken over."""
    trials: dict[str, str] = field(default_factory=dict)
    """The sweep of each run that took over a reservation."""

    def check(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "dataset":
            if self.terms is not None:
                raise LedgerError("it has two records that begin a data set.")
            if problem := schema_problem(record.get("schema"), SCHEMA):
                raise LedgerError(problem)
            if not record.get("id"):
                raise LedgerError("its first record states no identity.")
            _terms(record)
        elif kind in ("reserve", "settle"):
            if self.terms is None:
                raise LedgerError(f"a {kind} before the data set's own record: this is not a data-set ledger.")
            if kind == "settle" and record.get("run_id") not in self.entries:
                raise LedgerError(f"run {record.get('run_id')!r} settles what it never reserved.")
            _entry(record)

    def add(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "dataset":
            self.terms = _terms(record)
            self.identity = str(record["id"])
        elif record["kind"] in ("reserve", "settle"):
            name, entry = str(record["run_id"]), _entry(record)
            if record.get("takes") is not None:
                place = self.entries.pop(str(record["takes"]), None)
                self.taken.add(str(record["takes"]))
                if place is not None and place.sweep is not None:
                    self.trials[name] = place.sweep
            if entry.settled and name in self.entries and self.entries[name].sweep is not None:
                del self.entries[name]  # given back: no trial took it over
            else:
                self.entries[name] = entry


class DatasetFile(ChainedFile):
    """The file of a data-set ledger; its writers wait for each other."""

    kinds: ClassVar[tuple[str, ...]] = ("dataset", "reserve", "settle", "repair")
    knob: ClassVar[str] = "privacy.dataset_ledger"
    lock_wait: ClassVar[float] = 600.0
    lock_refusal: ClassVar[str] = (
        "has been locked by another run for ten minutes. Check what that run is doing, then start this one again."
    )

    @classmethod
    def new_book(cls) -> Book:
        return DatasetBook()

    @property
    def book(self) -> DatasetBook:
        return cast(DatasetBook, self._book)


def _terms(record: Mapping[str, Any]) -> dict[str, Any]:
    try:
        terms = {name: record[name] for name in ("total_eps", "delta", "unit", "neighbours")}
        terms |= {"duplicates": record.get("duplicates", "keep"), "unit_by": record.get("unit_by")}
        limit = terms["total_eps"]
        PrivacyBudget(eps=limit, **{name: value for name, value in terms.items() if name != "total_eps"})
    except (KeyError, ConfigurationError) as error:
        raise LedgerError(f"its terms are malformed ({error}).") from error
    return terms


def _entry(record: Mapping[str, Any]) -> Entry:
    run_id = record.get("run_id")
    if not isinstance(run_id, str) or not run_id:
        raise LedgerError(f"{record['kind']} record: run_id={run_id!r} is not a run's identity.")
    try:
        charge = Charge.from_dict(record)
    except (KeyError, TypeError, AttributeError, ValueError, LedgerError) as error:
        raise LedgerError(f"{record['kind']} record of run {run_id}: malformed releases ({error}).") from error
    sweep = record.get("sweep")
    return Entry(
        charge,
        str(record.get("run_head") or ""),
        record["kind"] == "settle",
        str(record.get("run")),
        None if sweep is None else str(sweep),
        record.get("delta"),
    )
