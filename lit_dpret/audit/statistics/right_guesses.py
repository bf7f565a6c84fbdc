"""The epsilon that right guesses about canaries contradict: the bound of a one-run audit, and its p-value.

A one-run audit (Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv
2305.08846) flips a coin for each of m canaries, trains once, and guesses the coins. Under
(epsilon, delta)-DP a guess is right with probability at most e^eps / (1 + e^eps), but for delta, so many
right guesses contradict a small epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from lit_dpret.errors import ConfigurationError

CONFIDENCE = 0.95
#: No audit tells epsilons beyond this one apart.
LARGEST = 1e6


def one_run_epsilon(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The epsilon that ``correct`` of ``guesses`` right guesses about ``canaries`` canaries certify.

    Guarantees:
        - For every mechanism that is (eps, delta)-DP with a smaller eps than the answer, so many right
          guesses have probability below ``1 - confidence`` (Theorem 5.2 of the paper).
        - 0 where nothing is contradicted. It rises with ``correct`` and falls with ``delta``.

    Raises:
        ConfigurationError: The counts are no whole numbers with 0 <= correct <= guesses <= canaries,
            ``delta`` does not lie in [0, 1) or ``confidence`` in (0, 1).
    """
    counts = (canaries, guesses, correct)
    if any(isinstance(c, bool) or not isinstance(c, int) for c in counts) or not 0 <= correct <= guesses <= canaries:
        raise ConfigurationError(
            f"An audit with {correct} right of {guesses} guesses about {canaries} canaries: these must be whole "
            "numbers, each at most the next."
        )
    if not 0 <= delta < 1 or not 0 < confidence < 1:
        raise ConfigurationError(f"delta={delta} must lie in [0, 1) and confidence={confidence} in (0, 1).")
    if correct == 0:
        return 0.0

    return largest_contradicted(
        lambda eps: (
            one_run_p_value(eps, canaries=canaries, guesses=guesses, correct=correct, delta=delta) < 1 - confidence
        )
    )


def largest_contradicted(contradicted: Callable[[float], bool], floor: float = 0.0) -> float:
    """The largest epsilon that was found contradicted, to seven digits, from ``floor`` on; ``floor`` where none is.

    Guarantees:
        - Above ``floor`` the answer was itself contradicted, so it is a lower bound whatever the function's shape.
        - Where ``contradicted`` is true up to a point and false from there on, that point.
    """
    if not contradicted(floor):
        return floor
    low, high = floor, max(1.0, 2 * floor)
    while contradicted(high):
        low, high = high, 2 * high
        if high > LARGEST:
            return math.inf
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if contradicted(middle) else (low, middle)
    return low


def one_run_p_value(eps: float, *, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """The largest probability of so many right guesses under (eps, delta)-DP (the paper's Theorem 5.2).

    With q = e^eps / (1 + e^eps) and w = 2 m delta / i it is the largest over i of
    (1 - w) P[Bin(r, q) >= v] + w P[Bin(r, q) >= v - i], or 1. Both tails rise with eps; so does the whole
    where w <= 1, that is, wherever 2 m delta <= 1. Beyond that no proof is known to us, and none is
    needed: who searches for the largest eps that is contradicted may return any that is.
    """
    if correct == 0:
        return 1.0
    rate = 1 / (1 + math.exp(-eps))
    surpassed = float(stats.binom.sf(correct - 1, guesses, rate))
    if delta == 0:
        return surpassed
    # Further down than all of the distribution's mass, the share of the mass only falls with the width.
    mass_begins = math.floor(guesses * rate - 12 * math.sqrt(guesses * rate * (1 - rate)) - 12)
    width = np.arange(1, max(1, correct - max(0, mass_begins)) + 1)
    near = stats.binom.sf(correct - 1 - width, guesses, rate) - surpassed
    return min(1.0, surpassed + 2 * canaries * delta * float(np.max(near / width)))


def unplanned_p_value(eps: float, *, canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """The same where the release decides how many are guessed; compare it with ``error`` and with nothing else.

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
    within = np.maximum(0.0, 1 - slope * short) @ stats.binom.pmf(correct - short, guesses, rate)
    return min(1.0, float(stats.binom.sf(correct - 1, guesses, rate)) + float(within) + slope * extra / 2)
