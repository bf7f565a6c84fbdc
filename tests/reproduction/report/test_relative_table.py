"""Tables of metrics by variant: means, deviations and what they are relative to."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest
from variant_runs import run

from lit_dpret.errors import DataError
from reproduction.report.paper_002 import METRICS, TABLE_1, TABLE_2, TABLE_3, TABLE_4
from reproduction.report.relative_table import (
    PAPER_METRICS,
    beside_the_paper,
    caption,
    read_table,
    relative_table,
    shares_of_the_gain,
    to_markdown,
    write_table,
)
from reproduction.report.variant_runs import VariantRun

TITLES = {"accuracy": "Accuracy", "best_recall": "Recall"}


def runs() -> list[VariantRun]:
    values = {"Logit-DP": [(0.1, 0.4), (0.3, 0.6)], "Non-private": [(0.3, 0.5), (0.5, 0.5)]}
    return [
        run(variant, seed, metrics={"accuracy": accuracy, "best_recall": recall})
        for variant, found in values.items()
        for seed, (accuracy, recall) in enumerate(found)
    ]


def test_a_relative_metric_is_the_mean_over_the_baselines_mean() -> None:
    table = relative_table(runs(), baseline="Non-private", metrics=TITLES)
    cell = table.rows["Logit-DP"]["accuracy"]
    assert cell.mean == pytest.approx(0.2) and cell.relative == pytest.approx(0.5) and cell.runs == 2
    assert cell.deviation == pytest.approx(statistics.stdev([0.1, 0.3]))
    assert all(cell.relative == 1.0 for cell in table.rows["Non-private"].values())


def test_the_markdown_shows_relative_means_or_means_with_deviations() -> None:
    table = relative_table(runs(), baseline="Non-private", metrics=TITLES)
    assert to_markdown(table, form="relative").splitlines() == [
        "|  | Accuracy | Recall |",
        "| --- | ---: | ---: |",
        "| Logit-DP | 0.500 | 1.000 |",
        "| Non-private | 1.000 | 1.000 |",
    ]
    assert "| Logit-DP | 0.200 / 0.141 | 0.500 / 0.141 |" in to_markdown(table, form="absolute")


def test_one_run_has_no_deviation() -> None:
    table = relative_table(runs()[:1], baseline=None, metrics=TITLES)
    assert "| Logit-DP | 0.100 | 0.400 |" in to_markdown(table, form="absolute")
    assert caption(table, form="absolute").startswith("Test metrics over 1 run. Recall")


def test_the_caption_says_over_how_many_runs_and_that_the_best_class_counts() -> None:
    table = relative_table(runs()[:3], baseline="Non-private", metrics=TITLES)
    words = caption(table, form="relative")
    assert "over 1 to 2 runs" in words and "divided by that of Non-private" in words and "best class" in words
    assert "best class" not in caption(
        relative_table(runs(), baseline=None, metrics={"accuracy": "A"}), form="absolute"
    )


def test_files_hold_every_number(tmp_path: Path) -> None:
    written = write_table(relative_table(runs(), baseline="Non-private", metrics=TITLES), tmp_path)
    assert [path.name for path in written] == ["metrics.csv", "metrics.json", "metrics.md"]
    rows = list(csv.DictReader(written[0].open()))
    assert len(rows) == 4 and float(rows[0]["relative"]) == pytest.approx(0.5) and rows[0]["runs"] == "2"
    found = json.loads(written[1].read_text())
    assert found["baseline"] == "Non-private" and found["rows"]["Logit-DP"]["accuracy"]["mean"] == pytest.approx(0.2)
    assert written[2].read_text().count("| Logit-DP |") == 2


def test_a_baseline_of_zero_gives_no_ratio() -> None:
    found = [run("a", metrics={"accuracy": 0.5}), run("zero", metrics={"accuracy": 0.0})]
    table = relative_table(found, baseline="zero", metrics={"accuracy": "Accuracy"})
    assert table.rows["a"]["accuracy"].relative is None
    assert "| a | – |" in to_markdown(table, form="relative")


def test_a_missing_baseline_or_metric_is_refused() -> None:
    with pytest.raises(DataError, match="baseline 'SGD' is not among the variants Logit-DP, Non-private"):
        relative_table(runs(), baseline="SGD", metrics=TITLES)
    with pytest.raises(DataError, match="'Logit-DP' of seed 0 has no metric 'speed'"):
        relative_table(runs(), baseline=None, metrics={"speed": "Speed"})
    with pytest.raises(DataError, match="needs a baseline"):
        to_markdown(relative_table(runs(), baseline=None, metrics=TITLES), form="relative")


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    table = relative_table([run("A"), run("A", seed=1), run("B")], baseline="A", metrics={"accuracy": "Accuracy"})
    write_table(table, tmp_path)
    assert read_table(tmp_path / "metrics.json") == table
    (tmp_path / "metrics.json").write_text("[]")
    with pytest.raises(DataError, match="holds no table"):
        read_table(tmp_path / "metrics.json")


def test_a_share_of_the_gain_counts_from_what_the_encoder_had_before_it_was_trained() -> None:
    start = [run("Untrained", seed, metrics={"accuracy": 0.1, "best_recall": 0.5}) for seed in (0, 1)]
    table = relative_table([*runs(), *start], baseline="Non-private", metrics=TITLES)
    words = shares_of_the_gain(table, start="Untrained")
    assert words.endswith("in accuracy (0.100 to 0.400): Logit-DP 33%."), "while 0.2 / 0.4 is a half"
    assert not shares_of_the_gain(table, start="Untrained", metric="best_recall"), "no gain, no share"
    assert not shares_of_the_gain(relative_table(runs(), baseline="Non-private", metrics=TITLES), start="Untrained")


PAIRS = [(TABLE_1["EmbeddingNet"], TABLE_3["EmbeddingNet"]), (TABLE_1["ResNet18"], TABLE_3["ResNet18"]),
         (TABLE_2, TABLE_4)]  # fmt: skip


@pytest.mark.parametrize(("relative", "absolute"), PAIRS, ids=["embedding net", "resnet18", "second task"])
def test_the_papers_relative_tables_are_its_absolute_ones_divided_by_the_last_row_or_nearly(relative, absolute) -> None:  # type: ignore[no-untyped-def]
    for variant, row in relative.items():
        for told, value, base in zip(row, absolute[variant], absolute["Non-private"], strict=True):
            assert told == pytest.approx(value / base, abs=0.04)  # the paper averages the two differently


def test_the_metrics_of_the_paper_are_those_of_our_tables() -> None:
    assert tuple(PAPER_METRICS) == METRICS


def test_a_cell_shows_ours_and_the_papers_and_a_dash_where_there_is_none() -> None:
    metrics = dict.fromkeys(METRICS, 0.25)
    runs = [run("Logit-DP", metrics=metrics), run("Ours alone", metrics=dict.fromkeys(METRICS, 0.5))]
    table = relative_table(runs, baseline="Ours alone", metrics=PAPER_METRICS)
    lines = beside_the_paper(table, TABLE_1["EmbeddingNet"], relative=True).markdown().splitlines()
    assert lines[2] == "| Logit-DP | 0.500 / 0.819 | 0.500 / 0.855 | 0.500 / 0.812 | 0.500 / 0.831 |"
    assert lines[3] == "| Ours alone | 1.000 / – | 1.000 / – | 1.000 / – | 1.000 / – |"
    assert lines[4].startswith("| Naive-DP | – / 0.827 |")
    assert "| Logit-DP | 0.250 / 0.173 |" in beside_the_paper(table, TABLE_3["EmbeddingNet"], relative=False).markdown()
