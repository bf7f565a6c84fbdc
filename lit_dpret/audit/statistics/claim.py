r"""Is a claim contradicted by the canaries of one training? A test of a whole privacy curve.

A mechanism is not private at one pair (epsilon, delta) but at all pairs of its curve, and some pair is easier to
contradict than the one that is printed: a larger epsilon comes with a much smaller delta, and in a one-run audit
delta counts m times. Trying all pairs costs nothing. With W the number of right guesses, the theorem bounds the same
tail, P[W >= v], at every pair; so the least of these bounds is a bound on it, and the outcomes that it finds less
likely than the allowed error all lie beyond the first of them. For the same reason the lower bounds on epsilon at
several deltas hold all at once.

The guesses are made at both ends: so many of the highest scores are taken for members and as many of the lowest for
others. How many was fixed before any score was seen; where several numbers are tried, the error is divided among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_dpret.audit.statistics.evidence import Evidence, check_confidence, check_delta
from lit_dpret.audit.statistics.one_run import ASSUMPTION, METHOD, guess_extremes, one_run_counts
from lit_dpret.audit.statistics.right_guesses import one_run_p_value
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.errors import ConfigurationError

#: Shares of the canaries that are guessed, half of them in and half of them out. For a perfect attack, for one whose
#: scores overlap, and for one that knows only a few. Of 80 percent a fair coin's luck hardly ever makes one wrong.
SHARES = (0.8, 0.5, 0.2)

Curve = Sequence[tuple[float, float]]
"""Pairs (epsilon, delta) that a mechanism is claimed to satisfy all at once."""


@dataclass(frozen=True, kw_only=True)
class Refutation:
    """How unlikely the guesses are if the claim is true.

    Attributes:
        p_value: The probability of guesses so good, at most, for any mechanism that keeps the claim; every choice that
            was tried is paid for. Small values contradict the claim. Large ones support nothing.
        eps: Where on the curve it was found.
        delta: The same.
    """

    p_value: float
    eps: float
    delta: float

    def contradicts(self, *, confidence: float) -> bool:
        """Return whether the claim is contradicted with ``confidence``."""
        return self.p_value < check_confidence(confidence)


def both_ends(scores: CanaryScores, shares: Sequence[float] = SHARES) -> list[tuple[int, int]]:
    """Return for each share how many canaries are guessed and how many of the guesses are right.

    Guarantees:
        - The number of guesses depends on the number of canaries alone.
        - Ties are guessed as wrong as they can be (`guess_extremes`).

    Raises:
        ConfigurationError: A share is not in (0, 1], or none of them guesses one canary at either end.
    """
    for share in shares:
        if not 0 < share <= 1:
            raise ConfigurationError(f"share={share} of the canaries to guess must be above 0 and at most 1.")
    sizes = sorted({int(share * len(scores) / 2) for share in shares} - {0}, reverse=True)
    if not sizes:
        raise ConfigurationError(f"{len(scores)} canaries are too few to guess one at either end: plant more.")
    return [guess_extremes(scores, highest=size, lowest=size) for size in sizes]


def both_ends_audit(
    scores: CanaryScores, *, delta: float, confidence: float = 0.95, shares: Sequence[float] = SHARES
) -> Evidence:
    """Return the lower bound on epsilon at ``delta`` from guesses at both ends.

    Guarantees:
        - For a mechanism that is (eps, delta)-DP and fair independent coins, ``eps_lower > eps`` has probability at
          most ``1 - confidence`` (Steinke et al. 2023, Theorem 5.2, and a union over ``shares``).

    Args:
        scores: Of members and others.
        delta: Of the claim that is put to the test.
        confidence: That the bound is true.
        shares: Of the canaries that are guessed, fixed beforehand.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    counts = both_ends(scores, shares)
    error = check_confidence(confidence) / len(counts)
    found = [
        one_run_counts(
            canaries=len(scores), guesses=guesses, correct=right, delta=delta, confidence=1 - error
        ).eps_lower
        for guesses, right in counts
    ]
    return Evidence(
        method=METHOD, eps_lower=max(found), delta=delta, confidence=confidence, assumption=ASSUMPTION,
        tests=len(counts),
    )  # fmt: skip


def refute(scores: CanaryScores, curve: Curve, *, shares: Sequence[float] = SHARES) -> Refutation:
    """Return how unlikely the guesses at both ends are under a mechanism that satisfies every pair of ``curve``.

    Guarantees:
        - For such a mechanism and fair independent coins, ``p_value <= p`` has probability at most p, for every p.
        - More pairs can only lower the p-value, at no cost; see the text of the module.

    Raises:
        ConfigurationError: The curve is empty or a pair of it is out of range.
    """
    if not curve:
        raise ConfigurationError("There is no claim to test: its curve has no pair (epsilon, delta).")
    for eps, delta in curve:
        check_delta(delta)
        if not eps >= 0:
            raise ConfigurationError(f"eps={eps} must be at least 0.")
    counts = both_ends(scores, shares)
    found = [
        (one_run_p_value(eps, canaries=len(scores), guesses=guesses, correct=right, delta=delta), eps, delta)
        for guesses, right in counts
        for eps, delta in curve
    ]
    p_value, eps, delta = min(found)
    return Refutation(p_value=min(1.0, p_value * len(counts)), eps=eps, delta=delta)
