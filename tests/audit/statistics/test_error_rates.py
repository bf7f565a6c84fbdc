"""Bounds from error rates by Clopper and Pearson's intervals, and the plain measures."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from canary_samples import quantiles
from scipy.spatial import ConvexHull
from scipy.stats import beta, norm

from lit_dpret.audit.statistics.error_rates import (
    clopper_pearson_audit,
    clopper_pearson_counts,
    error_rates_at_most,
    rate_at_least,
    rate_at_most,
)
from lit_dpret.audit.statistics.evidence import group_delta, least_epsilon
from lit_dpret.audit.statistics.metrics import accuracy_at_least, auc, bootstrap, tpr_at_fpr
from lit_dpret.audit.statistics.scores import CanaryScores, Counts, roc_hull
from lit_dpret.audit.statistics.thresholds import Bonferroni, Explicit, Split
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.accounting.ceilings import attack_ceilings
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease


def test_rates_are_bounded_by_the_quantiles_of_clopper_and_pearson() -> None:
    hits = np.arange(0, 41)
    assert rate_at_least(hits[1:], 40, 0.05) == pytest.approx(beta.ppf(0.05, hits[1:], 41 - hits[1:]))
    assert rate_at_most(hits[:-1], 40, 1e-9) == pytest.approx(beta.isf(1e-9, hits[:-1] + 1, 40 - hits[:-1]))
    assert float(rate_at_least(0, 40, 0.05)) == 0.0
    assert float(rate_at_most(40, 40, 0.05)) == 1.0


def test_one_threshold_gives_the_published_bound_in_its_direction_and_the_better_of_both() -> None:
    scores = quantiles(1000, 1)
    for threshold, one_way in ((0.0, 0.443986), (0.5, 0.690453), (1.0, 0.971338)):
        wrong, missed = error_rates_at_most(scores.counts(threshold), 0.1)
        assert least_epsilon(1 - missed, wrong) == pytest.approx(one_way, abs=1e-6)
        both = clopper_pearson_audit(scores, confidence=0.9, strategy=Explicit(threshold=threshold)).eps_lower
        assert both == pytest.approx(max(least_epsilon(1 - missed, wrong), least_epsilon(1 - wrong, missed)))


def test_the_hull_is_the_published_one_and_scipys() -> None:
    thresholds, alone, missed = roc_hull(CanaryScores([1.5, 2.5, 0.5, 3.5], [0, 3, 2, 1]))
    assert thresholds.tolist() == [0, 0.5, 3.5, math.inf]
    assert alone.tolist() == [0, 1, 4, 4]
    assert missed.tolist() == [0, 0, 3, 4]
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = CanaryScores(rng.integers(0, 30, 40), rng.integers(0, 25, 35))
        every = np.append(np.unique(scores.pooled), np.inf)
        points = np.stack([np.searchsorted(scores.in_scores, every), np.searchsorted(scores.out_scores, every)], 1)
        area = ConvexHull(np.vstack([points, [[40, 0]]])).volume
        _, alone, missed = roc_hull(scores)
        assert np.trapezoid(alone, missed) == pytest.approx(area)


def test_an_interval_holds_the_value_and_the_truth() -> None:
    assert auc(CanaryScores([1, 1], [1, 0])) == 0.75, "a tie counts half"
    rng = np.random.default_rng(1)
    scores = CanaryScores(rng.normal(1, 1, 400), rng.normal(0, 1, 400))
    for statistic, truth in (
        (auc, norm.cdf(1 / math.sqrt(2))),
        (lambda s: tpr_at_fpr(s, 0.1), norm.cdf(1 + norm.ppf(0.1))),
    ):
        found = bootstrap({"": statistic}, scores, resamples=200, confidence=0.99)[""]
        assert found.low < found.value < found.high
        assert found.low < truth < found.high


def test_an_accuracy_above_the_ceiling_of_its_mechanism_is_seen_and_one_below_is_not() -> None:
    release = GaussianRelease(noise_multiplier=1.0, law=FullBatch())
    ceiling = attack_ceilings([release], neighbours="zero_out")["membership_accuracy"]
    assert ceiling == pytest.approx(norm.cdf(0.5), abs=1e-3)
    best, broken = (accuracy_at_least(quantiles(10_000, shift).counts(shift / 2)) for shift in (1.0, 1.2))
    assert ceiling - 0.01 < best < ceiling < broken


def test_rates_beyond_every_threshold_at_once_are_bounded_when_the_error_is_divided_by_all() -> None:
    """What ``Bonferroni(over="all")`` rests on: of n uniform scores, some threshold's bound fails this rarely."""
    n, error = 40, 0.2
    beyond = 1 - np.sort(np.random.default_rng(4).random((4000, n)), axis=1)[:, ::-1]
    # Just above the (k + 1)-th highest score, k are counted and a share of beyond[k] of the distribution is left.
    bounds = rate_at_most(np.arange(n), n, error / n)
    failed = (beyond > bounds).any(axis=1).mean()
    assert 0.02 < failed <= error + 3 * math.sqrt(error / 4000)
    one_by_one = (beyond > rate_at_most(np.arange(n), n, error)).mean(axis=0)
    assert one_by_one == pytest.approx(error, abs=0.03)


@pytest.mark.parametrize("copies", [2, 10])
def test_copies_of_a_canary_are_a_group_of_units_and_do_not_overflow(copies: int) -> None:
    counts = Counts(tp=95, fn=5, fp=5, tn=95)
    wrong, missed = error_rates_at_most(counts, 0.05)
    pure = clopper_pearson_counts(counts, copies=copies).eps_lower
    assert pure == pytest.approx(clopper_pearson_counts(counts).eps_lower / copies)
    eps = clopper_pearson_counts(counts, delta=1e-3, copies=copies).eps_lower
    assert math.exp(copies * eps) * wrong + group_delta(eps, 1e-3, copies) == pytest.approx(1 - missed, rel=1e-6)
    assert eps < pure
    assert group_delta(50.0, 1e-6, 100 * copies) == 1.0
    assert group_delta(1e-9, 1e-6, copies) == pytest.approx(copies * 1e-6)
    assert least_epsilon(1.0, 1e-300, delta=1e-9, copies=100) > 0


SCORES = quantiles(20, 1)


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: CanaryScores([], [1.0]), DataError, "in_scores is empty"),
        (lambda: CanaryScores([1.0], []), DataError, "out_scores is empty"),
        (lambda: CanaryScores([1.0, math.nan], [1.0]), DataError, "in_scores has 1 of 2"),
        (lambda: CanaryScores([1.0], [math.inf]), DataError, "out_scores has 1 of 1"),
        (lambda: CanaryScores([[1.0]], [1.0]), DataError, "in_scores must be one row"),
        (lambda: CanaryScores.of([1.0, 2.0], [0, 1]), DataError, "included"),  # type: ignore[list-item]
        (lambda: Counts(tp=-1, fn=1, fp=1, tn=1), DataError, "Counts"),
        (lambda: clopper_pearson_audit(SCORES, delta=1.0), ConfigurationError, "delta"),
        (lambda: clopper_pearson_audit(SCORES, delta=-0.1), ConfigurationError, "delta"),
        (lambda: clopper_pearson_audit(SCORES, confidence=1.0), ConfigurationError, "confidence"),
        (lambda: clopper_pearson_audit(SCORES, copies=0), ConfigurationError, "copies"),
        (lambda: clopper_pearson_audit(SCORES, strategy=Bonferroni(over="doubling")), ConfigurationError, "over='all'"),
        (lambda: clopper_pearson_audit(SCORES, strategy=Split(share=1.0)), ConfigurationError, "share=1.0"),
        (lambda: clopper_pearson_audit(SCORES, strategy=Explicit(threshold=math.nan)), ConfigurationError, "nan"),
        (lambda: clopper_pearson_audit(CanaryScores([1.0], [0.0]), strategy=Split()), DataError, "2 canaries"),
        (lambda: tpr_at_fpr(SCORES, 2), ConfigurationError, "fpr=2"),
        (lambda: bootstrap({"": auc}, SCORES, resamples=0), ConfigurationError, "resamples=0"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()
