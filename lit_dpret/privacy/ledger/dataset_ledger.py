"""The total privacy cost of all runs on one data set, in one shared file whose path identifies the data set.

A run *reserves* what it plans to release and *settles* to what its own ledger promises. A killed run stays charged
until a resume takes over its reservation. A *sweep* reserves all trials before the first one starts. Each transaction
holds the operating system's file lock (``flock``).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_dpret.errors import BudgetExceededError, ConfigurationError, LedgerError, ResumeError
from lit_dpret.privacy.accounting.releases import GaussianRelease, NonPrivateRelease, Release
from lit_dpret.privacy.budget import AccountantName, PrivacyBudget, show_delta, show_epsilon
from lit_dpret.privacy.ledger.dataset_file import (
    SCHEMA,
    Charge,
    DatasetBook,
    DatasetFile,
    Entry,
    Total,
    compose_across_runs,
    composed,
)
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, events_of, noise_keys

SWEEP_EVENT = "trial_of"
"""The event in a run's ledger that names the sweep of which the run is a trial."""

Releases = tuple[Release, ...]


def note_sweep(ledger: PrivacyLedger, sweep: Mapping[str, Any] | None) -> None:
    """Record once in a run's ledger of which sweep it is a trial."""
    before = sweep_of(ledger.records)
    # A run that has spent something outside a sweep is in no sweep's reservation.
    begun = before is not None or bool(noise_keys(ledger.records))
    if begun and (before or {}).get("id") != (sweep or {}).get("id"):
        ledger.close()
        raise ResumeError(
            "resume=true with another trial_of than at the start of the run, whose reservation belongs to that sweep. "
            "Restore trial_of, or start a new run in another hydra.run.dir."
        )
    if not begun and sweep is not None:
        ledger.append("event", name=SWEEP_EVENT, sweep=dict(sweep))


def sweep_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the sweep recorded in a run's ledger; None for a run outside a sweep."""
    found = events_of(records, SWEEP_EVENT)
    return dict(found[0]["sweep"]) if found else None


def one_release(sweep: Mapping[str, Any]) -> bool:
    """Return whether all trials of a sweep train on one release, whose claim covers them and the choice among them."""
    releases = sweep.get("releases") or [None]
    return len(releases) == 1 and releases[0] is not None


def sweep_limit(sweep: Mapping[str, Any] | None, delta: float | None) -> float | None:
    """Return the maximum total cost of a sweep's trials at a claim's delta; None if there is no bound.

    There is no bound without a sweep, nor for a sweep with trials that have, or may have, no privacy. If a trial spends
    more than its plan, as after a crash, the limit of the ledger bounds that and the plan does not. The limit holds at
    the ledger's delta and above; at a smaller delta it says nothing.
    """
    if sweep is None or delta is None or sweep.get("without_privacy") != 0 or sweep.get("planned") is None:
        return None
    holds_at = sweep.get("ledger_delta")
    return sweep.get("total_eps") if holds_at is not None and holds_at <= delta else None


def choose_place(places: Mapping[str, Releases], planned: Releases, *, sweep: str) -> str:
    """Return the reservation that a run takes over: an equal one, or the cheapest that covers it.

    A reservation covers a run if it has the same sampling laws and, for each, at least as many releases at no more
    noise.
    """
    for name, releases in places.items():
        if releases == planned:
            return name
    covering = {name: releases for name, releases in places.items() if covers(releases, planned)}
    if covering:
        # The smallest that covers it, so that larger ones remain for larger trials.
        return min(covering, key=lambda name: _weight(covering[name]))
    if any(isinstance(release, NonPrivateRelease) for release in planned):
        raise ConfigurationError(
            f"trial_of: sweep {sweep} holds no reservation for a run without a claim: privacy.noise_seed or "
            "model.log_private_loss is set, or a private number was shown. Leave that out."
        )
    raise ConfigurationError(
        f"trial_of: sweep {sweep} holds no reservation for a run like this one ({len(places)} are left, for other "
        "runs): it was not planned, or every one like it has begun in another folder. Start the trials as task=sweep "
        "does, resume the one that began, or plan another sweep."
    )


def covers(reserved: Sequence[Release], planned: Sequence[Release]) -> bool:
    """Return whether a reservation covers all planned releases of a run."""
    return len(reserved) == len(planned) and all(
        isinstance(held, GaussianRelease)
        and isinstance(wanted, GaussianRelease)
        and held.law == wanted.law
        and held.noise_multiplier <= wanted.noise_multiplier
        and held.count >= wanted.count
        for held, wanted in zip(reserved, planned, strict=True)
    )


def refusal_of_sweep(
    total: Total, runs: int, cost: Callable[[int], float], *, path: Path, terms: Mapping[str, Any]
) -> str:
    """Return why the limit does not cover a sweep of ``runs`` runs, and how many of them fit by their ``cost``."""
    # By bisection: each total may take seconds to compose.
    fit, fails = 0, runs
    while fails - fit > 1:
        middle = (fit + fails) // 2
        fit, fails = (middle, fails) if cost(middle) <= total.total_eps else (fit, middle)
    before = cost(0)
    if fit:
        what = f"The first {fit} of them fit, at {show_epsilon(cost(fit))} in total"
    else:
        beside = f"None of them fits on top of the {show_epsilon(before)} that other runs hold"
        what = beside if before else "None of them fits"
    return (
        f"task.total_eps={total.total_eps:g} does not cover this sweep: with its {runs} private runs, "
        f"task.dataset_ledger={path} would hold epsilon {show_epsilon(total.epsilon)} "
        f"(delta={show_delta(total.delta)}, unit={terms['unit']}, neighbours={terms['neighbours']}, "
        f"composed by {total.accountant}). {what}. Try fewer or noisier trials"
        f"{'' if before else ', or begin the ledger with a larger limit'}."
    )


def _weight(releases: Releases) -> tuple[int, float]:
    """Return a sort key that puts the cheapest of the reservations that cover a run first."""
    gaussian = [release for release in releases if isinstance(release, GaussianRelease)]
    return sum(release.count for release in gaussian), -sum(release.noise_multiplier for release in gaussian)


class DatasetLedger:
    """One run's access to the file that adds up the spending on a data set.

    Guarantees:
        - A reservation that would bring the total past the limit is refused, and changes nothing. If several processes
          reserve at once, their reservations together stay within the limit.
        - A run is charged what it reserved until it settles, and then what its own ledger promises (`judgement`).
        - Delta, unit, neighbours, policy on duplicates and limit are those that the file was created with. Another
          unit, policy or relation is refused, because epsilons do not add up across them; another limit is refused,
          because it would break an earlier promise. Another delta is accepted: the total is stated at the file's delta,
          or at a smaller one that a run of the file promises.
        - A file that replaces the one under which the run began is refused.
        - A run whose own ledger lacks records that it had when it last reserved or settled (a copied or restored run
          folder) is refused: its charges could shrink.

    Args:
        path: ``privacy.dataset_ledger``; created if absent.
        total_eps: ``privacy.total_eps``; None takes the limit that the file was created with.
        sweep: The sweep of which the run is a trial; its first reservation takes over one of the sweep's.
        group: The group of these two settings, for messages: ``task`` where a sweep reserves.
        limit: The setting of the limit, for messages, if it is not ``total_eps``: in a federation, where no setting
            names the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        total_eps: float | None,
        budget: PrivacyBudget,
        accountant: AccountantName = "pld",
        sweep: str | None = None,
        group: str = "privacy",
        limit: str | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self._limit = limit or f"{group}.total_eps"
        self._named = f"{group}.dataset_ledger={self.path}" if limit is None else str(self.path)
        self._budget_group = "privacy" if limit is None else limit.rpartition(".")[0]
        self._less = (
            "Lower privacy.eps, or plan fewer steps." if limit is None else "Plan fewer steps, rounds or requests."
        )
        self._total_eps, self._budget, self._accountant = total_eps, budget, accountant
        self._sweep, self._group = sweep, group
        # The identity of the file as this object first saw it; another file at the same path would forget what was
        # spent.
        self._identity: str | None = None

    def begin(self) -> str:
        """Return the random identity in the file's first record; create the file if absent."""
        with DatasetFile.open(self.path) as file:
            terms = self._agreed(file.book)
            if file.book.terms is None:
                file.append("dataset", schema=SCHEMA, id=secrets.token_hex(16), **terms)
            self._identity = str(file.book.identity)
            return self._identity

    def require(self, planned: Charge | Sequence[Release]) -> Total:
        """Return the total including ``planned``, without taking the lock or writing."""
        book = DatasetFile.read(self.path).book if self.path.exists() else DatasetBook()
        terms = self._agreed(book)
        taken = self._place(book, "", Charge.of(planned))
        return self._checked({**_without(book.entries, taken), "": _planned(planned)}, book, terms, "")

    def terms(self) -> dict[str, Any]:
        """Return limit, delta, unit and neighbours of the file, or of a file created now; writes nothing."""
        return dict(self._agreed(DatasetFile.read(self.path).book if self.path.exists() else DatasetBook()))

    def total(self) -> Total:
        book = DatasetFile.read(self.path).book
        return self._total(book.entries, self._agreed(book))

    def releases(self) -> dict[str, list[Release]]:
        """Return the charge of each run by name; runs with the same name are combined."""
        found: dict[str, list[Charge]] = {}
        for entry in DatasetFile.read(self.path).book.entries.values():
            found.setdefault(entry.name, []).append(entry.charge)
        return {name: composed(charges) for name, charges in found.items()}

    def charges_of(self, sweep: str) -> dict[str, Charge]:
        """Return the charge of each started trial of a sweep, by run identity."""
        book = DatasetFile.read(self.path).book
        return {run: book.entries[run].charge for run, own in book.trials.items() if own == sweep}

    def run_ids(self) -> set[str]:
        """Return the permanent identities of all runs that ever made a reservation."""
        return set(DatasetFile.read(self.path).book.entries)

    def check_history(self, run_id: str, heads: Sequence[str]) -> None:
        """Refuse a run as `reserve` would, by the hashes of its own ledger's records, without taking the lock."""
        _check_history(run_id, DatasetFile.read(self.path).book, heads, self._named)

    def reserve(
        self,
        run_id: str,
        *,
        spent: Charge | Sequence[Release],
        planned: Charge | Sequence[Release],
        heads: Sequence[str],
        name: str,
    ) -> Total:
        """Charge the data set with everything a run has released and plans; replaces its reservation.

        If this is refused, a run that had a reservation settles to ``spent``. ``heads`` are the hashes of all records
        of the run's own ledger, in order.
        """
        with DatasetFile.open(self.path) as file:
            book = file.book
            terms = self._agreed(book)
            _check_history(run_id, book, heads, self._named)
            taken = self._place(book, run_id, Charge.of(planned))
            try:
                others = _without(book.entries, taken)
                total = self._checked({**others, run_id: _planned(planned)}, book, terms, run_id)
            # What the run had reserved before and will not use now is given back.
            except BudgetExceededError:
                if run_id in book.entries:
                    file.append("settle", **self._facts(run_id, spent, heads, name, terms))
                raise
            if book.terms is None:
                file.append("dataset", schema=SCHEMA, id=secrets.token_hex(16), **terms)
            over = {} if taken is None else {"takes": taken}
            file.append("reserve", **self._facts(run_id, planned, heads, name, terms), **over)
            return total

    def settle(self, run_id: str, *, spent: Charge | Sequence[Release], heads: Sequence[str], name: str) -> Total:
        """Replace a run's reservation by the charge in its own ledger; never refused for the cost."""
        with DatasetFile.open(self.path) as file:
            terms = self._agreed(file.book)
            _check_history(run_id, file.book, heads, self._named)
            file.append("settle", **self._facts(run_id, spent, heads, name, terms))
            return self._total(file.book.entries, terms)

    def hold(self, sweep: str, places: Sequence[Charge | Sequence[Release]], *, name: str) -> Total:
        """Reserve all runs of a sweep before the first one starts; existing reservations stay."""
        if not self.path.exists():
            self._to_hold(DatasetBook(), sweep, places)  # a refusal leaves no file behind
        with DatasetFile.open(self.path) as file:
            terms, new, total = self._to_hold(file.book, sweep, places)
            if file.book.terms is None:
                file.append("dataset", schema=SCHEMA, id=secrets.token_hex(16), **terms)
            for key, place in new.items():
                file.append("reserve", **self._facts(key, place, [], name, terms), sweep=sweep)
            return total

    def _to_hold(
        self, book: DatasetBook, sweep: str, places: Sequence[Charge | Sequence[Release]]
    ) -> tuple[dict[str, Any], dict[str, Charge], Total]:
        """Return the terms, the sweep's reservations that are not in the file yet, and the total with them."""
        terms = self._agreed(book)
        given = {f"{sweep}/{number}": Charge.of(place) for number, place in enumerate(places)}
        new = {key: place for key, place in given.items() if key not in book.entries and key not in book.taken}
        held = {key: replace(_planned(place), sweep=sweep) for key, place in new.items()}
        total = self._total({**book.entries, **held}, terms)
        if total.epsilon > total.total_eps:

            def cost(count: int) -> float:
                return self._total({**book.entries, **dict(list(held.items())[:count])}, terms).epsilon

            raise BudgetExceededError(refusal_of_sweep(total, len(new), cost, path=self.path, terms=terms))
        return terms, new, total

    def give_back(self, sweep: str) -> Total:
        """Release a sweep's reservations for trials that have not begun, permanently."""
        with DatasetFile.open(self.path) as file:
            terms = self._agreed(file.book)
            # A list, because the entries change while they are settled.
            for key, entry in [item for item in file.book.entries.items() if item[1].sweep == sweep]:
                file.append("settle", **self._facts(key, [], [], entry.name, terms))
            return self._total(file.book.entries, terms)

    def _place(self, book: DatasetBook, run_id: str, planned: Charge) -> str | None:
        """Return the sweep's reservation that a run takes over when it first reserves; None outside a sweep."""
        if self._sweep is None or run_id in book.entries:
            return None
        places = {
            key: entry.charge.own
            for key, entry in book.entries.items()
            if entry.sweep == self._sweep and entry.charge.earlier == planned.earlier
        }
        return choose_place(places, planned.own, sweep=self._sweep)

    def _agreed(self, book: DatasetBook) -> dict[str, Any]:
        """Return the terms of the file, or those with which it would be created now."""
        budget, group = self._budget, self._group
        if self._identity not in (None, book.identity):
            raise LedgerError(
                f"{self._named} is another file than at the start of this run. Restore that file: it records what all "
                "runs have spent."
            )
        if book.terms is None:
            if self._total_eps is None:
                raise ConfigurationError(
                    f"{group}.dataset_ledger={self.path} is new and has no limit yet: set {group}.total_eps."
                )
            terms = {name: value for name, value in budget.to_dict().items() if name != "eps"}
            terms["total_eps"] = float(self._total_eps)
        else:
            terms = book.terms
        budget.refuse_other_units(
            terms["unit"],
            terms["neighbours"],
            terms["duplicates"],
            f"{self._named} counts under",
            unit_by=terms.get("unit_by"),
            group=self._budget_group,
        )
        if self._total_eps is not None and self._total_eps != terms["total_eps"]:
            raise ConfigurationError(
                f"{self._limit}={self._total_eps:g}, but {self.path} was begun with {terms['total_eps']:g}, and no "
                "later run changes the limit of a data set. Set it to that, or to null to take it from the file."
            )
        return terms

    def _facts(
        self,
        run_id: str,
        given: Charge | Sequence[Release],
        heads: Sequence[str],
        name: str,
        terms: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the facts for a run's record, including its delta if that is below the file's."""
        # Written where a run promises less than the file does, so that later totals keep that promise.
        smaller = {"delta": self._budget.delta} if self._budget.delta < terms["delta"] else {}
        facts = {"run_id": run_id, "run": name, "run_head": heads[-1] if heads else ""}
        return {**facts, **Charge.of(given).to_dict(), **smaller}

    def _total(self, entries: Mapping[str, Entry], terms: Mapping[str, Any]) -> Total:
        # If the data set has grown since the file was created, each of its units is promised a smaller delta, even
        # where the run that adds up now covers few of them.
        promised = [entry.delta for entry in entries.values() if entry.delta is not None]
        delta = min([terms["delta"], self._budget.delta, *promised])
        value, how = compose_across_runs(
            composed(entry.charge for entry in entries.values()),
            delta=delta,
            neighbours=terms["neighbours"],
            accountant=self._accountant,
        )
        return Total(
            epsilon=value,
            delta=delta,
            accountant=how,
            total_eps=terms["total_eps"],
            runs=len(entries),
            running=sum(not entry.settled for entry in entries.values()),
        )

    def _checked(self, entries: Mapping[str, Entry], book: DatasetBook, terms: Mapping[str, Any], run_id: str) -> Total:
        total = self._total(entries, terms)
        if total.epsilon <= total.total_eps:
            return total
        others = _without(book.entries, run_id)
        before = self._total(others, terms)
        held = [entry.name for entry in others.values() if not entry.settled]
        waiting = "" if not held else (
            f" {len(held)} of them still hold a reservation ({', '.join(held[:3])}{', …' if len(held) > 3 else ''}): "
            "wait for them to end, or resume those that were killed."
        )  # fmt: skip
        raise BudgetExceededError(
            f"{self._limit}={total.total_eps:g} does not cover this run: the {before.runs} other runs in "
            f"{self._named} hold epsilon {show_epsilon(before.epsilon)}, and with this one it "
            f"would be {show_epsilon(total.epsilon)} (delta={show_delta(total.delta)}, unit={terms['unit']}, "
            f"neighbours={terms['neighbours']}, composed by {total.accountant}).{waiting} {self._less}"
        )


def _without(entries: Mapping[str, Entry], name: str | None) -> dict[str, Entry]:
    return {key: entry for key, entry in entries.items() if key != name}


def _planned(given: Charge | Sequence[Release]) -> Entry:
    return Entry(Charge.of(given), "", False, "")


def _check_history(run_id: str, book: DatasetBook, heads: Sequence[str], named: str) -> None:
    """Refuse a run whose own ledger lacks what it held at its last reservation or settlement."""
    entry = book.entries.get(run_id)
    if entry is not None and entry.head and entry.head not in heads:
        raise LedgerError(
            f"Run {run_id} ({entry.name}) has a ledger older than the one that {named} knows: its folder "
            "was copied or restored, and its later spending would be lost. Resume the newest copy."
        )
