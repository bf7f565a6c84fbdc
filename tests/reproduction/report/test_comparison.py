"""Which systems differ: over training runs first, over queries beside, each budget a family."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lit_dpret.errors import DataError
from lit_dpret.retrieval.statistics import holm
from reproduction.report.comparison import (
    ComparisonReport,
    ModeRow,
    differences,
    gain_shares,
    p_value,
    share_of_gain,
)

QUERIES = 200
RNG = np.random.default_rng(0)


def row(name: str, runs: list[float], budget: float | None = 3.0, variant: str = "") -> ModeRow:
    per_query = np.clip(RNG.normal(np.mean(runs), 0.1, QUERIES), 0, 1).tolist()
    settings = {} if len(runs) == 1 else {"mode": name, "epsilon": "3.000", "sigma": 1.5}
    return ModeRow(
        name=name, per_run={"nDCG@10": runs}, per_query={"nDCG@10": per_query}, budget=budget, variant=variant,
        privacy=f"epsilon = {budget or 0:.3f}, delta = 1e-05, unit = query", settings=settings,
    )  # fmt: skip


ROWS = [
    row("zero-shot", [0.45], budget=None),
    row("BM25", [0.30], budget=None),
    row("a", [0.50, 0.51, 0.50], variant="a"),
    row("b", [0.40, 0.60, 0.50]),
    row("c", [0.52, 0.51, 0.52]),
    row("a at 8", [0.54, 0.53, 0.55], budget=8.0, variant="a"),
]


def test_a_budget_is_one_family_of_all_pairs_with_a_trained_row() -> None:
    found = [each for each in differences(ROWS, "nDCG@10") if each.budget == 3.0]
    assert len(found) == 3 * 2 + 3
    runs = {r.name: r.per_run["nDCG@10"] for r in ROWS}
    raw = [
        stats.ttest_1samp(runs[each.first], runs[each.second][0]).pvalue
        if len(runs[each.second]) == 1
        else stats.ttest_ind(runs[each.first], runs[each.second], equal_var=False).pvalue
        for each in found
    ]
    assert [each.p_runs for each in found] == pytest.approx(holm(raw))
    assert all(each.difference >= 0 for each in found)


def test_with_references_a_budget_is_one_family_of_the_pairs_with_one_of_them() -> None:
    every = {frozenset((e.first, e.second)): e for e in differences(ROWS, "nDCG@10") if e.budget == 3.0}
    found = [each for each in differences(ROWS, "nDCG@10", ["zero-shot", "a"]) if each.budget == 3.0]
    pairs = {frozenset((each.first, each.second)): each for each in found}
    assert set(pairs) == {pair for pair in every if pair & {"zero-shot", "a"}} and len(pairs) == 3 + 3
    assert all(each.p_runs <= every[pair].p_runs for pair, each in pairs.items()), "fewer comparisons cost less"


def test_a_difference_that_single_runs_do_not_carry_is_not_significant_however_many_queries_do() -> None:
    pair = next(d for d in differences(ROWS, "nDCG@10") if {d.first, d.second} == {"b", "BM25"})
    assert pair.holds_over_queries() and not pair.is_significant()
    other = [each for each in differences(ROWS, "nDCG@10") if each.budget is None]
    assert [(each.first, each.second) for each in other] == [("a at 8", "a")], "one mode at two budgets"
    odd = ModeRow(name="odd", per_run={"nDCG@10": [0.1]}, per_query={"nDCG@10": [0.1]})
    with pytest.raises(DataError, match="different queries"):
        differences([*ROWS, odd], "nDCG@10")


def test_without_budgets_all_rows_are_one_family() -> None:
    rows = [row("x", [0.5, 0.52, 0.51], budget=None), row("y", [0.4, 0.41, 0.43], budget=None), ROWS[0]]
    found = differences(rows, "nDCG@10")
    assert [(each.first, each.second) for each in found] == [("x", "y"), ("x", "zero-shot"), ("zero-shot", "y")]
    alone = [differences(pair, "nDCG@10")[0].p_runs for pair in itertools.combinations(rows, 2)]
    assert [each.p_runs for each in found] == pytest.approx(holm(alone))


def test_the_files_say_the_same(tmp_path: Path) -> None:
    made: dict[str, Any] = {"metrics": ["nDCG@10"], "evaluated_on": "200 questions", "command": "python train.py <x>"}
    written = ComparisonReport(rows=ROWS, private_runs=12, **made).write(tmp_path)
    facts = json.loads(written["compare_modes.json"].read_text(encoding="utf-8"))
    with written["compare_modes.csv"].open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    for shown, stated, given in zip(table, facts["rows"], ROWS, strict=True):
        mean = float(np.mean(given.per_run["nDCG@10"]))
        assert float(shown["nDCG@10 over runs"]) == pytest.approx(mean)
        assert stated["metrics"]["nDCG@10"]["over_runs"]["mean"] == pytest.approx(mean)
        assert (shown["nDCG@10 over runs low"] == "") == (len(given.per_run["nDCG@10"]) == 1)
    assert len(facts["differences"]) == len(differences(ROWS, "nDCG@10"))
    page = written["compare_modes.html"].read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;x&gt;" in page and "12 trainings on the same private queries" in page
    assert "Every epsilon is at delta = 1e-05, unit = query." in page and "<td>epsilon = 8.000</td>" in page
    other = replace(ROWS[2], name="other", privacy="epsilon = 3.000, delta = 1e-05, unit = user")
    written = ComparisonReport(rows=[*ROWS, other], **made).write(tmp_path)
    page = written["compare_modes.html"].read_text(encoding="utf-8")
    assert f"<td>{other.privacy}</td>" in page and "Every epsilon" not in page, "claims that differ stand in full"


# -- shares of the gain


def system(name: str, *runs: float) -> ModeRow:
    return ModeRow(name=name, per_run={"m": runs}, per_query={"m": [float(np.mean(runs))] * 4})


def test_the_start_keeps_nothing_and_the_bound_keeps_all() -> None:
    bound = [0.49, 0.50, 0.51]
    assert share_of_gain([0.4, 0.4], bound, 0.4).mean == pytest.approx(0.0)
    assert share_of_gain(bound, bound, 0.4).mean == pytest.approx(1.0)
    assert share_of_gain([0.38, 0.38], bound, 0.4).mean == pytest.approx(-0.2), "worse than the start is a loss"
    assert math.isnan(share_of_gain([0.45], bound, 0.4).low), "one run has no interval"
    assert [p_value(p) for p in (0.0, 0.0009, 0.001, 1.0)] == ["< 0.001"] * 2 + ["0.001", "1.000"]


def test_the_interval_holds_the_true_share_as_often_as_it_says() -> None:
    coins = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        system, bound = coins.normal(0.43, 0.004, 3), coins.normal(0.46, 0.004, 3)
        found = share_of_gain(system.tolist(), bound.tolist(), 0.40)
        held += found.low <= 0.5 <= found.high
    assert 0.93 <= held / 1000 <= 0.995


def test_a_bound_that_gains_nothing_is_no_bound() -> None:
    with pytest.raises(DataError, match="nothing to take a share of"):
        share_of_gain([0.45], [0.39, 0.4], 0.4)
    rows = [system("good", 0.45, 0.46), system("bad", 0.39, 0.38)]
    assert {share.bound for share in gain_shares(rows, rows, system("start", 0.4), "m")} == {"good"}
