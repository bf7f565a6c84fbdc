"""How much an audit of a given size could ever prove, so that one that cannot fail is not run, or not believed.

With few canaries even guesses that are all right contradict little: an audit that could not have failed proves nothing,
and that can be known beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scipy import stats

from lit_dpret.audit.statistics.error_rates import clopper_pearson_counts
from lit_dpret.audit.statistics.evidence import Terms, check_count
from lit_dpret.audit.statistics.one_run import one_run_counts, one_run_p_value
from lit_dpret.audit.statistics.rank_epsilon import top_rank_bound, top_rank_one_training
from lit_dpret.audit.statistics.scores import Counts
from lit_dpret.errors import ConfigurationError

CANARIES = (100, 1000, 10_000)
MOST_CANARIES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Power:
    """The most that so many canaries could certify, each method with its threshold chosen beforehand.

    Attributes:
        canaries: How many.
        one_run: With a coin for each, all guessed right.
        error_rates: Half of them members, all told apart (`clopper_pearson_counts`), each in a training of its own or
            not touching each other.
        ranks: All first among the candidates, each in a training of its own.
        ranks_one_training: The same in one training, for delta = 0.
    """

    canaries: int
    one_run: float
    error_rates: float
    ranks: float
    ranks_one_training: float


def most_certifiable(
    canaries: int, *, delta: float, candidates: int = 100, copies: int = 1, confidence: float = 0.95
) -> Power:
    """Return what an attack without a mistake would prove, by each method.

    >>> power = most_certifiable(1000, delta=0.0)
    >>> round(power.one_run, 4), round(power.ranks, 4)
    (5.8091, 4.6022)

    Raises:
        ConfigurationError: Fewer than two canaries, or a number is out of its range.
    """
    check_count("canaries", canaries, least=2)
    half = canaries // 2
    perfect = Counts(tp=half, fn=0, fp=0, tn=canaries - half)
    one_run = one_run_counts(
        canaries=canaries, guesses=canaries, correct=canaries, delta=delta, confidence=confidence, copies=copies
    )
    rates = clopper_pearson_counts(perfect, delta=delta, confidence=confidence, copies=copies)
    ranks = top_rank_bound(canaries, canaries, candidates=candidates, copies=copies, delta=delta, confidence=confidence)
    together = top_rank_one_training(canaries, canaries, candidates=candidates, copies=copies, confidence=confidence)
    return Power(
        canaries=canaries, one_run=one_run.eps_lower, error_rates=rates.eps_lower, ranks=ranks.eps_lower,
        ranks_one_training=together.eps_lower,
    )  # fmt: skip


def canaries_needed(eps: float, *, delta: float, copies: int = 1, confidence: float = 0.95) -> int:
    """Return the fewest canaries with which a one-run audit without a wrong guess contradicts ``eps``.

    >>> canaries_needed(3.0, delta=0.0)
    62

    Raises:
        ConfigurationError: More than a million would be needed, or a number is out of its range.
    """
    if not eps >= 0:
        raise ConfigurationError(f"eps={eps} must be at least 0.")
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    group = terms.group_delta(eps)

    def enough(canaries: int) -> bool:
        all_right = {"canaries": canaries, "guesses": canaries, "correct": canaries}
        return one_run_p_value(copies * eps, **all_right, delta=group) < terms.error

    high = 1
    while not enough(high):
        high *= 2
        if high > MOST_CANARIES:
            raise ConfigurationError(
                f"No one-run audit of up to {MOST_CANARIES:,} canaries contradicts eps={eps:g} at delta={delta:g}."
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def audit_power(
    eps: float, delta: float, *, canaries: tuple[int, ...] = CANARIES, confidence: float = 0.95
) -> list[dict[str, Any]]:
    """For each number of canaries, what an audit could certify of an (eps, delta) claim that is exactly spent.

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
        median = int(stats.binom.median(count, accuracy))
        both = [
            one_run_counts(canaries=count, guesses=count, correct=right, delta=delta, confidence=confidence).eps_lower
            for right in (count, median)
        ]
        rows.append(
            {
                "canaries": count,
                "confidence": confidence,
                "accuracy": accuracy,
                "at_best": both[0],
                "as_claimed": both[1],
            }
        )
    return rows
