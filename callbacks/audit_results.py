"""What a one-run audit found, as entries of the card's empirical part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lit_dpret.audit.statistics.claim import Refutation
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.power import most_certifiable
from lit_dpret.cards.audit_text import BOUND
from lit_dpret.cards.evidence import AttackResult


def audit_results(
    evidence: Evidence,
    *,
    canaries: int,
    counts: Sequence[tuple[int, int]],
    refutation: Refutation | None,
    at_point: Evidence | None,
) -> list[AttackResult]:
    """The bound at the claim's delta, and the point of the claimed curve that the guesses speak against most.

    The scores behind them belong to planted rows and public words, so that the numbers are post-processing of the
    model, which is released anyway.

    Args:
        evidence: The bound on epsilon.
        canaries: How many were planted or left out.
        counts: Guesses and right ones, the largest number of guesses first.
        refutation: Of the claimed curve, where something is claimed.
        at_point: The bound at the delta of ``refutation``, at the confidence of the alarm.
    """
    guesses, right = counts[0]
    best = most_certifiable(canaries, delta=0.0, confidence=evidence.confidence or 0.95).one_run
    found = [
        AttackResult(
            attack="one-run audit: a fair coin decided for each canary whether it was trained on, and the coins were "
            f"guessed from what the model had gained; so many canaries can show {best:.3g} at most",
            n=canaries,
            metric=f"share of right guesses among {guesses}",
            estimate=right / guesses,
            eps_lower=evidence.eps_lower,
            delta=evidence.delta,
            confidence=evidence.confidence,
            method=evidence.method,
            assumption=evidence.assumption,
        )
    ]
    if refutation is not None and at_point is not None:
        found.append(
            AttackResult(
                attack="the same guesses held against the whole claimed curve, at the delta where they say most",
                n=canaries,
                metric=BOUND,
                estimate=at_point.eps_lower,
                eps_lower=at_point.eps_lower,
                delta=refutation.delta,
                confidence=at_point.confidence,
                method=at_point.method,
                assumption=at_point.assumption,
                ceiling=refutation.eps,
            )
        )
    return found


def stands_already(result: AttackResult, known: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a card has this result, up to the rounding of the accountant, which is not the same every time."""
    told = result.to_dict()
    return any(one.keys() == told.keys() and all(_alike(one[name], told[name]) for name in told) for one in known)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
