"""Bounds on epsilon from an attack's error rates, for many training runs or canaries without mutual influence.

Under (eps, delta)-DP every test has TPR <= e^eps FPR + delta and TNR <= e^eps FNR + delta. `clopper_pearson_audit`
compares exact confidence bounds on both rates with that, for any mechanism (Jagielski, Ullman and Oprea 2020, arXiv
2006.07709; Nasr et al. 2021, arXiv 2101.04535).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv

from lit_dpret.audit.statistics.evidence import Evidence, Terms, check_confidence, check_hits, least_epsilon
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.audit.statistics.thresholds import Bonferroni, Strategy, audit

METHOD = "error rates (Clopper-Pearson)"
ASSUMPTION = (
    "the scores of members are independent of each other, and so are those of the others: one canary per training, or "
    "canaries that do not affect each other."
)


def rate_at_least(hits: ArrayLike, trials: ArrayLike, error: float) -> NDArray[np.float64]:
    """Return lower bounds on rates, each too high with probability at most ``error``; 0 without a hit.

    Exact and one-sided: Clopper and Pearson, Biometrika 26, 1934.

    >>> round(float(rate_at_least(67, 100, 0.025)), 6), round(float(rate_at_most(67, 100, 0.025)), 6)
    (0.568827, 0.760801)
    """
    k, n = np.broadcast_arrays(np.asarray(hits, dtype=float), np.asarray(trials, dtype=float))
    found = betaincinv(np.maximum(k, 1), n - np.maximum(k, 1) + 1, error)
    return np.where(k > 0, found, 0.0)


def rate_at_most(hits: ArrayLike, trials: ArrayLike, error: float) -> NDArray[np.float64]:
    """Return upper bounds on rates, each too low with probability at most ``error``; 1 if all hit.

    >>> round(float(rate_at_most(0, 100, 0.05)), 6)
    0.029513
    """
    k, n = np.broadcast_arrays(np.asarray(hits, dtype=float), np.asarray(trials, dtype=float))
    return 1 - rate_at_least(n - k, n, error)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Hits among trials."""

    hits: int  # how often the attack was right
    trials: int  # how often it guessed
    chance: float | None  # the rate of an uninformed guess; None if that has no meaning
    low: float  # exact lower bound of the rate (Clopper and Pearson, two-sided), for independent trials
    high: float  # exact upper bound
    confidence: float  # of the interval

    @property
    def value(self) -> float:
        return self.hits / self.trials

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "value": self.value}


def rate(hits: int, trials: int, *, chance: float | None = None, confidence: float = 0.95) -> Rate:
    """Return a rate with its interval.

    >>> found = rate(9, 10, chance=0.1)
    >>> found.value, round(found.low, 3), round(found.high, 3)
    (0.9, 0.555, 0.997)
    """
    tail = check_confidence(confidence) / 2
    check_hits(hits, trials)
    return Rate(
        hits=hits, trials=trials, chance=chance, low=float(rate_at_least(hits, trials, tail)),
        high=float(rate_at_most(hits, trials, tail)), confidence=confidence,
    )  # fmt: skip


def error_rates_at_most(counts: Counts, error: float) -> tuple[float, float]:
    """Return upper bounds on false positive and negative rates; jointly wrong with probability at most ``error``."""
    return (
        float(rate_at_most(counts.fp, counts.others, error / 2)),
        float(rate_at_most(counts.fn, counts.members, error / 2)),
    )


def clopper_pearson_audit(
    scores: CanaryScores,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """Return the largest epsilon contradicted by bounds on the false positive and negative rates.

    ``delta``, ``confidence`` and ``copies`` are as in `Terms`; ``strategy`` chooses the threshold, ``Bonferroni()`` by
    default.

    Guarantees:
        - If the assumption holds, ``eps_lower`` is above the mechanism's epsilon with probability at most
          ``1 - confidence``, for any mechanism, under every strategy except ``Bonferroni(over="hull")``.
        - ``Bonferroni(over="all")`` covers every threshold, even one that the scores suggested. The share of the
          distribution beyond the k-th highest of n scores is Beta(k, n - k + 1), which has exactly Clopper and
          Pearson's quantiles, and at most n such shares can be wrong.
    """
    strategy = strategy or Bonferroni()
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    return audit(scores, _any_mechanism, strategy, terms, method=METHOD, assumption=ASSUMPTION, guessing=False)


def clopper_pearson_counts(
    counts: Counts, *, delta: float = 0.0, confidence: float = 0.95, copies: int = 1
) -> Evidence:
    """Return the same bound from the counts at one threshold chosen beforehand.

    >>> clopper_pearson_counts(Counts(tp=95, fn=5, fp=5, tn=95)).eps_lower.__round__(4)
    2.0621
    """
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    return terms.evidence(METHOD, _any_mechanism(counts, terms.error, 0.0, terms), ASSUMPTION)


def _any_mechanism(counts: Counts, error: float, floor: float, terms: Terms) -> float:
    false_positive, false_negative = error_rates_at_most(counts, error)
    return max(
        floor,
        least_epsilon(1 - false_negative, false_positive, delta=terms.delta, copies=terms.copies),
        least_epsilon(1 - false_positive, false_negative, delta=terms.delta, copies=terms.copies),
    )
