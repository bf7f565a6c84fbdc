"""Metrics of several variants in one table: means, deviations, ratios, and the paper's numbers beside them."""

from __future__ import annotations

from typing import Any

import pytest
from variant_runs import run

from lit_dpret.errors import DataError
from reproduction.published import PAPER_002
from reproduction.report.variant_runs import VariantRun
from reproduction.report.variants import PAPER_METRICS, MetricsTable

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


def test_the_sheet_holds_every_number() -> None:
    assert [row[-2:] for row in of().sheet().rows] == [[pytest.approx(0.5), 2], [1.0, 2], [1.0, 2], [1.0, 2]]


def test_a_baseline_of_zero_gives_no_ratio() -> None:
    found = [run("a", metrics={"accuracy": 0.5}), run("zero", metrics={"accuracy": 0.0})]
    assert "| a | – |" in of(found, "zero", metrics={"accuracy": "Accuracy"}).grid(relative=True).markdown()


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


def test_the_papers_relative_tables_are_its_absolute_ones_divided_by_the_last_row_or_nearly() -> None:
    pairs = [(PAPER_002["table_1"][net], PAPER_002["table_3"][net]) for net in ("EmbeddingNet", "ResNet18")]
    for relative, absolute in [*pairs, (PAPER_002["table_2"], PAPER_002["table_4"])]:
        for variant, row in relative.items():
            for told, value, base in zip(row, absolute[variant], absolute["Non-private"], strict=True):
                assert told == pytest.approx(value / base, abs=0.04)  # the paper averages the two differently


def test_a_cell_shows_ours_and_the_papers_and_a_dash_where_there_is_none() -> None:
    some = [run("Logit-DP", metrics=dict.fromkeys(PAPER_METRICS, 0.25)),
            run("Ours alone", metrics=dict.fromkeys(PAPER_METRICS, 0.5))]  # fmt: skip
    table = of(some, "Ours alone", metrics=PAPER_METRICS)
    lines = table.beside_the_paper(PAPER_002["table_1"]["EmbeddingNet"], relative=True).markdown().splitlines()
    assert lines[2] == "| Logit-DP | 0.500 / 0.819 | 0.500 / 0.855 | 0.500 / 0.812 | 0.500 / 0.831 |"
    assert lines[3] == "| Ours alone | 1.000 / – | 1.000 / – | 1.000 / – | 1.000 / – |"
    assert lines[4].startswith("| Naive-DP | – / 0.827 |")
    absolute = table.beside_the_paper(PAPER_002["table_3"]["EmbeddingNet"], relative=False).markdown()
    assert "| Logit-DP | 0.250 / 0.173 |" in absolute
