from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lit_dpret.errors import DataError
from lit_dpret.retrieval.comparison import Comparison, compare_values
from lit_dpret.retrieval.statistics import bootstrap_interval, holm, paired_randomisation_test
from lit_dpret.retrieval.trec_runs import Run, evaluate

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


def test_what_cannot_be_compared_is_refused() -> None:
    values = np.zeros(3)
    with pytest.raises(DataError, match="same data sets"):
        compare_values({"x": {"mrr@1": values}}, {"y": {"mrr@1": values}})
    with pytest.raises(DataError, match="nothing to compare"):
        compare_values({}, {})
