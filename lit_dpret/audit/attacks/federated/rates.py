"""How often an attack was right, with an exact interval and what guessing reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lit_dpret.audit.statistics.binomial import rate_at_least, rate_at_most
from lit_dpret.audit.statistics.checks import check_confidence, check_hits


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Hits among trials.

    Attributes:
        hits: How often the attack was right.
        trials: How often it guessed.
        chance: The rate of a guess that knows nothing; None where that has no meaning.
        low: Exact lower bound of the rate (Clopper and Pearson, two-sided), for trials that are independent.
        high: Exact upper bound.
        confidence: Of both.
    """

    hits: int
    trials: int
    chance: float | None
    low: float
    high: float
    confidence: float

    @property
    def value(self) -> float:
        """The share of trials that were hits."""
        return self.hits / self.trials

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "value": self.value}


def rate(hits: int, trials: int, *, chance: float | None = None, confidence: float = 0.95) -> Rate:
    """A rate with its interval.

    >>> found = rate(9, 10, chance=0.1)
    >>> found.value, round(found.low, 3), round(found.high, 3)
    (0.9, 0.555, 0.997)

    Raises:
        ConfigurationError: There is no trial, more hits than trials, or the confidence is no share.
    """
    tail = check_confidence(confidence) / 2
    check_hits(hits, trials)
    return Rate(
        hits=hits, trials=trials, chance=chance, low=float(rate_at_least(hits, trials, tail)),
        high=float(rate_at_most(hits, trials, tail)), confidence=confidence,
    )  # fmt: skip


def pooled(rates: Sequence[Rate]) -> Rate | None:
    """The trials of several rates as one; None where there is none.

    Trials of one silo resemble each other, so the interval is narrower than it would be for silos drawn anew.
    """
    if not rates:
        return None
    known = [one.chance for one in rates if one.chance is not None]
    trials = sum(one.trials for one in rates)
    chance = sum((one.chance or 0.0) * one.trials for one in rates) / trials if len(known) == len(rates) else None
    return rate(sum(one.hits for one in rates), trials, chance=chance, confidence=rates[0].confidence)
