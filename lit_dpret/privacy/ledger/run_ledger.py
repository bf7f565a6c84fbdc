"""The ledger of a run: its releases, recorded before they are made, and their cost.

Before noise is drawn, an *intent* is on disk; after it, a *release* states what was really added. Epsilon is computed
from these records alone. Nothing private enters: no norm, no realised batch size, no secret.
``lit_dpret.cards.card.verify_card`` detects cut records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

from lit_dpret.errors import ConfigurationError, LedgerError, schema_problem
from lit_dpret.privacy.accounting.releases import (
    FullBatch,
    GaussianRelease,
    NonPrivateRelease,
    Release,
    SamplingLaw,
    Shuffle,
    merge,
    release_from_dict,
)
from lit_dpret.privacy.ledger.chain import Book, ChainedFile
from lit_dpret.settings import is_number, is_whole

Key = tuple[int, int]

SCHEMA = "lit-dpret/privacy-ledger/1"
"""The schema that every ``plan`` record states."""

NOT_COUNTED_EVENT = "not_counted"
START_EVENT = "init_from"
"""The event in a ledger that names the model the run started from, and the cost of that model."""

NOISE_KINDS = ("intent", "release", "replay")
"""The records without which no noise is drawn: each is in a ledger before, or right after, a step's noise."""

WRONG_UNITS_SEEN = "units_unknown"
"""The event of an attempt whose data set gave rows of other units than were drawn; it voids the attempt."""

SAMPLING_DEPARTURE = "sampling_departure"
"""The event of an attempt whose loader was seen to draw more units than the law allows."""

SECRET_CHANGED = "secret_changed"
"""The event of a resume under another secret, so that its data set cannot be compared with the earlier one."""

PRIVATE_EVENT = "private_evaluation"
"""The event before metrics of private queries are released; it holds a ``NonPrivateRelease``."""

PRIVATE_LOG_EVENT = "private_log"
"""The event before a number that is not declared public is first logged, under ``log_private_loss``."""

DECLARED_EVENT = "declared_evaluation"
"""The event that records whose queries a run was evaluated on, as its settings declare."""

UNITS_UNNAMED = "units_unnamed"
"""The event that records that the training rows do not name the query, user or image they belong to."""

FAILED = "failed"
"""The reason for an end that may be caused by a private row: the same for every failure, so that it reveals no more."""

# A realised noise multiplier is a quotient of two floats; a difference of this size is rounding.
FLOAT_SLACK = 1e-9

#: What every record of a kind states, or every event of a name, and as which type.
_FACTS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "plan": {
        "run_id": str, "nonce": str, "attempt": int, "mode": str, "planned_steps": int, "plan": (dict, NoneType),
    },
    "end": {"reason": str, "steps": int},
    WRONG_UNITS_SEEN: {"attempt": int},
    SAMPLING_DEPARTURE: {"attempt": int},
    "fresh_attempt": {"attempt": int, "step": int},
    START_EVENT: {"start": dict},
    NOT_COUNTED_EVENT: {"dataset_ledger": str},
    PRIVATE_LOG_EVENT: {"logged": str},
    DECLARED_EVENT: {"data": str, "split": str},
    UNITS_UNNAMED: {"unit": str},
}  # fmt: skip


@dataclass
class _Step:
    release: Release
    hashes: dict[str, Any]
    # Infinite until a release states less: an announced step that was never confirmed is charged as planned.
    noise_multiplier: float = math.inf
    law: SamplingLaw | None = None
    runs: int = 1
    confirmed: int = 0

    def charged(self) -> Release:
        """Return the release as it happened: less noise and another law are charged, more noise is not credited."""
        if isinstance(self.release, NonPrivateRelease):
            return self.release
        intended = self.release
        multiplier = intended.noise_multiplier
        if self.noise_multiplier < multiplier * (1 - FLOAT_SLACK):
            multiplier = self.noise_multiplier
        # No noise at all is recorded as such, so that a card can name it.
        if multiplier <= 0:
            return NonPrivateRelease(label=intended.label, count=intended.count)
        return replace(intended, noise_multiplier=multiplier, law=self.law or intended.law)


@dataclass
class KeyBook:
    """The noise keys of a ledger, in order; it refuses a record that contradicts an earlier one."""

    steps: dict[Key, _Step] = field(default_factory=dict)

    def check(self, record: Mapping[str, Any]) -> None:
        """Refuse a reused noise key, an unannounced release or replay, and a replay that differs."""
        kind = record["kind"]
        if kind == "plan" and (problem := schema_problem(record.get("schema"), SCHEMA)):
            raise LedgerError(problem)
        event = record.get("name") if kind == "event" else None
        for name, known in _FACTS.get(event or kind, {}).items():
            if name not in record or not isinstance(record[name], known):
                raise LedgerError(f"{event or kind} record: {name}={record.get(name)!r} is malformed or missing.")
        if kind == "intent":
            key = _key(record)
            if key in self.steps:
                raise LedgerError(
                    f"attempt {key[0]}, step {key[1]} was announced twice: its noise key would be used twice, and "
                    "two updates with the same noise give the data away. Resume as a new attempt."
                )
            _release(record)
        elif event == PRIVATE_EVENT:
            _release(record)
        elif kind in ("release", "replay"):
            step = self._announced(record)
            for name, value in step.hashes.items():
                if value is not None and record.get(name) not in (None, value):
                    raise LedgerError(
                        f"{kind} of attempt {record['attempt']}, step {record['step']}: {name} differs from the "
                        "first execution, so this is not a bit-identical replay. Resume as a new attempt."
                    )
            if kind == "release":
                # A replay adds one run, so a second release without a replay is a second noise.
                if step.confirmed >= step.runs:
                    raise LedgerError(
                        f"attempt {record['attempt']}, step {record['step']} was released twice after one announcement."
                    )
                realised_multiplier(record)
                law = _realised_law(record)
                if step.law is not None and law is not None and law != step.law:
                    raise LedgerError(
                        f"attempt {record['attempt']}, step {record['step']}: the replay used another sampling law."
                    )

    def add(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "intent":
            hashes = {name: record.get(name) for name in ("state_hash", "sum_tag")}
            self.steps[_key(record)] = _Step(_release(record), {**hashes, "update_hash": None})
        elif kind == "replay":
            self._announced(record).runs += 1
        elif kind == "release":
            step = self._announced(record)
            step.confirmed += 1
            # Of several executions under one key, the weakest is charged.
            step.noise_multiplier = min(step.noise_multiplier, realised_multiplier(record))
            step.law = step.law or _realised_law(record)
            for name in step.hashes:
                if step.hashes[name] is None:
                    step.hashes[name] = record.get(name)

    def _announced(self, record: Mapping[str, Any]) -> _Step:
        key = _key(record)
        if key not in self.steps:
            raise LedgerError(
                f"{record['kind']} of attempt {key[0]}, step {key[1]} without an earlier intent: its noise was not "
                "announced before it was drawn."
            )
        return self.steps[key]


def read_keys(records: Iterable[Mapping[str, Any]]) -> KeyBook:
    """Return the key book of a whole ledger; refuse one in which a noise key was used for two announced steps."""
    book = KeyBook()
    for record in records:
        book.check(record)
        book.add(record)
    return book


def noise_keys(records: Iterable[Mapping[str, Any]]) -> list[Key]:
    """Return (attempt, step) of every intent, in order."""
    return [_key(record) for record in records if record["kind"] == "intent"]


def plans_of(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the ``plan`` records, in order: one for each time the run was begun or resumed."""
    return [record for record in records if record["kind"] == "plan"]


def events_of(records: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """Return the events of this name, in order."""
    return [record for record in records if record["kind"] == "event" and record.get("name") == name]


def charged_releases(records: Iterable[Mapping[str, Any]]) -> list[Release]:
    """Return the releases for the accountant to compose, identical ones merged.

    Guarantees:
        - Every intent is charged once, with or without a release record; a replay charges nothing.
        - Less noise, or another sampling law, than was intended is charged as stated, and no noise as a
          ``NonPrivateRelease``; more noise than intended is not credited.
        - In an attempt whose draws departed from their law (a ``sampling_departure`` event), every step is charged as
          if each unit took part in it. In an attempt whose data set gave rows of other units than were drawn
          (``units_unknown``), every step is a ``NonPrivateRelease``.
        - Under ``Shuffle``, every epoch that was touched in an attempt is charged whole: a resumed attempt shuffles
          again, and half an epoch before and half an epoch after can show one unit twice.
    """
    records = list(records)
    departed, unknown = attempts_with(SAMPLING_DEPARTURE, records), attempts_with(WRONG_UNITS_SEEN, records)
    releases: list[Release] = []
    shuffled: dict[GaussianRelease, list[Key]] = {}
    for (attempt, step), state in read_keys(records).steps.items():
        release = state.charged()
        if attempt in unknown:
            release = NonPrivateRelease(label=release.label, count=release.count)
        # The law of such an attempt is unknown, so amplification is unknown too.
        if isinstance(release, GaussianRelease) and attempt in departed:
            # A full batch bounds any scheme that takes a unit at most once in a step.
            release = replace(release, law=FullBatch())
        if isinstance(release, GaussianRelease) and isinstance(release.law, Shuffle):
            covered = [(attempt, step + offset) for offset in range(release.count)]
            shuffled.setdefault(replace(release, count=1), []).extend(covered)
        else:
            releases.append(release)
    for release, covered in shuffled.items():
        law = release.law
        if isinstance(law, Shuffle):
            releases.append(replace(release, count=_epochs_touched(law, covered) * law.steps_per_epoch))
    return merge(releases)


def forthcoming_releases(
    records: Iterable[Mapping[str, Any]], release: Release, *, first: int, until: int, attempt: int = 0
) -> list[Release]:
    """Return the total charge of a ledger after the planned steps from ``first`` and before ``until``."""
    due = {"kind": "intent", "attempt": attempt, "step": first}
    made = [due | {"release": replace(release, count=until - first).to_dict()}] if first < until else []
    return charged_releases([*records, *made])


def recorded_start(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the facts about the model that the run started from; None without a start."""
    found = events_of(records, START_EVENT)
    return dict(found[0]["start"]) if found else None


def private_start(records: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], str] | None:
    """Return the facts about a private start and its mode, ``dp`` or its guarantee; None if it is declared public."""
    start = recorded_start(records)
    if start is None or start["public"]:
        return None
    return start, "dp" if start["releases"] else str(start["guarantee"])


def counted_in(records: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the data-set ledgers that count this run: those that it names and that did not refuse it."""
    known: set[str] = set()
    for record in records:
        if record["kind"] == "plan" and record.get("dataset_ledger") is not None:
            known.add(str(record["dataset_ledger"]))
        elif record["kind"] == "event" and record.get("name") == NOT_COUNTED_EVENT:
            known.discard(str(record["dataset_ledger"]))
    return known


def with_earlier_releases(records: Iterable[Mapping[str, Any]], own: Sequence[Release]) -> list[Release]:
    """Return the ``own`` releases of a run, and those of its initial model."""
    start = recorded_start(records)
    if start is None:
        return list(own)
    try:
        earlier = [release_from_dict(release) for release in start["releases"]]
    except (KeyError, TypeError, AttributeError, ConfigurationError) as error:
        raise LedgerError(f"{START_EVENT} event: the earlier run's releases are malformed ({error}).") from error
    return merge([*own, *earlier])


def attempts_with(event: str, records: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the attempts that contain ``event``."""
    return {record["attempt"] for record in events_of(records, event)}


def _epochs_touched(law: Shuffle, steps: Iterable[Key]) -> int:
    return len({(attempt, step // law.steps_per_epoch) for attempt, step in steps})


def _key(record: Mapping[str, Any]) -> Key:
    key = (record.get("attempt"), record.get("step"))
    for name, value in zip(("attempt", "step"), key, strict=True):
        if not is_whole(value) or value < 0:
            raise LedgerError(f"{record['kind']} record: {name}={value!r} is not an integer of at least 0.")
    return key  # type: ignore[return-value]


def _release(record: Mapping[str, Any]) -> Release:
    try:
        return release_from_dict(record["release"])
    except (KeyError, TypeError, AttributeError, ConfigurationError) as error:
        what = record.get("name") or record["kind"]
        raise LedgerError(f"{what} record: release={record.get('release')!r} is not a release ({error}).") from error


def realised_multiplier(record: Mapping[str, Any]) -> float:
    """Return the stated noise standard deviation over the sensitivity; infinite if no noise is stated.

    A sensitivity of null is unbounded (JSON has no infinity): no noise covers it.
    """
    if record.get("noise_std") is None:
        return math.inf
    noise_std = _size(record, "noise_std")
    if record.get("sensitivity") is None:
        return 0.0
    sensitivity = _size(record, "sensitivity")
    return math.inf if sensitivity == 0 else noise_std / sensitivity


def _size(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    if not is_number(value) or not math.isfinite(value) or value < 0:
        raise LedgerError(f"release record: {name}={value!r} is not a finite number of at least 0.")
    return float(value)


def _realised_law(record: Mapping[str, Any]) -> SamplingLaw | None:
    if record.get("law") is None:
        return None
    try:
        return SamplingLaw.from_dict(record["law"])
    except (KeyError, TypeError, AttributeError, ConfigurationError) as error:
        raise LedgerError(f"release record: law={record['law']!r} is not a sampling law ({error}).") from error


LEDGER_NAME = "privacy_ledger.jsonl"
#: The file in which a task of several runs stores its settings, in its folder.
STAGES_NAME = "pipeline.fingerprint"
KINDS = ("plan", "intent", "release", "replay", "event", "end", "repair")


def holds_a_run(folder: Path) -> bool:
    """Return whether a run, or a task of several, was started in a folder or below it."""
    return any(True for name in (LEDGER_NAME, STAGES_NAME) for _ in folder.rglob(name))


class PrivacyLedger(ChainedFile):
    """An append-only, hash-chained file of all releases of a run.

    Guarantees, besides those of a `ChainedFile`:
        - A noise key (attempt, step) enters as an intent once. A release or a replay without an earlier intent is
          refused, and so is a replay whose hashes contradict the intent.
        - Nothing was released under a record whose ``append`` had not returned, so a torn last line is not charged.
    """

    kinds: ClassVar[tuple[str, ...]] = KINDS
    lock_refusal: ClassVar[str] = (
        "is open in another run. Wait for it to end, or choose another hydra.run.dir: "
        "two runs must never share one ledger."
    )

    @classmethod
    def new_book(cls) -> Book:
        return KeyBook()

    def append(self, kind: str, **facts: Any) -> dict[str, Any]:
        return super().append(kind, **({"schema": SCHEMA} if kind == "plan" else {}), **facts)

    def announce(
        self, key: Key, release: Release, *, state_hash: str | None = None, sum_tag: str | None = None
    ) -> dict[str, Any]:
        """Write the *intent* of a release; its noise may be drawn only after this returns, with the intent on disk."""
        attempt, step = key
        return self.append(
            "intent", attempt=attempt, step=step, release=release.to_dict(), state_hash=state_hash, sum_tag=sum_tag
        )

    def confirm(
        self,
        key: Key,
        *,
        noise_std: float,
        sensitivity: float,
        denominator: float,
        law: SamplingLaw,
        update_hash: str | None = None,
    ) -> dict[str, Any]:
        """Write the *release* announced under ``key``, with what was actually done."""
        attempt, step = key
        return self.append(
            "release",
            attempt=attempt,
            step=step,
            noise_std=noise_std,
            # JSON has no infinity; null reads as "no noise covers it".
            sensitivity=None if sensitivity == math.inf else sensitivity,
            denominator=denominator,
            law=law.to_dict(),
            update_hash=update_hash,
        )


def ledger_identity(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the unique identity of a ledger; empty if it has no plan."""
    # A nonce, because runs with one published seed share their run id.
    plans = plans_of(records)
    return str(plans[0]["nonce"]) if plans else ""
