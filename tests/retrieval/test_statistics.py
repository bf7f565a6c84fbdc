from __future__ import annotations

import itertools

import numpy as np
import pytest

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval import statistics
from lit_dpret.retrieval.statistics import Interval, bootstrap_interval, holm, macro_interval, paired_randomisation_test


def test_the_interval_is_the_one_scipy_finds() -> None:
    from scipy.stats import bootstrap

    values = np.random.default_rng(0).beta(0.5, 0.8, 300)
    ours = bootstrap_interval(values, resamples=20_000)
    theirs = bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert ours.mean == pytest.approx(values.mean(), abs=1e-15)
    assert ours.low == pytest.approx(theirs.low, abs=1e-3)
    assert ours.high == pytest.approx(theirs.high, abs=1e-3)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for trial in range(300):
        found = bootstrap_interval(rng.uniform(size=80), resamples=400, seed=trial)
        covered += found.low <= 0.5 <= found.high
    assert 0.90 <= covered / 300 <= 0.985


def test_a_wider_level_gives_a_wider_interval_and_constant_values_none() -> None:
    values = np.random.default_rng(3).normal(size=100)
    narrow, wide = bootstrap_interval(values, level=0.5), bootstrap_interval(values, level=0.99)
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high
    assert bootstrap_interval([0.5] * 10) == Interval(0.5, 0.5, 0.5)
    assert np.isnan(bootstrap_interval([]).mean)


def test_the_same_seed_gives_the_same_interval_in_one_chunk_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).normal(size=50)
    whole = bootstrap_interval(values, seed=7)
    assert whole != bootstrap_interval(values, seed=8)
    monkeypatch.setattr(statistics, "_CHUNK", 1000)
    assert bootstrap_interval(values, seed=7) == whole


def test_the_p_value_is_that_of_all_swaps_when_they_can_be_counted() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.uniform(size=10), rng.uniform(size=10) - 0.15
    observed = abs((a - b).mean())
    swaps = [abs(float((np.array(signs) * (a - b)).mean())) for signs in itertools.product((1, -1), repeat=10)]
    exact = sum(value >= observed - 1e-12 for value in swaps) / len(swaps)
    found = paired_randomisation_test(a, b, resamples=50_000)
    assert found.difference == pytest.approx((a - b).mean())
    assert found.p_value == pytest.approx(exact, abs=0.006)


def test_the_p_value_is_symmetric_one_for_equal_systems_and_small_for_unequal_ones() -> None:
    rng = np.random.default_rng(6)
    a = rng.uniform(size=200)
    b = a + 0.05 + 0.1 * rng.normal(size=200)
    assert paired_randomisation_test(a, a).p_value == 1.0
    assert paired_randomisation_test(a, b).p_value == paired_randomisation_test(b, a).p_value
    assert paired_randomisation_test(a, b, resamples=999).p_value == pytest.approx(1 / 1000)


def test_under_the_null_hypothesis_p_values_are_uniform() -> None:
    rng = np.random.default_rng(7)
    values = [
        paired_randomisation_test(rng.normal(size=40), rng.normal(size=40), resamples=500, seed=trial).p_value
        for trial in range(300)
    ]
    assert np.mean(np.array(values) <= 0.1) == pytest.approx(0.1, abs=0.05)
    assert np.mean(values) == pytest.approx(0.5, abs=0.05)


def test_holm_keeps_the_order_and_never_lowers_a_p_value() -> None:
    raw = [0.04, 0.001, 0.5, 0.03]
    adjusted = holm(raw)
    assert adjusted == pytest.approx([0.09, 0.004, 0.5, 0.09])
    assert all(after >= before for before, after in zip(raw, adjusted, strict=True))
    assert holm([]) == []


def test_bad_values_are_refused() -> None:
    with pytest.raises(DataError, match="one finite number per query"):
        bootstrap_interval([0.1, float("nan")])
    with pytest.raises(ConfigurationError, match="level=95"):
        bootstrap_interval([0.1], level=95)
    with pytest.raises(ConfigurationError, match="resamples=0"):
        bootstrap_interval([0.1], resamples=0)
    with pytest.raises(DataError, match="3 and 2 values"):
        paired_randomisation_test([1, 2, 3], [1, 2])


def test_the_mean_over_groups_counts_each_group_alike() -> None:
    few, many = np.zeros(10), np.ones(1000)
    assert macro_interval([few, many]) == Interval(0.5, 0.5, 0.5)
    assert macro_interval([few, many], [1, 3]).mean == 0.75
    with pytest.raises(DataError, match="as many positive weights"):
        macro_interval([few, many], [1.0, 0.0])
    with pytest.raises(DataError, match="a query in each"):
        macro_interval([few, []])
    with pytest.raises(ConfigurationError, match="resamples=0"):
        macro_interval([few], resamples=0)


def test_the_interval_of_a_mean_over_groups_is_as_wide_as_the_groups_errors_add_up_to() -> None:
    rng = np.random.default_rng(4)
    groups = [rng.normal(size=n) for n in (50, 200, 800)]
    found = macro_interval(groups, resamples=4000)
    spread = 1.96 * np.sqrt(sum(values.var() / len(values) for values in groups)) / len(groups)
    assert found.mean == pytest.approx(np.mean([values.mean() for values in groups]))
    assert (found.high - found.low) / 2 == pytest.approx(spread, rel=0.06)
