"""The runs that one command starts (``-m``), for the ledger and the card of each: choosing the best looks at all.

They may differ in their seed alone. Each has its own noise, so a user who takes the run with the best score has looked
at all of them, and the epsilon of one card is not that of the choice (Liu and Talwar 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, events_of

SIBLINGS_EVENT = "one_of_several"
"""The event in a run's ledger that records how many runs its command started."""

_started: ContextVar[Mapping[str, Any] | None] = ContextVar("siblings", default=None)


@contextmanager
def among_siblings(facts: Mapping[str, Any] | None) -> Iterator[None]:
    """Pass facts to every run that begins within the block, for `siblings_now` to return."""
    token = _started.set(facts)
    try:
        yield
    finally:
        _started.reset(token)


def siblings_now() -> Mapping[str, Any] | None:
    """Return the facts about the runs of this command; None if it starts only one.

    ``runs`` is how many there are (None if a sweeper decides that as it goes), ``private_runs`` and ``without_privacy``
    how many of each kind; ``varied`` are the settings in which they differ. ``planned`` is the epsilon of the private
    runs together, with its ``delta``, ``unit``, ``neighbours`` and ``accountant``, or None.
    """
    return _started.get()


def note_siblings(ledger: PrivacyLedger, facts: Mapping[str, Any] | None) -> None:
    """Record in a run's ledger which runs its command started; once, unless a resume is from another command."""
    known = [event["siblings"] for event in events_of(ledger.records, SIBLINGS_EVENT)]
    if facts is not None and dict(facts) not in known:
        ledger.append("event", name=SIBLINGS_EVENT, siblings=dict(facts))


def siblings_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what a run's ledger records of its sibling runs, by the command with the most of them; None without."""
    found = [event["siblings"] for event in events_of(records, SIBLINGS_EVENT)]
    return dict(sorted(found, key=_size)[-1]) if found else None


def tells_of_all(records: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> bool:
    """Return whether a run's ledger records at least as many runs as its command now starts, and no lower cost."""
    if (known := siblings_of(records)) is None:
        return False
    before, now = _size(known), _size(facts)
    cheaper = now[1] != float("inf") and before[1] < now[1] * (1 - 1e-9)
    return before[0] >= now[0] and not cheaper


def _size(facts: Mapping[str, Any]) -> tuple[float, float]:
    """Return a key that orders commands by how much they ran; an unknown number or cost comes last."""
    planned = facts.get("planned")
    return (
        float("inf") if facts["runs"] is None else facts["runs"],
        float("inf") if planned is None else planned["epsilon"],
    )
