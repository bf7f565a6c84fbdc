"""Bounds on an attack's error rates, read as a bound on epsilon: many trainings, or one and more assumptions.

Under (eps, delta)-DP every test has TPR <= e^eps FPR + delta and TNR <= e^eps FNR + delta. Three readings:

* `clopper_pearson_audit`: exact confidence bounds on both rates, for any mechanism. Jagielski, Ullman and Oprea 2020,
  "Auditing Differentially Private Machine Learning", arXiv 2006.07709; Nasr et al. 2021, arXiv 2101.04535.
* `gdp_audit`: the same bounds under a Gaussian curve, where FNR >= Phi(Phi^-1(1 - FPR) - mu). Nearly tight where the
  mechanism has that curve, worth nothing elsewhere. Nasr et al. 2023, "Tight Auditing of Differentially Private
  Machine Learning", arXiv 2302.07956.
* `bayesian_audit`: a credible bound. With Jeffreys' prior both rates have independent Beta posteriors, and the
  probability of (eps, delta)-DP is their mass in its privacy region. Narrower, because it promises less.
  Zanella-Béguelin et al. 2022, "Bayesian Estimation of Differential Privacy", arXiv 2206.05199.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc, betaincinv, ndtri

from lit_dpret.audit.statistics.curves import gaussian_epsilon, largest_contradicted, least_epsilon
from lit_dpret.audit.statistics.evidence import Evidence, Terms, check_confidence, check_hits
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.audit.statistics.thresholds import Bonferroni, Explicit, Split, Strategy, audit
from lit_dpret.errors import ConfigurationError

METHOD = "error rates (Clopper-Pearson)"
ASSUMPTION = (
    "the scores of members are independent of each other, and so are those of the others: one canary to a training, or "
    "canaries that do not touch each other."
)
HULL = " The number of thresholds was that of the ROC hull, which no theorem covers."
CURVE = "the mechanism's trade-off curve is that of a Gaussian (an assumption, not a theorem, for DP-SGD); and "
CREDIBLE = "a Beta(1/2, 1/2) prior of each error rate: the level is credibility, not coverage of the worst case; and "
NODES = 500


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
    """Return upper bounds on rates, each too low with probability at most ``error``; 1 where all hit.

    >>> round(float(rate_at_most(0, 100, 0.05)), 6)
    0.029513
    """
    k, n = np.broadcast_arrays(np.asarray(hits, dtype=float), np.asarray(trials, dtype=float))
    return 1 - rate_at_least(n - k, n, error)


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
        """The share of hits among the trials."""
        return self.hits / self.trials

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "value": self.value}


def rate(hits: int, trials: int, *, chance: float | None = None, confidence: float = 0.95) -> Rate:
    """Return a rate with its interval.

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


def error_rates_at_most(counts: Counts, error: float) -> tuple[float, float]:
    """Return upper bounds on the false positive and false negative rate, both true but for probability ``error``."""
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
    """Return the largest epsilon that bounds on the false positive and false negative rate contradict.

    ``delta``, ``confidence`` and ``copies`` as in `Terms`; ``strategy`` chooses the threshold, ``Bonferroni()`` by
    default.

    Guarantees:
        - Where the assumption holds, ``eps_lower`` is above the mechanism's epsilon with probability at most
          ``1 - confidence``, whatever the mechanism is, under every strategy but ``Bonferroni(over="hull")``.
        - ``Bonferroni(over="all")`` covers every threshold, also one that the scores suggested: beyond the k-th
          highest score of n lies a share of the distribution that is Beta(k, n - k + 1), which has the very
          quantiles of Clopper and Pearson, and there are at most n such shares to be wrong about.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    strategy = strategy or Bonferroni()
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    return audit(
        scores, _any_mechanism, strategy, terms, method=METHOD, assumption=_independent(strategy), guessing=False
    )


def clopper_pearson_counts(
    counts: Counts, *, delta: float = 0.0, confidence: float = 0.95, copies: int = 1
) -> Evidence:
    """Return the same bound from the counts at one threshold that was chosen beforehand.

    >>> clopper_pearson_counts(Counts(tp=95, fn=5, fp=5, tn=95)).eps_lower.__round__(4)
    2.0621

    Raises:
        ConfigurationError: A number is out of its range.
    """
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    return terms.evidence(METHOD, _any_mechanism(counts, terms.error, 0.0, terms), ASSUMPTION)


def gdp_audit(
    scores: CanaryScores,
    *,
    delta: float,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Strategy | None = None,
) -> Evidence:
    """Return the epsilon at ``delta`` of the smallest mu that the error rates do not contradict.

    As `clopper_pearson_audit`, with a ``delta`` above 0, at which the curve's epsilon is read. k copies, units of a
    mu-GDP mechanism, are k mu-GDP.

    Guarantees:
        - For a mu-GDP mechanism and independent scores, ``eps_lower`` above its epsilon has probability at most
          ``1 - confidence``, under the strategies of `clopper_pearson_audit`.
        - An attack that is worse than chance proves nothing: a negative mu is 0, not its absolute value.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    strategy = strategy or Bonferroni()
    terms = Terms(delta=delta, confidence=confidence, copies=copies, gaussian=True)
    return audit(
        scores, _gaussian, strategy, terms, method="error rates under a Gaussian curve",
        assumption=CURVE + _independent(strategy), guessing=False,
    )  # fmt: skip


def bayesian_audit(
    scores: CanaryScores,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Explicit | Split | None = None,
) -> Evidence:
    """Return the epsilon below which a posterior of ``1 - confidence`` is left.

    A test that is worse than chance counts as epsilon 0, and is not turned round. A posterior cannot be divided among
    thresholds, so that ``strategy`` has one that was chosen beforehand, or by other canaries (``Split()``).

    Raises:
        ConfigurationError: Another strategy, or a number is out of its range.
    """
    strategy = strategy or Split()
    if not isinstance(strategy, Explicit | Split):
        raise ConfigurationError(f"strategy={strategy!r}: a posterior is of one threshold; use Explicit or Split.")
    terms = Terms(delta=delta, confidence=confidence, copies=copies)
    return audit(
        scores, _posterior, strategy, terms, method="Bayesian error rates (Jeffreys' prior)",
        assumption=CREDIBLE + ASSUMPTION, guessing=False,
    )  # fmt: skip


def posterior_of_dp(counts: Counts, eps: float, delta: float) -> float:
    """Return the posterior probability that both rates lie where (eps, delta)-DP wants them. It rises with both."""
    rate, chances = _false_positive_rates(counts.fp, counts.tn)
    odds = math.exp(min(eps, 700.0))
    least = np.maximum(1 - delta - odds * rate, (1 - delta - rate) / odds)
    inside = 1 - betainc(0.5 + counts.fn, 0.5 + counts.tp, np.clip(least, 0, 1))
    return float(chances @ np.maximum(0, inside))


@lru_cache(maxsize=256)
def _false_positive_rates(fp: int, tn: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return posterior quantiles of the rate and their weights: midpoints in sin^2, which is dense at both ends."""
    angles = (np.arange(NODES) + 0.5) / NODES * np.pi / 2
    weights = np.sin(2 * angles)
    return betaincinv(0.5 + fp, 0.5 + tn, np.sin(angles) ** 2), weights / weights.sum()


def _independent(strategy: Strategy) -> str:
    return ASSUMPTION + (HULL if strategy == Bonferroni(over="hull") else "")


def _mu(counts: Counts, error: float) -> float:
    false_positive, false_negative = error_rates_at_most(counts, error)
    return max(0.0, float(-ndtri(false_positive) - ndtri(false_negative)))


# What the counts at one threshold prove, each as `lit_dpret.audit.statistics.thresholds.Bound`.


def _any_mechanism(counts: Counts, error: float, floor: float, terms: Terms) -> float:
    false_positive, false_negative = error_rates_at_most(counts, error)
    return max(
        floor,
        least_epsilon(1 - false_negative, false_positive, delta=terms.delta, copies=terms.copies),
        least_epsilon(1 - false_positive, false_negative, delta=terms.delta, copies=terms.copies),
    )


def _gaussian(counts: Counts, error: float, floor: float, terms: Terms) -> float:
    return max(floor, gaussian_epsilon(_mu(counts, error) / terms.copies, terms.delta))


def _posterior(counts: Counts, error: float, floor: float, terms: Terms) -> float:
    return largest_contradicted(
        lambda eps: posterior_of_dp(counts, terms.copies * eps, terms.group_delta(eps)) < error, floor
    )
