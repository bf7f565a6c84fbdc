"""Metrics of an attack: AUC, true positive rates at low false positive rates, accuracy, with intervals.

None of them is a bound on epsilon. An AUC near one half can hide an attack that is certain about a few canaries, so
never read it alone (Carlini et al. 2022, "Membership Inference Attacks From First Principles").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from lit_dpret.audit.statistics.error_rates import error_rates_at_most
from lit_dpret.audit.statistics.evidence import check_confidence, check_count
from lit_dpret.audit.statistics.scores import CanaryScores, Counts
from lit_dpret.errors import ConfigurationError


def auc(scores: CanaryScores) -> float:
    """Return the probability that a member scores higher than another canary; ties count half.

    >>> auc(CanaryScores([0, 4, 6, 7], [1, 2, 3, 5]))
    0.6875
    """
    members, others = len(scores.in_scores), len(scores.out_scores)
    ranks = rankdata(np.concatenate([scores.in_scores, scores.out_scores]))[:members]
    return float((ranks.sum() - members * (members + 1) / 2) / (members * others))


def tpr_at_fpr(scores: CanaryScores, fpr: float) -> float:
    """Return the true positive rate at a false positive rate of at most ``fpr``."""
    if not 0 <= fpr <= 1:
        raise ConfigurationError(f"fpr={fpr} must lie between 0 and 1.")
    others = len(scores.out_scores)
    allowed = math.floor(fpr * others + 1e-9)
    if allowed == others:
        return 1.0
    # Strictly above the highest score that must not be reached.
    return float((scores.in_scores > scores.out_scores[others - 1 - allowed]).mean())


def accuracy_at_least(counts: Counts, *, confidence: float = 0.95) -> float:
    """Return an exact lower bound on the balanced accuracy of one threshold chosen beforehand.

    Compare it with ``membership_accuracy`` of `lit_dpret.privacy.accounting.ceilings`: no attack can exceed that
    ceiling, so a higher bound means that the claim, or the code, is wrong. Scores are assumed independent, as in
    `lit_dpret.audit.statistics.error_rates`.
    """
    return 1 - sum(error_rates_at_most(counts, check_confidence(confidence))) / 2


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and its bootstrap interval, which covers only the choice of canaries."""

    value: float
    low: float
    high: float
    confidence: float


def bootstrap(
    statistics: Mapping[str, Callable[[CanaryScores], float]],
    scores: CanaryScores,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return the percentile interval of each statistic, redrawing members and others separately with replacement.

    All statistics are computed from the same draws. A perfect attack has an interval of width zero for any number of
    canaries; the exact bounds of `lit_dpret.audit.statistics.error_rates` do not have that weakness. Canaries of one
    training run are not independent of each other, which the interval ignores.
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
