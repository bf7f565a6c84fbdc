"""The one-run audit: a coin for each canary, one training, and guesses of the coins.

Steinke, Nasr and Jagielski 2023, arXiv 2305.08846. Under (eps, delta)-DP the number of right guesses is hardly ever
above a Binomial with q = e^eps / (1 + e^eps), whatever the canaries do to each other in that one training. `refute`
tries all pairs (eps, delta) of a claimed curve at once.
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
    "a fair coin of its own decided for each canary whether it was trained on, and the guesses were made from what "
    "was released, without the coins."
)
#: Shares of the canaries that are guessed, half of them in and half of them out. For a perfect attack, for one whose
#: scores overlap, and for one that knows only a few. Of 80 percent a fair coin's luck hardly ever makes one wrong.
SHARES = (0.8, 0.5, 0.2)

Curve = Sequence[tuple[float, float]]
"""Pairs (epsilon, delta) that a mechanism is claimed to satisfy all at once."""


def one_run_audit(
    scores: CanaryScores,
    *,
    delta: float,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """Return what the scores of coin-flipped canaries prove, guessing the highest as members.

    ``delta``, ``confidence`` and ``copies`` as in `Terms`; ``strategy`` chooses the threshold,
    ``Bonferroni(over="doubling")`` by default.

    Guarantees:
        - For a mechanism that is (eps, delta)-DP and coins as assumed, ``eps_lower > eps`` has probability at most
          ``1 - confidence`` under every strategy but ``Bonferroni(over="hull")`` (Theorem 5.2 of the paper).
        - Where the strategy fixes a threshold and so leaves the number of guesses to the scores (``Explicit``,
          ``Split``), that number is paid for (`unplanned_p_value`), which only a delta makes dear.
        - Ties count for nothing: they are guessed as wrong as they can be, or canaries of equal score alike.
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

    ``planned`` says that the number of guesses was fixed beforehand. Where what was released decides about it, say
    false: the bound then holds for every number (`unplanned_p_value`). It serves rare real queries as well as
    canaries: hold a random half of them out before training, and guess of those that the release repeats that they
    were trained on.

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

    With q = e^eps / (1 + e^eps) and w = 2 m delta / i it is the largest over i of
    (1 - w) P[Bin(r, q) >= v] + w P[Bin(r, q) >= v - i], or 1. Both tails rise with eps; so does the whole
    where w <= 1, that is, wherever 2 m delta <= 1. Beyond that no proof is known to us, and none is
    needed: who searches for the largest eps that is contradicted may return any that is.
    """
    if correct == 0:
        return 1.0
    rate = 1 / (1 + math.exp(-eps))
    surpassed = float(binom.sf(correct - 1, guesses, rate))
    if delta == 0:
        return surpassed
    # Further down than all of the distribution's mass, the share of the mass only falls with the width.
    mass_begins = math.floor(guesses * rate - 12 * math.sqrt(guesses * rate * (1 - rate)) - 12)
    width = np.arange(1, max(1, correct - max(0, mass_begins)) + 1)
    near = binom.sf(correct - 1 - width, guesses, rate) - surpassed
    return min(1.0, surpassed + 2 * canaries * delta * float(np.max(near / width)))


def unplanned_p_value(eps: float, *, canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """Return the same if the release decides the number of guesses; compare only with ``error``.

    With a delta the theorem is for a number of guesses that was fixed beforehand: of several numbers a mechanism may
    spend its delta on the one that it harms most. This bound is for all numbers at once. Given the release, reveal the
    coins of the guessed canaries one after the other. A guess is right with a probability h that exceeds
    q = e^eps / (1 + e^eps) by delta / (1 + e^eps) on average at most, so the right guesses are at most B + D, where B
    is Binomial(guesses, q) given the release, and D a count with an expectation of at most m delta / 2 that may hang
    together with anything. For every slope l <= 1, the event B + D >= v has an indicator of at most
    max(0, 1 - l (v - B)+) + l D. So rejecting where the expectation of the first term at the observed numbers, plus
    l m delta / 2, is below ``error`` errs with no larger probability, whatever decides about the numbers. The slope is
    fixed beforehand: min(1, error / (m delta)), which never spends more than half of the error on D. (An argument of
    our own.) It rises with eps, also where delta does.
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
    """How unlikely the guesses are if the claim is true."""

    # The probability of guesses so good, at most, for any mechanism that keeps the claim; every choice that was tried
    # is paid for. Small values contradict the claim. Large ones support nothing.
    p_value: float
    # eps, delta: Where on the curve it was found.
    eps: float
    delta: float

    def contradicts(self, *, confidence: float) -> bool:
        return self.p_value < check_confidence(confidence)


def both_ends(scores: CanaryScores) -> list[tuple[int, int]]:
    """Return for each of `SHARES` the number of guessed canaries and of correct guesses.

    Half of a share are the highest scores, taken for members, the other half the lowest, taken for others. So the
    number of guesses depends on the number of canaries alone.
    """
    sizes = sorted({int(share * len(scores) / 2) for share in SHARES} - {0}, reverse=True)
    if not sizes:
        raise ConfigurationError(f"{len(scores)} canaries are too few to guess one at either end: plant more.")
    return [guess_extremes(scores, highest=size, lowest=size) for size in sizes]


def guess_extremes(scores: CanaryScores, *, highest: int, lowest: int) -> tuple[int, int]:
    """Guess ``highest`` canaries in and ``lowest`` out; return the numbers of guesses and correct ones.

    Both numbers are to be fixed beforehand. Ties at the edge count as wrong as they can be (`CanaryScores.highest`).
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
    the printed one. The theorem bounds the same tail, P[W >= v] of the right guesses W, at every pair; so the least of
    these bounds holds too, and trying all pairs costs nothing.

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
    """Return scores that reveal every coin, an upper limit for any audit of this many canaries.

    >>> round(both_ends_audit(perfect_scores(1000), delta=0.0).eps_lower, 2)
    5.27
    """
    heads = canaries // 2
    return CanaryScores.of([1.0] * heads + [0.0] * (canaries - heads), [True] * heads + [False] * (canaries - heads))


CANARIES = (100, 1000, 10_000)


def audit_power(
    eps: float, delta: float, *, canaries: tuple[int, ...] = CANARIES, confidence: float = 0.95
) -> list[dict[str, Any]]:
    """Return for each number of canaries what an audit could certify of a tight (eps, delta) claim.

    Returns:
        ``canaries``; ``at_best``, the bound when every guess is right, above which no audit of this size
        contradicts anything; ``as_claimed``, the bound that at least half of all audits reach where every
        guess is as good as the claim allows, right with probability ``accuracy``. Real attacks guess
        worse, so both are ceilings and no prediction.
    """
    accuracy = delta + (1 - delta) / (1 + math.exp(-eps)) if eps < 700 else 1.0
    rows = []
    for count in canaries:
        # Of a binomial count, at least half lies at or above the median.
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
        # A delta only raises the p-value; without one it is a single tail, and most thresholds fail by it.
        if one_run_p_value(terms.copies * eps, **counts, delta=0.0) >= error:
            return False
        group = terms.group_delta(eps)
        if planned:
            return one_run_p_value(terms.copies * eps, **counts, delta=group) < error
        return unplanned_p_value(terms.copies * eps, **counts, delta=group, error=error) < error

    return largest_contradicted(contradicted, floor)
