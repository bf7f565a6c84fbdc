"""The runs that one command starts (``-m``), for the ledger and the card of each: the best of them tells of all.

They may differ in their seed alone. The noise of each is its own, so that whoever takes the run with the best score has
looked at all of them, and the epsilon of one card is not that of the choice (Liu and Talwar 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger

SIBLINGS_EVENT = "one_of_several"
"""The event of a run's ledger that tells how many runs its command started."""

_started: ContextVar[Mapping[str, Any] | None] = ContextVar("siblings", default=None)


@contextmanager
def among_siblings(facts: Mapping[str, Any] | None) -> Iterator[None]:
    """Let what begins a run within the block know what `siblings_now` then returns."""
    token = _started.set(facts)
    try:
        yield
    finally:
        _started.reset(token)


def siblings_now() -> Mapping[str, Any] | None:
    """Return the facts about the runs of this command; None where it starts one.

    ``runs`` is how many there are (None where a sweeper decides that as it goes), ``private_runs`` and
    ``without_privacy`` of what kind; ``varied`` are the settings in which they differ. ``planned`` is the epsilon of
    the private ones together, with its ``delta``, ``unit``, ``neighbours`` and ``accountant``, or None.
    """
    return _started.get()


def note_siblings(ledger: PrivacyLedger, facts: Mapping[str, Any] | None) -> None:
    """Record in a run's ledger which runs its command started; once, unless a resume is of another command."""
    known = [record["siblings"] for record in ledger.records if _is_of_siblings(record)]
    if facts is not None and dict(facts) not in known:
        ledger.append("event", name=SIBLINGS_EVENT, siblings=dict(facts))


def siblings_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what a run's ledger tells of the runs beside it, by the command with the most of them; None without."""
    found = [record["siblings"] for record in records if _is_of_siblings(record)]
    return dict(sorted(found, key=_size)[-1]) if found else None


def tells_of_all(records: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> bool:
    """Return whether a run's ledger tells of as many runs as its command now starts, and of no lower cost."""
    if (known := siblings_of(records)) is None:
        return False
    before, now = _size(known), _size(facts)
    cheaper = now[1] != float("inf") and before[1] < now[1] * (1 - 1e-9)
    return before[0] >= now[0] and not cheaper


def _is_of_siblings(record: Mapping[str, Any]) -> bool:
    return record.get("kind") == "event" and record.get("name") == SIBLINGS_EVENT


def _size(facts: Mapping[str, Any]) -> tuple[float, float]:
    """Order commands by how much they ran: one that did not know how much, or what it costs, comes after the others."""
    planned = facts.get("planned")
    return (
        float("inf") if facts["runs"] is None else facts["runs"],
        float("inf") if planned is None else planned["epsilon"],
    )
