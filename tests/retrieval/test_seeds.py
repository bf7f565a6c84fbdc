"""Statistics over training runs, beside SciPy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.statistics import seed_interval, seed_test

RNG = np.random.default_rng(0)
PAIRS = [
    (RNG.normal(0.5, 0.02, 3).tolist(), RNG.normal(0.52, 0.002, 3).tolist()),
    (RNG.normal(0.5, 0.01, 5).tolist(), RNG.normal(0.5, 0.03, 3).tolist()),
    (RNG.normal(0.4, 0.01, 2).tolist(), RNG.normal(0.6, 0.01, 9).tolist()),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_test_between_two_settings_is_welchs(a: list[float], b: list[float]) -> None:
    ours, theirs = seed_test(a, b), stats.ttest_ind(a, b, equal_var=False)
    bounds = theirs.confidence_interval(0.95)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (ours.low, ours.high) == (pytest.approx(bounds.low), pytest.approx(bounds.high))
    assert ours.difference == pytest.approx(np.mean(a) - np.mean(b))


@pytest.mark.parametrize("exact", [0.45, 0.5])
def test_an_untrained_system_is_held_against_runs_by_a_one_sample_test(exact: float) -> None:
    runs = PAIRS[1][0]
    ours, theirs = seed_test(runs, [exact]), stats.ttest_1samp(runs, exact)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert seed_test([exact], runs).difference == pytest.approx(-ours.difference)
    assert seed_test([exact], runs).p_value == pytest.approx(ours.p_value)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_interval_of_a_mean_over_runs_is_students(level: float) -> None:
    runs = PAIRS[1][0]
    low, high = stats.t.interval(level, len(runs) - 1, loc=np.mean(runs), scale=stats.sem(runs))
    ours = seed_interval(runs, level=level)
    assert (ours.mean, ours.low, ours.high) == pytest.approx((np.mean(runs), low, high))


def test_nineteen_of_twenty_intervals_hold_the_true_mean() -> None:
    runs = np.random.default_rng(1).normal(0.5, 0.02, (2000, 3))
    held = [i.low <= 0.5 <= i.high for i in (seed_interval(row.tolist()) for row in runs)]
    assert 0.935 < np.mean(held) < 0.965


def test_one_run_says_nothing_about_its_uncertainty() -> None:
    only = seed_interval([0.5])
    assert only.mean == 0.5 and math.isnan(only.low) and math.isnan(only.high)


def test_runs_without_any_variation_are_equal_or_not() -> None:
    assert seed_test([0.5, 0.5], [0.5, 0.5]).p_value == 1.0
    assert seed_test([0.5, 0.5], [0.4]).p_value == 0.0


def test_what_no_run_can_answer_is_refused() -> None:
    with pytest.raises(DataError, match="two runs"):
        seed_test([0.5], [0.4])
    with pytest.raises(DataError, match="finite"):
        seed_interval([])
    with pytest.raises(DataError, match="finite"):
        seed_test([0.5, float("nan")], [0.4, 0.3])
    with pytest.raises(ConfigurationError, match="level=1"):
        seed_interval([0.5, 0.6], level=1)
