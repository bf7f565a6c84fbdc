from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval import statistics
from lit_dpret.retrieval.comparison import Comparison, compare_values
from lit_dpret.retrieval.statistics import (
    Interval,
    bootstrap_interval,
    holm,
    macro_interval,
    paired_randomisation_test,
    seed_interval,
    seed_test,
)
from lit_dpret.retrieval.trec_runs import Run, evaluate


@pytest.mark.parametrize("queries", [2, 50, 700])
def test_the_interval_is_the_one_scipy_finds_from_the_same_draws_in_one_chunk_or_many(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).beta(0.5, 0.8, queries)
    ours = bootstrap_interval(values)
    theirs = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=2000, rng=np.random.default_rng(0)
    ).confidence_interval
    assert (ours.low, ours.mean, ours.high) == pytest.approx((theirs.low, values.mean(), theirs.high), abs=1e-14)
    assert queries == 2 or bootstrap_interval(values, seed=8) != ours
    monkeypatch.setattr(statistics, "_CHUNK", 1000)
    assert bootstrap_interval(values) == ours


def test_the_p_value_is_that_of_all_swaps_when_they_can_be_counted() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.uniform(size=10), rng.uniform(size=10) - 0.15
    observed = abs((a - b).mean())
    swaps = [abs(float((np.array(signs) * (a - b)).mean())) for signs in itertools.product((1, -1), repeat=10)]
    exact = sum(value >= observed - 1e-12 for value in swaps) / len(swaps)
    found = paired_randomisation_test(a, b, resamples=50_000)
    assert found.difference == pytest.approx((a - b).mean())
    assert found.p_value == pytest.approx(exact, abs=0.006)


def test_the_mean_over_groups_counts_each_group_alike() -> None:
    few, many = np.zeros(10), np.ones(1000)
    assert macro_interval([few, many]) == Interval(0.5, 0.5, 0.5)
    assert macro_interval([few, many], [1, 3]).mean == 0.75


def test_the_interval_of_a_mean_over_groups_is_as_wide_as_the_groups_errors_add_up_to() -> None:
    rng = np.random.default_rng(4)
    groups = [rng.normal(size=n) for n in (50, 200, 800)]
    found = macro_interval(groups, resamples=4000)
    spread = 1.96 * np.sqrt(sum(values.var() / len(values) for values in groups)) / len(groups)
    assert found.mean == pytest.approx(np.mean([values.mean() for values in groups]))
    assert (found.high - found.low) / 2 == pytest.approx(spread, rel=0.06)


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


def test_runs_have_students_interval_and_an_untrained_system_a_one_sample_test() -> None:
    runs = PAIRS[1][0]
    for level in (0.8, 0.95):
        low, high = stats.t.interval(level, len(runs) - 1, loc=np.mean(runs), scale=stats.sem(runs))
        ours = seed_interval(runs, level=level)
        assert (ours.mean, ours.low, ours.high) == pytest.approx((np.mean(runs), low, high))
    for exact in (0.45, 0.5):
        found = seed_test(runs, [exact])
        assert found.p_value == pytest.approx(stats.ttest_1samp(runs, exact).pvalue, rel=1e-9)
        assert seed_test([exact], runs).difference == pytest.approx(-found.difference)
        assert seed_test([exact], runs).p_value == pytest.approx(found.p_value)
    only = seed_interval([0.5])
    assert only.mean == 0.5
    assert math.isnan(only.low)
    assert math.isnan(only.high)
    assert seed_test([0.5, 0.5], [0.5, 0.5]).p_value == 1.0
    assert seed_test([0.5, 0.5], [0.4]).p_value == 0.0


QRELS = {f"q{q}": {"a": 1} for q in range(40)}
GOOD = {f"q{q}": {"a": 2.0, "b": 1.0} for q in range(40)}
BAD = {f"q{q}": {"a": 2.0 if q < 10 else 0.0, "b": 1.0} for q in range(38)}  # two queries are missing


def compare(a: Run, b: Run, metrics: list[str], **settings: Any) -> Comparison:
    first, second = ({"all queries": evaluate(run, QRELS, metrics, resamples=1).per_query} for run in (a, b))
    return compare_values(first, second, **settings)


def test_the_difference_is_that_of_the_two_evaluations_with_interval_and_p_value_of_its_queries() -> None:
    cell = compare(GOOD, BAD, ["mrr@10"]).cells[0]
    good, bad = (evaluate(run, QRELS, ["mrr@10"]) for run in (GOOD, BAD))
    values = good.per_query["mrr@10"] - bad.per_query["mrr@10"]
    assert (cell.a, cell.b) == (good.means["mrr@10"], bad.means["mrr@10"])
    assert cell.difference == bootstrap_interval(values)
    test = paired_randomisation_test(good.per_query["mrr@10"], bad.per_query["mrr@10"])
    assert cell.p_value == test.p_value < 0.001
    assert (cell.better, cell.worse, cell.queries) == (30, 0, 40)


def test_a_run_against_itself_differs_by_nothing_and_chance_explains_it() -> None:
    comparison = compare(GOOD, GOOD, ["ndcg@10", "success@1"])
    for cell in comparison.cells:
        assert (cell.difference.low, cell.difference.mean, cell.difference.high) == (0, 0, 0)
        assert cell.p_value == cell.p_holm == 1.0 and not comparison.significant(cell)


def test_the_correction_is_over_the_whole_grid_of_data_sets_and_metrics() -> None:
    rng = np.random.default_rng(0)
    a = {data: {m: rng.normal(0.25, 1, 60) for m in ("ndcg@10", "mrr@10")} for data in ("one", "two", "three")}
    b = {data: {m: rng.normal(0, 1, 60) for m in ("ndcg@10", "mrr@10")} for data in ("one", "two", "three")}
    comparison = compare_values(a, b, resamples=2000)
    assert [cell.p_holm for cell in comparison.cells] == holm([cell.p_value for cell in comparison.cells])
    alone = compare_values({"one": a["one"]}, {"one": b["one"]}, resamples=2000)
    assert alone.cells[0].p_value == comparison.cells[0].p_value
    assert alone.cells[0].p_holm < comparison.cells[0].p_holm
    assert comparison.to_dict()["correction"] == "Holm over 6 tests"


ZEROS: Any = {"mrr@1": np.zeros(3)}


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: bootstrap_interval([0.1, float("nan")]), DataError, "one finite number per query"),
        (lambda: bootstrap_interval([0.1], level=95), ConfigurationError, "level=95"),
        (lambda: bootstrap_interval([0.1], resamples=0), ConfigurationError, "resamples=0"),
        (lambda: paired_randomisation_test([1, 2, 3], [1, 2]), DataError, "3 and 2 values"),
        (lambda: macro_interval([[1.0], [1.0]], [1.0, 0.0]), DataError, "weights"),
        (lambda: macro_interval([[1.0], []]), DataError, "query in each"),
        (lambda: macro_interval([[1.0]], resamples=0), ConfigurationError, "resamples=0"),
        (lambda: seed_test([0.5], [0.4]), DataError, "two runs"),
        (lambda: seed_interval([]), DataError, "finite"),
        (lambda: seed_test([0.5, float("nan")], [0.4, 0.3]), DataError, "finite"),
        (lambda: seed_interval([0.5, 0.6], level=1), ConfigurationError, "level=1"),
        (lambda: compare_values({"x": ZEROS}, {"y": ZEROS}), DataError, "same data sets"),
        (lambda: compare_values({}, {}), DataError, "no values"),
    ],
)
def test_what_cannot_be_estimated_or_compared_is_refused(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()
