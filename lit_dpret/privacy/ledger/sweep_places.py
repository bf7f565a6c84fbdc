"""Reservations that a sweep holds in the ledger of a data set for trials that have not begun.

What a sweep costs has to be known, and to fit, before its first trial starts. So all of its private runs
are reserved at once, and a trial that begins takes over the reservation that was made for a run like it. Which
of several equal ones it gets does not matter: a reservation is a list of releases and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.privacy.accounting.releases import GaussianRelease, NonPrivateRelease, Release
from lit_dpret.privacy.ledger.dataset_total import Total
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger

SWEEP_EVENT = "trial_of"
"""The event of a run's ledger that tells of the sweep that the run is a trial of."""

Releases = tuple[Release, ...]


def note_sweep(ledger: PrivacyLedger, sweep: Mapping[str, Any] | None) -> None:
    """Write into a run's ledger, once, which sweep it is a trial of.

    Raises:
        ResumeError: The ledger was begun in another sweep, or in none.
    """
    before = sweep_of(ledger.records)
    begun = before is not None or any(record["kind"] == "intent" for record in ledger.records)
    if begun and (before or {}).get("id") != (sweep or {}).get("id"):
        ledger.close()
        raise ResumeError(
            "resume=true with another trial_of than the run was begun with: its reservation is that sweep's. Restore "
            "it, or start a new run in another hydra.run.dir."
        )
    if not begun and sweep is not None:
        ledger.append("event", name=SWEEP_EVENT, sweep=dict(sweep))


def sweep_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What a run's ledger tells of the sweep that it is a trial of; None where it tells of none."""
    found = [r for r in records if r.get("kind") == "event" and r.get("name") == SWEEP_EVENT]
    return dict(found[0]["sweep"]) if found else None


def sweep_limit(sweep: Mapping[str, Any] | None, delta: float | None) -> float | None:
    """The most that all trials of a sweep may cost together at a claim's delta; None where no number bounds that.

    That is so where there is no sweep, or one with trials that have no privacy, or may have. What a trial spends beyond
    its plan, as after a crash, the limit of the ledger bounds and the plan does not. The limit holds at the
    ledger's delta and above it: at a smaller one it says nothing.

    Args:
        sweep: As a trial's ledger tells of it.
        delta: Of the trial's own claim; None where it claims nothing.
    """
    if sweep is None or delta is None or sweep.get("without_privacy") != 0 or sweep.get("planned") is None:
        return None
    holds_at = sweep.get("ledger_delta")
    return sweep.get("total_eps") if holds_at is not None and holds_at <= delta else None


def choose_place(places: Mapping[str, Releases], planned: Releases, *, sweep: str) -> str:
    """The reservation that a run takes over: an equal one, else the cheapest that covers it.

    One reservation covers another run where law by law it holds no less noise off and no fewer releases.

    Args:
        places: What the sweep still holds, by name.
        planned: What the run plans to release, merged.
        sweep: The sweep, for the message.

    Raises:
        ConfigurationError: The sweep holds no such reservation, or trials that began have taken all of them.
    """
    for name, releases in places.items():
        if releases == planned:
            return name
    covering = {name: releases for name, releases in places.items() if covers(releases, planned)}
    if covering:
        return min(covering, key=lambda name: _weight(covering[name]))
    if any(isinstance(release, NonPrivateRelease) for release in planned):
        raise ConfigurationError(
            f"trial_of: sweep {sweep} holds no reservation for a run for which its own ledger lets nothing be claimed: "
            "privacy.noise_seed or model.log_private_loss is set, or a private number was shown. Leave that out."
        )
    raise ConfigurationError(
        f"trial_of: sweep {sweep} holds no reservation for a run like this one ({len(places)} are left, for other "
        "runs): it was not planned, or every one like it has begun in another folder. Start the trials as task=sweep "
        "does, resume the one that began, or plan another sweep."
    )


def covers(reserved: Sequence[Release], planned: Sequence[Release]) -> bool:
    """Whether a reservation is at least as much as a run plans to release.

    Example:
        >>> from lit_dpret.privacy.accounting.releases import FullBatch
        >>> ten = [GaussianRelease(noise_multiplier=1.0, law=FullBatch(), count=10)]
        >>> covers(ten, [GaussianRelease(noise_multiplier=2.0, law=FullBatch(), count=9)])
        True
        >>> covers(ten, [GaussianRelease(noise_multiplier=0.9, law=FullBatch(), count=1)])
        False
    """
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
    """Why a sweep does not fit, and how much of it would.

    Args:
        total: With all of the sweep in it.
        runs: Private runs that the sweep wants to reserve.
        cost: The total with the first so many of them.
        path: Of the ledger.
        terms: Of the ledger.
    """
    fit, fails = 0, runs
    while fails - fit > 1:
        middle = (fit + fails) // 2
        fit, fails = (middle, fails) if cost(middle) <= total.total_eps else (fit, middle)
    before = cost(0)
    if fit:
        what = f"The first {fit} of them fit, at {cost(fit):.4g} in all"
    else:
        what = f"None of them fits beside the {before:.4g} that other runs hold" if before else "Not one of them fits"
    return (
        f"privacy.total_eps={total.total_eps:g} does not cover this sweep: with its {runs} private runs, "
        f"privacy.dataset_ledger={path} would hold epsilon {total.epsilon:.4g} (delta={total.delta:.3g}, "
        f"unit={terms['unit']}, neighbours={terms['neighbours']}, composed by {total.accountant}). {what}. Try fewer "
        "or noisier trials, choose among them on public or synthetic data instead, or begin the ledger with a larger "
        "limit."
    )


def _weight(releases: Releases) -> tuple[int, float]:
    """Sorts reservations that cover the same run, the cheapest first."""
    gaussian = [release for release in releases if isinstance(release, GaussianRelease)]
    return sum(release.count for release in gaussian), -sum(release.noise_multiplier for release in gaussian)
