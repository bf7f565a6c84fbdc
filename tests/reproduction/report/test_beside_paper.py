"""Our numbers beside the paper's, and the paper's beside each other."""

from __future__ import annotations

import pytest
from variant_runs import run

from reproduction.report.paper_002 import METRICS, TABLE_1, TABLE_2, TABLE_3, TABLE_4
from reproduction.report.relative_table import PAPER_METRICS, beside_the_paper, relative_table

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
