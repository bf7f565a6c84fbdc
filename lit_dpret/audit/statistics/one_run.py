"""The one-run audit: toss a coin for each canary, train once, and guess the coins.

Steinke, Nasr and Jagielski 2023, arXiv 2305.08846. Under (eps, delta)-DP the number of correct guesses hardly ever
exceeds a Binomial with q = e^eps / (1 + e^eps), however the canaries affect each other in that one training run.
`refute` tests all pairs (eps, delta) of a claimed curve at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binom

from lit_dpret.audit.statistics.evidence import (
    Evidence,
    Terms,
    check_confidence,
    check_count,
    check_delta,
    check_hits,
    largest_contradicted,
)
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.audit.statistics.thresholds import Bonferroni, Explicit, Split, Strategy, audit
from lit_dpret.errors import ConfigurationError

METHOD = "one-run audit"
ASSUMPTION = (
    "a separate fair coin decided for each canary whether it was trained on, and the guesses were made from what was "
    "released, without the coins."
)
#: Shares of the canaries that are guessed, half as members and half as non-members: for a perfect attack, for one with
#: overlapping scores, and for one that knows only a few. At 80 percent, uneven coins hardly ever force a wrong guess.
SHARES = (0.8, 0.5, 0.2)

Curve = Sequence[tuple[float, float]]
"""Pairs (epsilon, delta), all of which a mechanism is claimed to satisfy."""


def one_run_audit(
    scores: CanaryScores,
    *,
    delta: float,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """Return the bound on epsilon that the scores of coin-flipped canaries prove, guessing the highest as members.

    ``delta``, ``confidence`` and ``copies`` are as in `Terms`. ``strategy`` chooses the threshold,
    ``Bonferroni(over="doubling")`` by default.

    Guarantees:
        - For a mechanism that is (eps, delta)-DP and coins as assumed, ``eps_lower > eps`` has probability at most
          ``1 - confidence`` under every strategy except ``Bonferroni(over="hull")`` (Theorem 5.2 of the paper).
        - A strategy that fixes a threshold (``Explicit``, ``Split``) leaves the number of guesses to the scores. The
          bound accounts for that (`unplanned_p_value`), at a cost only where delta is above 0.
        - Ties never help: they are guessed as wrongly as possible, or all canaries of equal score are guessed alike.
    """
    strategy = strategy or Bonferroni(over="doubling")
    planned = not isinstance(strategy, Explicit | Split)

    def bound(counts: Counts, error: float, floor: float, terms: Terms) -> float:
        guessed = {"canaries": counts.canaries, "guesses": counts.guesses, "correct": counts.tp}
        return _epsilon(guessed, error, floor, terms, planned)

    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    return audit(scores, bound, strategy, terms, method=METHOD, assumption=ASSUMPTION, guessing=True)


def one_run_counts(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95, copies: int = 1,
    planned: bool = True,
) -> Evidence:  # fmt: skip
    """Return the same bound from counts: ``correct`` of ``guesses`` guesses about ``canaries`` canaries.

    ``planned`` says that the number of guesses was fixed beforehand. Pass False where it depends on what was released:
    the bound then holds for every number (`unplanned_p_value`). Rare real queries work as well as canaries: hold out a
    random half of them before training, and guess that those the release repeats were trained on.

    >>> one_run_counts(canaries=1000, guesses=100, correct=90, delta=1e-5).eps_lower.__round__(4)
    1.6261
    """
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    check_hits(guesses, canaries, names=("guesses", "canaries"))
    check_count("correct", correct)
    if correct > guesses:
        raise ConfigurationError(f"correct={correct} is more than guesses={guesses}.")
    counts = {"canaries": canaries, "guesses": guesses, "correct": correct}
    eps = _epsilon(counts, terms.error, 0.0, terms, planned)
    return terms.evidence(METHOD, eps, ASSUMPTION)


def one_run_p_value(eps: float, *, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """Return the largest probability of this many correct guesses under (eps, delta)-DP (Theorem 5.2).

    With q = e^eps / (1 + e^eps) and w = 2 m delta / i, it is the maximum over i of
    (1 - w) P[Bin(r, q) >= v] + w P[Bin(r, q) >= v - i], capped at 1. Both tails rise with eps. So does the whole
    where w <= 1, that is, wherever 2 m delta <= 1. Beyond that we know no proof and need none: a search for the
    largest contradicted eps may return any eps that is contradicted.
    """
    if correct == 0:
        return 1.0
    rate = 1 / (1 + math.exp(-eps))
    surpassed = float(binom.sf(correct - 1, guesses, rate))
    if delta == 0:
        return surpassed
    # Below all of the distribution's mass, a larger width only lowers the mass per unit of width.
    mass_begins = math.floor(guesses * rate - 12 * math.sqrt(guesses * rate * (1 - rate)) - 12)
    width = np.arange(1, max(1, correct - max(0, mass_begins)) + 1)
    near = binom.sf(correct - 1 - width, guesses, rate) - surpassed
    return min(1.0, surpassed + 2 * canaries * delta * float(np.max(near / width)))


def unplanned_p_value(eps: float, *, canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """Return the same where the release decides the number of guesses; compare it only with ``error``.

    With delta > 0 the theorem holds for a number of guesses that was fixed beforehand: among several numbers, a
    mechanism may spend its delta on the one where it leaks most. This bound holds for all numbers at once. Given the
    release, reveal the coins of the guessed canaries one by one. A guess is correct with a probability h that exceeds
    q = e^eps / (1 + e^eps) by at most delta / (1 + e^eps) on average, so the correct guesses are at most B + D. Here B
    is Binomial(guesses, q) given the release. D is a count with an expectation of at most m delta / 2 that may depend
    on anything. For every slope l <= 1, the indicator of B + D >= v is at most max(0, 1 - l (v - B)+) + l D. So
    reject where the expectation of the first term at the observed numbers, plus l m delta / 2, is below ``error``:
    this errs with no larger probability, whatever decides the numbers. The slope is fixed beforehand:
    min(1, error / (m delta)), which spends at most half of the error on D. (Our own argument.) The bound rises with
    eps, even where delta does too.
    """
    if correct == 0:
        return 1.0
    rate, extra = 1 / (1 + math.exp(-eps)), canaries * delta
    slope = 1.0 if extra <= error else error / extra
    short = np.arange(1, min(correct, math.ceil(1 / slope)) + 1)
    within = np.maximum(0.0, 1 - slope * short) @ binom.pmf(correct - short, guesses, rate)
    return min(1.0, float(binom.sf(correct - 1, guesses, rate)) + float(within) + slope * extra / 2)


# -- guesses at both ends, and a whole claimed curve --------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Refutation:
    """The probability of the guesses if the claim is true."""

    # The largest probability of guesses this good under any mechanism that satisfies the claim, corrected for every
    # choice that was tried. Small values contradict the claim. Large ones support nothing.
    p_value: float
    # eps, delta: The pair on the curve that gave it.
    eps: float
    delta: float

    def contradicts(self, *, confidence: float) -> bool:
        return self.p_value < check_confidence(confidence)


def both_ends(scores: CanaryScores) -> list[tuple[int, int]]:
    """Return the number of guessed canaries and of correct guesses for each of `SHARES`.

    Half of a share are the canaries with the highest scores, guessed as members; the other half have the lowest,
    guessed as non-members. So the number of guesses depends only on the number of canaries.
    """
    sizes = sorted({int(share * len(scores) / 2) for share in SHARES} - {0}, reverse=True)
    if not sizes:
        raise ConfigurationError(f"{len(scores)} canaries are too few to guess one at each end. Plant more.")
    return [guess_extremes(scores, highest=size, lowest=size) for size in sizes]


def guess_extremes(scores: CanaryScores, *, highest: int, lowest: int) -> tuple[int, int]:
    """Guess ``highest`` canaries in and ``lowest`` out; return how many were guessed and how many correctly.

    Fix both numbers beforehand. Ties at the edge count as wrongly as possible (`CanaryScores.highest`).
    """
    check_count("highest", highest)
    check_count("lowest", lowest)
    if highest + lowest > len(scores):
        raise ConfigurationError(f"highest={highest} and lowest={lowest} are more than {len(scores)} canaries.")
    upside_down = CanaryScores(-scores.out_scores, -scores.in_scores)
    sides = ((scores, highest), (upside_down, lowest))
    return highest + lowest, sum(side.highest(count).tp for side, count in sides if count)


def both_ends_audit(scores: CanaryScores, *, delta: float, confidence: float = 0.95) -> Evidence:
    """Return the lower bound on epsilon at ``delta`` from guesses at both ends.

    Guarantees:
        - For a mechanism that is (eps, delta)-DP and fair independent coins, ``eps_lower > eps`` has probability at
          most ``1 - confidence`` (Theorem 5.2, and a union over `SHARES`, which are fixed beforehand).
    """
    counts = both_ends(scores)
    error = check_confidence(confidence) / len(counts)
    found = [
        one_run_counts(
            canaries=len(scores), guesses=guesses, correct=right, delta=delta, confidence=1 - error
        ).eps_lower
        for guesses, right in counts
    ]
    terms = Terms(delta=delta, confidence=confidence, copies=1)
    return terms.evidence(METHOD, max(found), ASSUMPTION, tests=len(counts))


def refute(scores: CanaryScores, curve: Curve) -> Refutation:
    """Return the probability of the guesses at both ends under a mechanism that satisfies every pair of ``curve``.

    A larger epsilon comes with a much smaller delta, which counts m times, so some pair is easier to contradict than
    the printed one. At every pair, the theorem bounds the same tail P[W >= v] of the correct guesses W. So the smallest
    of these bounds holds too, and trying all pairs costs nothing.

    Guarantees:
        - For such a mechanism and fair independent coins, ``p_value <= p`` has probability at most p, for every p.
    """
    if not curve:
        raise ConfigurationError("There is no claim to test: its curve has no pair (epsilon, delta).")
    for eps, delta in curve:
        check_delta(delta)
        if not eps >= 0:
            raise ConfigurationError(f"eps={eps} must be at least 0.")
    counts = both_ends(scores)
    found = [
        (one_run_p_value(eps, canaries=len(scores), guesses=guesses, correct=right, delta=delta), eps, delta)
        for guesses, right in counts
        for eps, delta in curve
    ]
    p_value, eps, delta = min(found)
    return Refutation(p_value=min(1.0, p_value * len(counts)), eps=eps, delta=delta)


# -- how much an audit of a given size could ever prove -----------------------------------------


def perfect_scores(canaries: int) -> CanaryScores:
    """Return scores that reveal every coin: the upper limit for any audit with this many canaries.

    >>> round(both_ends_audit(perfect_scores(1000), delta=0.0).eps_lower, 2)
    5.27
    """
    heads = canaries // 2
    return CanaryScores.of([1.0] * heads + [0.0] * (canaries - heads), [True] * heads + [False] * (canaries - heads))


CANARIES = (100, 1000, 10_000)


def audit_power(
    eps: float, delta: float, *, canaries: tuple[int, ...] = CANARIES, confidence: float = 0.95
) -> list[dict[str, Any]]:
    """Return what an audit could certify of a tight (eps, delta) claim, for each number of canaries.

    Returns:
        ``canaries``; ``at_best``, the bound if every guess is correct, above which no audit of this size
        contradicts anything; ``as_claimed``, the bound that at least half of all audits reach if every guess is as
        good as the claim allows, correct with probability ``accuracy``. Real attacks guess worse, so both are
        ceilings, not predictions.
    """
    accuracy = delta + (1 - delta) / (1 + math.exp(-eps)) if eps < 700 else 1.0
    rows = []
    for count in canaries:
        # At least half of the mass of a binomial count is at or above the median.
        median = int(binom.median(count, accuracy))
        best, claimed = (
            one_run_counts(canaries=count, guesses=count, correct=right, delta=delta, confidence=confidence).eps_lower
            for right in (count, median)
        )
        facts = {"canaries": count, "confidence": confidence, "accuracy": accuracy}
        rows.append(facts | {"at_best": best, "as_claimed": claimed})
    return rows


def _epsilon(counts: Mapping[str, int], error: float, floor: float, terms: Terms, planned: bool) -> float:
    def contradicted(eps: float) -> bool:
        # A delta only raises the p-value. Without it the p-value is a single tail, which already rules out most.
        if one_run_p_value(terms.copies * eps, **counts, delta=0.0) >= error:
            return False
        group = terms.group_delta(eps)
        if planned:
            return one_run_p_value(terms.copies * eps, **counts, delta=group) < error
        return unplanned_p_value(terms.copies * eps, **counts, delta=group, error=error) < error

    return largest_contradicted(contradicted, floor)
