"""Metrics of several variants in one table: means, deviations, ratios, and the paper's numbers beside them."""

from __future__ import annotations

from typing import Any

import pytest
from variant_runs import run

from lit_dpret.errors import DataError
from reproduction.report.variant_runs import VariantRun
from reproduction.report.variants import MetricsTable

TITLES = {"accuracy": "Accuracy", "best_recall": "Recall"}


def runs() -> list[VariantRun]:
    """Two runs of two variants: means of 0.2 and 0.4, deviations of 0.1 times the square root of two."""
    return [
        run("Logit-DP", seed, metrics={"accuracy": 0.1 + 0.2 * seed, "best_recall": 0.4 + 0.2 * seed})
        for seed in (0, 1)
    ] + [run("Non-private", seed, metrics={"accuracy": 0.4, "best_recall": 0.5}) for seed in (0, 1)]


def of(some: list[VariantRun] | None = None, baseline: str | None = "Non-private", **settings: Any) -> MetricsTable:
    return MetricsTable.of(runs() if some is None else some, baseline=baseline, **{"metrics": TITLES} | settings)


def test_means_stand_with_their_deviation_or_divided_by_those_of_the_baseline() -> None:
    assert of().grid(relative=True).markdown().splitlines() == [
        "|  | Accuracy | Recall |",
        "| --- | ---: | ---: |",
        "| Logit-DP | 0.500 | 1.000 |",
        "| Non-private | 1.000 | 1.000 |",
    ]
    assert "| Logit-DP | 0.200 / 0.141 | 0.500 / 0.141 |" in of().grid(relative=False).markdown()
    single = of(runs()[:1], baseline=None)
    assert "| Logit-DP | 0.100 | 0.400 |" in single.grid(relative=False).markdown()
    assert single.caption(relative=False).startswith("Test metrics over 1 run. Recall")


def test_a_missing_baseline_or_metric_is_refused() -> None:
    with pytest.raises(DataError, match="baseline 'SGD'"):
        of(baseline="SGD")
    with pytest.raises(DataError, match=r"'Logit-DP' of seed 0 .* 'speed'"):
        of(metrics={"speed": "Speed"})


def test_a_share_of_the_gain_counts_from_what_the_encoder_had_before_it_was_trained() -> None:
    start = [run("Untrained", seed, metrics={"accuracy": 0.1, "best_recall": 0.5}) for seed in (0, 1)]
    table = of([*runs(), *start])
    words = table.shares_of_the_gain(start="Untrained")
    assert words.endswith("in accuracy (0.100 to 0.400): Logit-DP 33%."), "while 0.2 / 0.4 is a half"
    assert not of().shares_of_the_gain(start="Untrained")
    best = run("Untrained", metrics={"accuracy": 0.4, "best_recall": 0.5})
    assert not of([*runs(), best]).shares_of_the_gain(start="Untrained"), "no gain, no share"
