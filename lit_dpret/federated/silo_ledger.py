"""One silo's spending over all rounds, stages and requests, in one file next to its data that the server never sees.

Every round is a private run with its own ledger. All are counted in the silo's data-set ledger
(`lit_dpret.privacy.ledger.dataset_ledger`), which reserves before the first noise and composes all releases. Epsilons
of different units do not add up, so queries have one ledger and the passages of a private collection another.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_dpret.errors import (
    BudgetExceededError,
    ConfigurationError,
    LedgerError,
    PrivateDataError,
    UnsupportedAccountingError,
)
from lit_dpret.privacy.accounting.accountant import DecimalGrid, calibrate_noise, least
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease, Release, SamplingLaw, merge
from lit_dpret.privacy.budget import (
    AccountantName,
    Neighbours,
    NoiseName,
    PrivacyBudget,
    Unit,
    require_delta,
    with_rounding_paid,
)
from lit_dpret.privacy.ledger.dataset_account import RunLock
from lit_dpret.privacy.ledger.dataset_file import Charge, DatasetBook, DatasetFile, Total, compose_across_runs, composed
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.judgement import owed_releases
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, noise_keys, plans_of, recorded_start
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.noise import KeyedStream, load_secret, noise_source

_DIGITS = 3
_RELEASES = "releases"
# The file names of a silo's ledgers, for its queries and for its passages.
QUERY_LEDGER, PASSAGE_LEDGER = "silo_ledger.query.jsonl", "silo_ledger.passage.jsonl"


class SiloLedger:
    """The budget of one silo for one unit of privacy, and all charges against it.

    Guarantees:
        - No noise is drawn before its release is in a ledger on disk and covered by the budget.
        - Rounds compose: `epsilon` covers all releases together, whichever process made them.
        - A killed run stays charged with what it had reserved until it resumes, or until it is abandoned and charged
          with everything that its own ledger announced (`settle_broken`).
        - If ``folder`` holds the ledger of a request or answer that this file does not know, the file was lost or
          replaced by an older copy, and nothing more is released (`require_whole`).

    Args:
        folder: The folder of the silo's ledgers, created if missing; the same for every run on these data.
        budget: The budget of everything that is released about the silo.
        accountant: ``pld`` or ``rdp``.
        noise: ``gaussian`` or ``discrete``, for everything that is released (`lit_dpret.privacy.noise`).
        secret_file: Keys the noise; null for the user's state folder. It must not be in ``folder``.
    """

    def __init__(
        self,
        folder: str | Path,
        budget: PrivacyBudget,
        *,
        accountant: AccountantName = "pld",
        noise: NoiseName = "gaussian",
        secret_file: str | Path | None = None,
    ) -> None:
        self.folder, self.budget, self.accountant, self.noise = Path(folder), budget, accountant, noise
        self.secret_file = None if secret_file is None else Path(secret_file)
        self.path = self.folder / (PASSAGE_LEDGER if _side(budget.unit) == "passage" else QUERY_LEDGER)
        self._ledger = DatasetLedger(
            self.path, total_eps=budget.eps, budget=budget, accountant=accountant, limit=_knob(budget)
        )
        terms = self._book.terms
        if terms is not None and terms["total_eps"] != budget.eps:
            raise ConfigurationError(
                f"{_limit(budget)}, but {self.path} was begun with {terms['total_eps']:g}: a promise about these data "
                "cannot change. Set it to that."
            )
        self._require_known(sorted((self.folder / _RELEASES).glob("*.jsonl")))

    def require_whole(self, state: Path) -> None:
        """Refuse to continue if rounds in a state folder made releases that this file lacks."""
        self._require_known(sorted(state.glob(f"*/attempt-*/{LEDGER_NAME}")))

    def _require_known(self, ledgers: Sequence[Path]) -> None:
        known: set[str] | None = None
        for path in ledgers:
            records = PrivacyLedger.read(path).records
            plan = next(iter(plans_of(records)), {})
            theirs = _side(plan.get("unit")) != _side(self.budget.unit) or plan.get("noise_seed") is not None
            if theirs or not noise_keys(records):
                continue
            if known is None:  # read once, and only if a ledger released something
                known = set(self._book.entries)
            if plan.get("run_id") not in known:
                raise LedgerError(
                    f"{self.path} has no entry for {path}: entries were lost, or it is an older copy. Restore the "
                    "newest copy: without it the spending is unknown."
                )

    def training(self, *, noise_multiplier: float, max_grad_norm: float) -> DPSGD:
        budget = self.budget
        mode = DPSGD(
            eps=budget.eps,
            delta=budget.delta,
            unit=budget.unit,
            neighbours=budget.neighbours,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            accountant=self.accountant,
            noise=self.noise,
            secret_file=self.secret_file,
            dataset_ledger=self.path,
            total_eps=budget.eps,
        )
        mode.limit = _knob(budget)
        return mode

    @contextmanager
    def gaussian(
        self, label: str, *, noise_multiplier: float, count: int
    ) -> Iterator[Callable[[Tensor, float], Tensor]]:
        """Yield a mechanism that adds noise to at most ``count`` tables of known sensitivity, each recorded first.

        The mechanism takes a table and its sensitivity C when one unit is emptied, added or removed. All ``count``
        releases are reserved before the first one. ``noise_multiplier`` is the standard deviation of the noise divided
        by the sensitivity.
        """
        if not noise_multiplier > 0 or count < 1:
            raise ConfigurationError(
                f"{label}: noise_multiplier={noise_multiplier} and count={count} must be positive."
            )
        release = GaussianRelease(noise_multiplier=noise_multiplier, law=FullBatch(), label=label)
        planned = GaussianRelease(noise_multiplier=noise_multiplier, law=FullBatch(), count=count, label=label)
        run_id, nonce = secrets.token_hex(8), secrets.token_hex(16)
        stream = KeyedStream(load_secret(self.secret_file, run_dir=self.folder), run_id)
        self._ledger.begin()
        self._ledger.require([planned])
        path = self.folder / _RELEASES / f"{label}-{run_id}.jsonl"
        with PrivacyLedger.open(path) as ledger:
            ledger.append(
                "plan", run_id=run_id, attempt=0, nonce=nonce, mode=label, plan=None,
                unit=self.budget.unit, neighbours=self.budget.neighbours, duplicates=self.budget.duplicates,
                planned_steps=count,
            )  # fmt: skip

            def heads() -> list[str]:
                return [str(record["hash"]) for record in ledger.records]

            self._ledger.reserve(run_id, spent=[], planned=[planned], heads=heads(), name=label)
            done = 0

            def noised(table: Tensor, sensitivity: float) -> Tensor:
                nonlocal done
                if done == count:
                    raise ConfigurationError(f"{label}: all of the {count} reserved releases have been made.")
                # Rounding to a grid moves the table a little further. The noise covers that too.
                sensitivity = with_rounding_paid(sensitivity, self.noise)
                std = noise_multiplier * sensitivity
                # Announce before drawing the noise: a kill in between leaves a release charged but never made.
                ledger.announce((0, done), release)
                source = noise_source(self.noise, stream, noise_multiplier=noise_multiplier, coordinates=table.numel())
                found = source.noised(table, std=std, attempt=0, step=done, parameter=label, salt=nonce)
                ledger.confirm((0, done), noise_std=std, sensitivity=sensitivity, denominator=1.0, law=FullBatch())
                done += 1
                return found

            yield noised
            ledger.append("end", reason="finished", steps=done)
            self._ledger.settle(run_id, spent=owed_releases(ledger.records), heads=heads(), name=label)

    def settle_broken(self, path: Path) -> None:
        """Charge an interrupted and abandoned run exactly the releases that its own ledger announced, made or not.

        Everything reserved beyond them is given back.

        Raises:
            LedgerError: The run is still going on, or its ledger is damaged.
        """
        # A running release holds its ledger open for writing: if it opens here, no process is writing it.
        with PrivacyLedger.open(path) as own:
            run_id = next((str(plan["run_id"]) for plan in plans_of(own.records)), "")
            entry = self._book.entries.get(run_id)
            if entry is None or entry.settled:
                return
            lock = RunLock(self.path, run_id)
            lock.take()
            try:
                spent = Charge.of(owed_releases(own.records, as_made=True), entry.charge.earlier)
                heads = [str(record["hash"]) for record in own.records]
                self._ledger.settle(run_id, spent=spent, heads=heads, name=entry.name)
            finally:
                lock.release()

    def settle_broken_releases(self) -> None:
        """Settle interrupted requests and answers (`settle_broken`); leave running ones unchanged."""
        held = {run_id for run_id, entry in self._book.entries.items() if not entry.settled}
        for path in sorted((self.folder / _RELEASES).glob("*.jsonl")):
            if path.stem.rpartition("-")[2] in held:
                with suppress(LedgerError):  # still running in another process
                    self.settle_broken(path)

    @property
    def _book(self) -> DatasetBook:
        return DatasetFile.read(self.path).book if self.path.exists() else DatasetBook()

    def total(self) -> Total | None:
        """Return the spent and reserved total; None if nothing was ever charged."""
        return self._ledger.total() if self.path.exists() else None

    def epsilon(self) -> float:
        """Return the epsilon of all charges, at the smaller of the budget's delta and the file's delta."""
        total = self.total()
        return 0.0 if total is None else total.epsilon

    def charged(self) -> list[Release]:
        return composed(entry.charge for entry in self._book.entries.values())

    def require_charged(self, records: Sequence[Mapping[str, Any]], what: str) -> list[Release]:
        """Return what a private run was charged here, given the records of its own ledger.

        After it returns, everything that the run released is known to be counted in this file.

        Raises:
            PrivateDataError: The run is not charged here, started from another private run, or was charged otherwise.
        """
        if self.path.exists():
            self._ledger.require([])
        plan = next(iter(plans_of(records)), {})
        entry = self._book.entries.get(str(plan.get("run_id")))
        if entry is None:
            raise PrivateDataError(
                f"{what} was not charged to {self.path.name}: its epsilon would be additional. Name the ledgers that "
                "contain it (federated.state, or ledgers in the document of lit-dpret silo), or train it under these "
                "(task=federated_generators)."
            )
        if recorded_start(records) is not None:
            raise PrivateDataError(
                f"{what} started from another private run, unknown to {self.path.name}. Train it from a public model."
            )
        releases = entry.charge.releases
        own, charged = (sorted(str(one.to_dict()) for one in of) for of in (merge(owed_releases(records)), releases))
        if entry.head not in {record.get("hash") for record in records} or own != charged:
            raise PrivateDataError(
                f"{what} and {self.path.name} disagree on its releases: one of the two is an older copy or was "
                "truncated. Restore the newest copy of both."
            )
        return releases


@dataclass(frozen=True)
class NoisePlan:
    """Noise multipliers that keep the whole plan within a budget."""

    training: float  # for every step of every round
    request: float | None  # for every iteration of centroids; None if no request is planned


@lru_cache(maxsize=64)  # computed once for all silos of the same size
def split_budget(
    budget: PrivacyBudget,
    training: tuple[tuple[SamplingLaw, int], ...],
    *,
    requests: int = 0,
    request_share: float = 0.3,
    spent: tuple[Release, ...] = (),
    accountant: AccountantName = "pld",
) -> NoisePlan:
    """Return the least training noise that keeps the whole plan, composed, within the budget.

    Args:
        budget: The budget of one silo.
        training: The law and the number of steps of each stage, over all rounds.
        requests: Iterations of centroids, over all refreshes.
        request_share: The part of epsilon that the requests may cost by themselves, between 0 and 1.
        spent: Releases on the same silo's units from before this plan.
        accountant: ``pld`` or ``rdp``.
    """
    asked: list[Release] = [*spent]
    request = None
    terms: dict[str, Any] = {"delta": budget.delta, "neighbours": budget.neighbours, "accountant": accountant}
    if requests:
        request = calibrate_noise(
            eps=request_share * budget.eps, law=FullBatch(), steps=requests,
            knob="federated.privacy.request_share * federated.privacy.eps", **terms,
        )  # fmt: skip
        asked.append(GaussianRelease(noise_multiplier=request, law=FullBatch(), count=requests, label="fed_request"))
    grid = DecimalGrid(digits=_DIGITS)

    def total(index: int) -> float:
        made = [GaussianRelease(noise_multiplier=grid[index], law=law, count=steps) for law, steps in training if steps]
        return epsilon([*made, *asked], **terms)

    if not any(steps for _, steps in training):
        raise ConfigurationError("No step of training is planned, so there is no noise to choose for it.")
    most = grid.index(1e4)
    found = least(total, budget.eps, start=0, most=most, stride=2 * 10**_DIGITS, place=grid.__getitem__)
    if found is None or not math.isfinite(total(found)):
        before = f" after {len(spent)} releases" if spent else ""
        raise ConfigurationError(
            f"federated.privacy.eps={budget.eps:g} is too small for the plan{before}. Plan fewer rounds, or raise it, "
            "which works only before the first release."
        )
    return NoisePlan(grid[found], request)


class NothingLeftError(BudgetExceededError):
    """The budget is exhausted by releases of a run that cannot be repeated."""


def noise_of_rest(
    planned: NoisePlan,
    budget: PrivacyBudget,
    training: Sequence[tuple[SamplingLaw, int]],
    *,
    requests: int = 0,
    spent: Sequence[Release] = (),
    accountant: AccountantName = "pld",
) -> NoisePlan:
    """Return the noise for the rest of a run after some releases were lost.

    Guarantees:
        - The epsilon of all that is left and all that is charged, composed, is at most ``budget.eps``.
        - It is the planned noise if that suffices. Otherwise the noise of training and of requests is raised by the
          same factor, the least with three digits.

    Raises:
        NothingLeftError: No noise keeps the rest within the budget.
    """
    grid = DecimalGrid(digits=_DIGITS)

    def total(index: int) -> float:
        factor = grid[index]
        rest = [
            GaussianRelease(noise_multiplier=factor * planned.training, law=law, count=steps)
            for law, steps in training
            if steps
        ]
        if requests and planned.request is not None:
            rest.append(GaussianRelease(noise_multiplier=factor * planned.request, law=FullBatch(), count=requests))
        return epsilon([*spent, *rest], delta=budget.delta, neighbours=budget.neighbours, accountant=accountant)

    if total(0) <= budget.eps:
        return planned
    found = least(total, budget.eps, start=0, most=grid.index(1e3), stride=10**_DIGITS, place=grid.__getitem__)
    if found is None:
        raise NothingLeftError(
            f"{_limit(budget)}: what this run released before it was interrupted cannot be repeated and leaves nothing "
            "for the rest. Start over in a new folder with new ledgers; both together compose to more than that."
        )
    factor = grid[found]
    return NoisePlan(factor * planned.training, None if planned.request is None else factor * planned.request)


def silo_budget(
    eps: float, delta: float | None, *, unit: Unit, neighbours: Neighbours, units: int | None
) -> PrivacyBudget:
    """Return a silo's budget; a null delta becomes 1/(2n) if the number of units is public."""
    public = None if neighbours == "add_or_remove" else units
    if delta is None and public is None:
        raise ConfigurationError(
            "federated.privacy.delta=null cannot be derived with federated.privacy.neighbours=add_or_remove, under "
            "which the number of units is private. Set a constant below 1/n."
        )
    knob = "federated.privacy.delta"
    if delta is not None:
        require_delta(delta, knob=knob)
    budget = PrivacyBudget(
        eps=eps, delta=1 / (2 * (public or 1)) if delta is None else delta, unit=unit, neighbours=neighbours
    )
    if public is not None:
        budget.refuse_large_delta(public, knob=knob)
    return budget


def spent_together(ledgers: Iterable[Path], *, accountant: AccountantName = "pld") -> float:
    """Return the epsilon of all charges in several ledgers of one silo with the same unit.

    Guarantees:
        - A run or release that is recorded in several copies counts once. Where copies charge it differently, every
          version counts.
        - The epsilon is stated at the smallest delta of all ledgers, so it is never less than what one of them states.
    """
    books = [DatasetFile.read(path).book for path in ledgers]
    terms = [book.terms for book in books if book.terms is not None]
    entries = dict.fromkeys((name, entry.charge) for book in books for name, entry in book.entries.items())
    if not entries:
        return 0.0
    kinds = {" ".join(str(one[name]) for name in ("unit", "neighbours", "duplicates", "unit_by")) for one in terms}
    if len(kinds) > 1:
        raise UnsupportedAccountingError(f"Ledgers of {' and of '.join(sorted(kinds))} do not add up.")
    return compose_across_runs(
        composed(charge for _, charge in entries),
        delta=min(float(one["delta"]) for one in terms),
        neighbours=terms[0]["neighbours"],
        accountant=accountant,
    )[0]


def _limit(budget: PrivacyBudget) -> str:
    """Return the setting that limits a budget's epsilon, with its value."""
    return f"{_knob(budget)}={budget.eps:g}"


def _knob(budget: PrivacyBudget) -> str:
    return f"federated.privacy.{'collection_eps' if _side(budget.unit) == 'passage' else 'eps'}"


def _side(unit: object) -> str:
    """Return which records a unit is about. A pair is part of a query, and releases of both add up."""
    return "passage" if unit == "passage" else "query"
