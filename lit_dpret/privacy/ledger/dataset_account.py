"""A run's account in the data-set ledger: opened before the first random draw, settled at the end.

To that ledger, a copy of a run folder is the same run. A copy that continues alongside its original would take over the
reservation that the original still spends. A lock next to the ledger (``flock``), held from reservation to settlement,
refuses that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lit_dpret.errors import BudgetExceededError
from lit_dpret.privacy.accounting.releases import NonPrivateRelease, Release
from lit_dpret.privacy.ledger.chain import lock, storage_error, unlock
from lit_dpret.privacy.ledger.dataset_file import TOTAL_EVENT, Charge, DatasetFile, EarlierRun, Total
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.gate import ReleaseGate
from lit_dpret.privacy.ledger.judgement import owed_releases
from lit_dpret.privacy.ledger.private_run import PrivateRun
from lit_dpret.privacy.ledger.run_ledger import (
    NOISE_KINDS,
    NOT_COUNTED_EVENT,
    PrivacyLedger,
    counted_in,
    forthcoming_releases,
    noise_keys,
    plans_of,
)


class RunLock:
    """A lock held by at most one object in all processes that name the same ledger and run.

    It ends with its process, however the process ends, and leaves no file behind when it is released.
    """

    def __init__(self, ledger: Path, run_id: str) -> None:
        # Resolved: two paths to one file must lead to one lock.
        ledger = ledger.expanduser().resolve()
        self.path = ledger.with_name(f"{ledger.name}.{run_id}.lock")
        self._run_id = run_id
        self._file: IO[bytes] | None = None
        self._pid = os.getpid()

    def take(self) -> None:
        """Take the lock; no effect if this object already has it."""
        while self._file is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (kept open: it carries the lock)
            except OSError as error:
                raise storage_error(self.path, "opened for writing", error, knob=DatasetFile.knob) from error
            try:
                refusal = (
                    f"Run {self._run_id} is already running, in this folder or in a copy of it: {self.path} is "
                    "locked, and two copies of one run would spend one reservation twice. Wait for the other one to "
                    "end."
                )
                lock(file, self.path, wait=0.0, refusal=refusal, knob=DatasetFile.knob)
            except BaseException:
                file.close()
                raise
            if _is_at(file, self.path):
                self._file, self._pid = file, os.getpid()
            else:  # the previous holder removed the file after this object had opened it
                file.close()

    def release(self) -> None:
        """Release the lock and remove its file; no effect in a forked worker."""
        file, self._file = self._file, None
        if file is None:
            return
        # A fork shares the lock: a worker that ends must not release its parent's lock.
        if os.getpid() == self._pid:
            if _is_at(file, self.path):
                self.path.unlink(missing_ok=True)
            unlock(file)
        file.close()


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether ``path`` still leads to ``file``."""
    ours = os.fstat(file.fileno())
    try:
        theirs = os.stat(path)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)


class RunAccount:
    """The charge of one run in its data-set ledger: reserved, and settled when the run ends.

    Guarantees:
        - A run whose own ledger refutes its claim is counted without privacy (`owed_releases`). A model that it starts
          from is counted with it, once for all runs that start from it, unless the model's own run was counted.
        - From the first reservation until the account is settled or closed, no other object reserves for the same run:
          a copy of the run folder cannot continue alongside its original.
    """

    def __init__(self, ledger: DatasetLedger, run: PrivateRun, earlier: Sequence[EarlierRun] = ()) -> None:
        self._ledger, self._run, self._earlier = ledger, run, tuple(earlier)
        self._lock = RunLock(ledger.path, run.run_id)
        self._held = False

    def charge(self, due: Iterable[Release] | None) -> Total:
        """Reserve ``due``, the run's whole charge once its planned steps are made; None if it makes no more steps."""
        self._lock.take()
        state = self._state()
        owed = state["spent"].own
        # Planned too, or the reservation would look finite until the run settles.
        refuted = [release for release in owed if isinstance(release, NonPrivateRelease)]
        planned = Charge.of(owed if due is None else [*due, *refuted], self._earlier)
        try:
            total = self._ledger.reserve(self._run.run_id, planned=planned, **state)
        except BaseException as error:
            if isinstance(error, BudgetExceededError):
                note_not_counted(self._run, self._ledger)
            # A refused second reservation leaves the first one, and its lock, in place.
            if not self._held:
                self._lock.release()
            raise
        self._held = True
        return total

    def settle(self) -> None:
        """Return the unused reservation, and record the total in the run's ledger; once."""
        if not self._held:
            return
        total = self._ledger.settle(self._run.run_id, **self._state())
        self._held = False
        self._lock.release()
        self._run.ledger.append("event", name=TOTAL_EVENT, **total.to_dict())

    def close(self) -> None:
        """Allow another process to continue the run; the unsettled reservation stays charged."""
        self._lock.release()

    def _state(self) -> dict[str, Any]:
        records = self._run.ledger.records
        heads = [str(record["hash"]) for record in records]
        spent = Charge.of(owed_releases(records), self._earlier)
        return {"spent": spent, "heads": heads, "name": str(self._run.ledger.path.parent)}


class DatasetAccount(RunAccount):
    """The account of a run whose gate grants its steps.

    Guarantees:
        - The gate grants no step that is not reserved.
        - A run whose steps cost more than it reserved (less noise, another law) reserves again before its next step,
          and is refused if the limit does not cover it.
    """

    def __init__(
        self, ledger: DatasetLedger, gate: ReleaseGate, *, steps: int, earlier: Sequence[EarlierRun] = ()
    ) -> None:
        super().__init__(ledger, gate.run, earlier)
        self._gate, self._steps, self._departures = gate, steps, 0

    def reserve(self) -> None:
        """Reserve everything that the run may still release."""
        self.charge(self._gate.forthcoming(self._steps))
        self._departures = self._gate.departures
        # Last: until here the gate grants nothing beyond what was reserved before.
        self._gate.reserved_until = self._steps

    def keep_covered(self) -> None:
        """Renew the reservation if a step cost more than reserved."""
        if self._gate.departures != self._departures:
            self.reserve()


@contextmanager
def reserved(
    run: PrivateRun, dataset: DatasetLedger | None, release: Release, *, steps: int, earlier: Sequence[EarlierRun] = ()
) -> Iterator[Callable[[int], None]]:
    """Count the releases of a run without training in its data-set ledger; settle when the block ends.

    Yield a function that reserves for the releases from one step on, to be called before such a step is announced.
    Without ``dataset`` it does nothing.
    """
    if dataset is None:
        yield lambda step: None
        return
    account = RunAccount(dataset, run, earlier)

    def reserve(first: int) -> None:
        records = run.ledger.records
        due = forthcoming_releases(records, release, first=first, until=steps, attempt=run.attempt)
        account.charge(None if first >= steps else due)  # a mere repetition is charged already

    try:
        reserve(steps)
        yield reserve
        account.settle()
    finally:
        account.close()


def require_room(
    ledger: DatasetLedger, path: Path, step: Release, *, steps: int, earlier: Sequence[EarlierRun]
) -> None:
    """Refuse a run that its data-set ledger does not cover, before anything is written.

    A run that the ledger already counts is let through, unless it is running elsewhere or its own ledger is an older
    one: its reservation is replaced when it continues. A run that names this ledger and was killed before the
    reservation is let through too; the reservation then decides.
    """
    records = PrivacyLedger.read(path).records if path.exists() else []
    # The check does not create the file: a refused run leaves nothing behind.
    if ledger.path.exists():
        known = ledger.run_ids() & {plan["run_id"] for plan in plans_of(records)}
        for run_id in known:  # now, while the folder is unchanged: the reservation would come after its next record
            lock = RunLock(ledger.path, run_id)
            lock.take()
            lock.release()
            ledger.check_history(run_id, [str(record["hash"]) for record in records])
        if known or ledger.begin() in counted_in(records):
            return
    keys = noise_keys(records)
    first = 1 + max((made for _, made in keys), default=-1)
    attempt = max((attempt for attempt, _ in keys), default=0)
    due = forthcoming_releases(records, step, first=first, until=steps, attempt=attempt)
    refuted = [release for release in owed_releases(records) if isinstance(release, NonPrivateRelease)]
    ledger.require(Charge.of([*due, *refuted], earlier))


def note_not_counted(run: PrivateRun, ledger: DatasetLedger) -> None:
    """Record in a run's ledger that its data-set ledger refused it, so that it may continue; not if counted."""
    identity = ledger.begin()
    if run.run_id not in ledger.run_ids() and not was_reserved(run.ledger.records, identity):
        text = "privacy.dataset_ledger refused this run and counts nothing of it"
        run.ledger.append("event", name=NOT_COUNTED_EVENT, dataset_ledger=identity, text=text)


def was_reserved(records: Iterable[Mapping[str, Any]], identity: str) -> bool:
    """Return whether a run's records show that the data-set ledger with this identity has counted it."""
    named = False
    for record in records:
        if record["kind"] == "plan":
            named = record.get("dataset_ledger") == identity
        elif named and (record["kind"] in NOISE_KINDS or record.get("name") == TOTAL_EVENT):
            return True
    return False
