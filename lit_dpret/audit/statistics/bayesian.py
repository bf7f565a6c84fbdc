"""How probable is each epsilon, after so many right and wrong guesses? A credible bound, with a prior.

Zanella-Béguelin et al. 2022, "Bayesian Estimation of Differential Privacy", arXiv 2206.05199: with Jeffreys' prior,
both error rates have Beta posteriors, independent of each other; the probability of (eps, delta)-DP is their mass
in its privacy region. The interval is narrower than Clopper and Pearson's, because it promises less.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv

from lit_dpret.audit.statistics.checks import check_confidence, check_copies, check_delta
from lit_dpret.audit.statistics.clopper_pearson import independent
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.group import group_delta
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.audit.statistics.thresholds import Bonferroni, Explicit, Split, best_bound
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.audit_power import largest_contradicted

METHOD = "Bayesian error rates (Jeffreys' prior)"
CREDIBLE = "a Beta(1/2, 1/2) prior of each error rate: the level is credibility, not coverage of the worst case; and "
LARGEST = 1e3
NODES = 500


def bayesian_audit(
    scores: CanaryScores,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    copies: int = 1,
    strategy: Explicit | Split | None = None,
) -> Evidence:
    """The epsilon below which a posterior of ``1 - confidence`` is left, for an attack that takes high for members.

    Guarantees:
        - A test that is worse than chance counts as epsilon 0, and is not turned round.

    Args:
        scores: Of members and others.
        delta: Of the claim that is put to the test.
        confidence: Posterior probability that epsilon is larger than the bound.
        copies: How often each member stood in the training data.
        strategy: A threshold chosen beforehand, or by other canaries; ``Split()`` where nothing is said. A
            posterior cannot be divided among thresholds.

    Raises:
        ConfigurationError: Another strategy, or a number is out of its range.
    """
    strategy = strategy or Split()
    if not isinstance(strategy, Explicit | Split):
        raise ConfigurationError(f"strategy={strategy!r}: a posterior is of one threshold; use Explicit or Split.")
    check_delta(delta)
    check_copies(copies)
    error = check_confidence(confidence)
    found = best_bound(scores, partial(_bound, delta=delta, copies=copies), strategy, error, guessing=False)
    return Evidence(
        method=METHOD, eps_lower=found.eps, delta=delta, confidence=confidence,
        assumption=CREDIBLE + independent(Bonferroni()), copies=copies, threshold=found.threshold, tests=found.tests,
    )  # fmt: skip


def bayesian_interval(counts: Counts, *, delta: float = 0.0, confidence: float = 0.9) -> tuple[float, float]:
    """The equal-tailed credible interval of epsilon, where a test worse than chance is turned round.

    Its lower end is above 0 even for guesses at random, since (0, 0)-DP has no mass: an estimate of
    epsilon, and no evidence that it is not 0.

    >>> low, high = bayesian_interval(Counts(tp=487, fn=0, fp=512, tn=1), delta=1e-5)
    >>> round(low, 3), round(high, 3)
    (0.144, 6.416)

    Returns:
        Both ends; infinite where they are above 1000.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    check_delta(delta)
    tail = check_confidence(confidence) / 2
    return (_quantile(counts, delta, tail), _quantile(counts, delta, 1 - tail))


def posterior_of_dp(counts: Counts, eps: float, delta: float, *, turned_round: bool = False) -> float:
    """The posterior probability that both rates lie where (eps, delta)-DP wants them. It rises with both.

    Args:
        counts: At one threshold.
        eps: Of the claim.
        delta: Of the claim.
        turned_round: Whether rates that are together above 1, an attack worse than chance, are held against
            the claim as well.
    """
    rate, chances = _false_positive_rates(counts.fp, counts.tn)
    odds = math.exp(min(eps, 700.0))
    least = np.maximum(1 - delta - odds * rate, (1 - delta - rate) / odds)
    inside = 1 - betainc(0.5 + counts.fn, 0.5 + counts.tp, np.clip(least, 0, 1))
    if turned_round:
        least = np.maximum(1 - delta - odds * (1 - rate), (rate - delta) / odds)
        inside = inside - betainc(0.5 + counts.tp, 0.5 + counts.fn, np.clip(least, 0, 1))
    return float(chances @ np.maximum(0, inside))


@lru_cache(maxsize=256)
def _false_positive_rates(fp: int, tn: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Posterior quantiles of the rate and their weights: midpoints in sin^2, which is dense at both ends."""
    angles = (np.arange(NODES) + 0.5) / NODES * np.pi / 2
    weights = np.sin(2 * angles)
    return betaincinv(0.5 + fp, 0.5 + tn, np.sin(angles) ** 2), weights / weights.sum()


def _bound(counts: Counts, error: float, floor: float, *, delta: float, copies: int) -> float:
    def contradicted(eps: float) -> bool:
        return posterior_of_dp(counts, copies * eps, group_delta(eps, delta, copies)) < error

    return largest_contradicted(contradicted, floor)


def _quantile(counts: Counts, delta: float, mass: float) -> float:
    def below(eps: float) -> bool:
        return eps <= LARGEST and posterior_of_dp(counts, eps, delta, turned_round=True) < mass

    found = largest_contradicted(below)
    return found if found < LARGEST * (1 - 1e-6) else math.inf
