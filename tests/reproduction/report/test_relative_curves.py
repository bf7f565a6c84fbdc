"""Loss curves on one scale: the formulas of the paper's figures, on numbers small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from variant_runs import run

from lit_dpret.errors import ConfigurationError, DataError
from reproduction.report.variant_figures import lowest_loss, relative_curves, smooth, speed_curves


def test_the_lowest_loss_of_all_variants_stands_at_one() -> None:
    curves = relative_curves([run("a", losses=[4.0, 3.0, 2.5]), run("b", losses=[4.0, 2.0, 3.0])])
    assert [curve.mean for curve in curves] == [(2.0, 1.5, 1.25), (2.0, 1.0, 1.5)]
    assert lowest_loss([run(losses=[3.0]), run(losses=[2.0])]) == 2.0


def test_the_mean_over_seeds_comes_with_its_t_interval() -> None:
    runs = [run("a", seed, losses=[value, 1.0]) for seed, value in enumerate([2.0, 3.0, 7.0])]
    (curve,) = relative_curves(runs)
    reference = stats.t.interval(0.95, 2, loc=4.0, scale=stats.sem([2.0, 3.0, 7.0]))
    assert (curve.low[0], curve.high[0]) == pytest.approx(reference)
    assert curve.mean == (4.0, 1.0) and curve.low[1] == curve.high[1] == 1.0 and curve.runs == 3


def test_the_range_reaches_from_the_lowest_run_to_the_highest() -> None:
    (curve,) = relative_curves([run("a", 0, losses=[2.0, 1.0]), run("a", 1, losses=[6.0, 2.0])], band="range")
    assert (curve.low, curve.mean, curve.high) == ((2.0, 1.0), (4.0, 1.5), (6.0, 2.0))


def test_one_run_has_no_band() -> None:
    (curve,) = relative_curves([run()])
    assert curve.low == curve.mean == curve.high


@pytest.mark.parametrize(
    ("axis", "x"), [("steps", (1.0, 2.0, 3.0)), ("examples", (100.0, 200.0, 300.0)), ("seconds", (1.5, 2.5, 3.5))]
)
def test_curves_run_over_steps_examples_or_the_mean_runtime(axis: str, x: tuple[float, ...]) -> None:
    runs = [run("a", 0), run("a", 1, seconds=[2.0, 3.0, 4.0])]
    assert relative_curves(runs, axis=axis)[0].x == x  # type: ignore[arg-type]


def test_runs_observed_at_different_steps_have_no_mean() -> None:
    with pytest.raises(DataError, match="'a' were not observed at the same places"):
        relative_curves([run("a", 0), run("a", 1, steps=[1, 2, 4])], axis="steps")
    with pytest.raises(DataError, match="not observed at the same places"):
        relative_curves([run("a", 0), run("a", 1, losses=[1.0])], axis="seconds")


def test_an_axis_that_a_run_does_not_tell_is_refused() -> None:
    with pytest.raises(DataError, match="does not tell its seconds"):
        relative_curves([run(seconds=())], axis="seconds")


def test_a_loss_of_zero_is_nothing_to_divide_by() -> None:
    with pytest.raises(DataError, match="lowest loss is 0"):
        relative_curves([run(losses=[1.0, 0.0])])


def test_speed_is_the_time_between_observations_over_the_examples_between_them() -> None:
    runs = [run("a", 0, seconds=[5.0, 6.0, 9.0]), run("a", 1, seconds=[1.0, 4.0, 5.0])]
    (curve,) = speed_curves(runs)
    assert curve.x == (200.0, 300.0) and curve.mean == pytest.approx((0.02, 0.02))
    assert (curve.low, curve.high) == (pytest.approx((0.01, 0.01)), pytest.approx((0.03, 0.03)))
    with pytest.raises(DataError, match="its speed needs two"):
        speed_curves([run(losses=[1.0])])


def test_the_filter_leaves_a_cubic_as_it_is_and_calms_noise() -> None:
    x = np.linspace(-1, 1, 300)
    cubic = 2 + x - x**2 + 3 * x**3
    noise = np.random.default_rng(0).standard_normal(300)
    smoothed = smooth(cubic)
    assert smoothed.window == 100 and smoothed.values == pytest.approx(cubic, abs=0.05)
    assert smooth(cubic, window=101).values == pytest.approx(cubic, abs=1e-9)
    assert np.std(smooth(noise).values) < 0.35 * np.std(noise)


@pytest.mark.parametrize(
    ("length", "window"), [(250, 100), (100, 100), (99, 99), (98, 97), (10, 9), (5, 5), (4, None), (1, None)]
)
def test_a_short_curve_gets_the_largest_odd_window_that_fits(length: int, window: int | None) -> None:
    values = np.random.default_rng(0).standard_normal(length)
    smoothed = smooth(values)
    assert smoothed.window == window and len(smoothed.values) == length
    assert (smoothed.values == tuple(values)) is (window is None)


def test_a_window_that_does_not_exceed_the_order_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="window=3 must be above order=3"):
        smooth([1.0, 2.0], window=3)
    with pytest.raises(ConfigurationError, match="band='box'"):
        relative_curves([run()], band="box")  # type: ignore[arg-type]
