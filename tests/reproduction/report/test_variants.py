"""Runs of variants as JSON lines, and in one table: means, deviations, ratios, and the numbers of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from variant_runs import run

from lit_dpret.errors import DataError
from reproduction.report.variant_runs import VariantRun, by_variant, read_runs, sizes_of, ties_of, write_runs
from reproduction.report.variants import MetricsTable


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    runs = [run(), run("Naive-DP", 3, seconds=(), confusion=None, batch_size=None)]
    write_runs(runs, tmp_path / "runs.jsonl")
    again = read_runs(tmp_path / "runs.jsonl")
    write_runs(again, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "runs.jsonl").read_bytes()
    assert [(r.variant, r.seed, list(r.losses)) for r in again] == [(r.variant, r.seed, r.losses) for r in runs]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": [1, 2]}, "3 losses and 2 steps"),
        ({"steps": [1, 3, 3]}, "steps that do not increase"),
        ({"seconds": [1.0]}, "3 losses and 1 seconds"),
        ({"moved": [1.0]}, "3 losses and 1 moved"),
        ({"losses": [1.0, float("nan"), 2.0]}, "losses that are not finite"),
        ({"metrics": {"accuracy": float("inf")}}, "metrics that are not finite"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"'Logit-DP' of seed 7.*{message}"):
        run(seed=7, **fields)


def test_sizes_are_those_of_the_runs_that_are_shown() -> None:
    some = [run("a", 0), run("a", 1), run("b", 0), run("b", 1), run("a", 0, batch_size=10, losses=[1.0]),
            run("start", steps=[0], losses=[1.0], examples=(), seconds=())]  # fmt: skip
    assert sizes_of(some) == "2 runs of 3 steps of 100 examples: a; b. 1 run of 1 step of 10 examples: a"
    assert sizes_of([run("a", 0), run("a", 1, losses=[2.0] * 1200, batch_size=100)]).startswith("2 runs of 3 to 1,200")


def test_what_became_of_tied_votes_is_told_of_k_nn_and_of_nothing_else() -> None:
    knn = [run("a", seed, metrics={"tied_votes": 0.5 + 0.2 * seed, "lowest_accuracy": 0.25}) for seed in (0, 1)]
    assert "tied: a 60%." in ties_of(knn) and ties_of(knn).endswith("a 0.250.")
    assert ties_of([*knn, run("classifier")]) == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not a run"),
        ("{}", "line 2 is not a run: its schema"),
        ('{"schema": "lit-dpret/variant-run/9"}', "line 2 is not a run: its schema"),
        ('{"schema": "lit-dpret/variant-run/1", "colour": 1}', "line 2 is not a run"),
    ],
)
def test_a_line_that_is_no_run_is_refused_by_its_number(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    write_runs([run()], path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=message):
        read_runs(path)


def test_variants_keep_their_order_and_each_seed_counts_once() -> None:
    groups = by_variant([run("b"), run("a"), run("b", 1)])
    assert list(groups) == ["b", "a"] and len(groups["b"]) == 2
    with pytest.raises(DataError, match="'b' has seed 0 twice"):
        by_variant([run("b"), run("b")])
    with pytest.raises(DataError, match="no runs"):
        by_variant([])


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
