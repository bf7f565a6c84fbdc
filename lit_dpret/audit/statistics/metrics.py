"""How good an attack is: AUC, true positives at few false ones, accuracy, each with an interval.

None of them is a bound on epsilon. An AUC near one half can hide an attack that is certain of a few canaries, so
never read it alone (Carlini et al. 2022, "Membership Inference Attacks From First Principles").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import rankdata

from lit_dpret.audit.statistics.error_rates import error_rates_at_most
from lit_dpret.audit.statistics.evidence import check_confidence, check_count, check_delta
from lit_dpret.audit.statistics.scores import CanaryScores, Counts, roc_hull
from lit_dpret.errors import ConfigurationError

Curve = Literal["empirical", "hull"]


def auc(scores: CanaryScores, *, curve: Curve = "empirical") -> float:
    """Return the probability that a member scores higher than another canary, ties counting half.

    Args:
        scores: Of members and others.
        curve: ``hull`` is the area under the ROC curve's concave hull instead, as jax_privacy has it. It is never
            smaller, and above one half by chance alone.

    >>> scores = CanaryScores([0, 4, 6, 7], [1, 2, 3, 5])
    >>> auc(scores), auc(scores, curve="hull")
    (0.6875, 0.8125)
    """
    members, others = len(scores.in_scores), len(scores.out_scores)
    if curve == "empirical":
        ranks = rankdata(np.concatenate([scores.in_scores, scores.out_scores]))[:members]
        return float((ranks.sum() - members * (members + 1) / 2) / (members * others))
    _, alone, missed = roc_hull(scores)
    return float(np.trapezoid(alone / others, missed / members))


def tpr_at_fpr(scores: CanaryScores, fpr: float, *, curve: Curve = "empirical") -> float:
    """Return the share of members that is found where at most a share ``fpr`` of the others is.

    Args:
        scores: Of members and others.
        fpr: From 0 to 1.
        curve: ``hull`` allows a coin between two thresholds, as jax_privacy does.

    Raises:
        ConfigurationError: ``fpr`` is no share.
    """
    if not 0 <= fpr <= 1:
        raise ConfigurationError(f"fpr={fpr} must lie between 0 and 1.")
    members, others = len(scores.in_scores), len(scores.out_scores)
    if curve == "hull":
        _, alone, missed = roc_hull(scores)
        wrong, found = (others - alone)[::-1], (members - missed)[::-1]
        # The rightmost of several members counts at the same number of others is the highest on a hull.
        last = np.append(np.diff(wrong) > 0, True)
        return float(np.interp(fpr * others, wrong[last], found[last]) / members)
    allowed = math.floor(fpr * others + 1e-9)
    if allowed == others:
        return 1.0
    # Strictly above the highest score that must not be reached.
    return float((scores.in_scores > scores.out_scores[others - 1 - allowed]).mean())


def max_accuracy(scores: CanaryScores) -> float:
    """Return the best balanced accuracy of any threshold: the mean of both rates. Above one half by chance alone."""
    _, alone, missed = roc_hull(scores)
    return float(np.max((1 - missed / len(scores.in_scores) + alone / len(scores.out_scores)) / 2))


def accuracy_at_least(counts: Counts, *, confidence: float = 0.95) -> float:
    """Return an exact lower bound on the balanced accuracy of one threshold that was chosen beforehand.

    Hold it against ``membership_accuracy`` of `lit_dpret.privacy.accounting.ceilings`: above that ceiling no attack can
    be, so that the claim, or the code, is wrong. Assumes independent scores, as
    `lit_dpret.audit.statistics.error_rates`.

    Raises:
        ConfigurationError: ``confidence`` is out of its range.
    """
    return 1 - sum(error_rates_at_most(counts, check_confidence(confidence))) / 2


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and the ends of its bootstrap interval, which tells of the canaries' choice and of nothing else."""

    value: float
    low: float
    high: float
    confidence: float


def bootstrap(
    statistic: Callable[[CanaryScores], float],
    scores: CanaryScores,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Return the percentile interval of ``statistic``, with members and others each redrawn with replacement.

    A perfect attack has an interval of no width whatever the number of canaries; the exact bounds of
    `lit_dpret.audit.statistics.error_rates` do not have that weakness. Canaries of one training are not
    independent of each other, and the interval knows nothing of it.

    Raises:
        ConfigurationError: ``confidence`` or ``resamples`` is out of its range.
    """
    return bootstrap_all({"": statistic}, scores, confidence=confidence, resamples=resamples, seed=seed)[""]


def bootstrap_all(
    statistics: Mapping[str, Callable[[CanaryScores], float]],
    scores: CanaryScores,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Interval]:
    """`bootstrap` of several statistics from the same draws: the same intervals, in less time.

    Raises:
        ConfigurationError: As `bootstrap`.
    """
    tail = check_confidence(confidence) / 2
    check_count("resamples", resamples, least=1)
    rng = np.random.default_rng(seed)
    members, others = scores.in_scores, scores.out_scores
    drawn = np.empty((resamples, len(statistics)))
    for row in drawn:
        again = CanaryScores(rng.choice(members, len(members)), rng.choice(others, len(others)))
        row[:] = [statistic(again) for statistic in statistics.values()]
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return {
        name: Interval(value=statistic(scores), low=float(low[place]), high=float(high[place]), confidence=confidence)
        for place, (name, statistic) in enumerate(statistics.items())
    }


def raw_epsilon(scores: CanaryScores, *, delta: float = 0.0, min_count: int = 50) -> float:
    """ln((TPR - delta) / FPR), the largest with ``min_count`` false positives or more: no bound, and no confidence.

    The usual plot of attack papers, for comparison with them. It is above the mechanism's epsilon about as often as
    below where the attack is the best possible; with few false positives it is noise.

    Raises:
        ConfigurationError: ``delta`` or ``min_count`` is out of its range.
    """
    check_delta(delta)
    check_count("min_count", min_count, least=1)
    members, others = len(scores.in_scores), len(scores.out_scores)
    if min_count >= others:
        return 0.0
    _, alone, missed = roc_hull(scores)
    rates = (others - alone) / others
    points = [(rate, 1 - miss / members) for rate, miss in zip(rates, missed, strict=True) if rate * others > min_count]
    points.append((min_count / others, tpr_at_fpr(scores, min_count / others, curve="hull")))
    return max(0.0, *(math.log((found - delta) / rate) for rate, found in points if found > delta))
