"""Runs of variants as JSON lines, their tables, and their curves on numbers small enough to check by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from variant_runs import run

from lit_dpret.errors import DataError
from reproduction.report import variant_figures as figures
from reproduction.report.variant_figures import relative_curves, smooth, speed_curves
from reproduction.report.variant_runs import VariantRun, by_variant, read_runs, sizes_of, ties_of, write_runs
from reproduction.report.variants import MetricsTable, VariantReport

# -- the files --------------------------------------------------------------------------------------


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
    knn = [run("a", seed, metrics={"tied_votes": 0.5 + 0.2 * seed, "lowest_accuracy": 0.25}) for seed in (0, 1)]
    assert "a 60%" in ties_of(knn) and "a 0.250" in ties_of(knn) and ties_of([*knn, run("classifier")]) == ""


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


# -- the table --------------------------------------------------------------------------------------

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
    assert of().grid(relative=True).rows == [["Logit-DP", "0.500", "1.000"], ["Non-private", "1.000", "1.000"]]
    assert of().grid(relative=False).rows[0] == ["Logit-DP", "0.200 / 0.141", "0.500 / 0.141"]
    assert of(runs()[:1], baseline=None).grid(relative=False).rows == [["Logit-DP", "0.100", "0.400"]]


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


# -- the curves -----------------------------------------------------------------------------------


def test_the_lowest_loss_of_all_variants_stands_at_one() -> None:
    curves = relative_curves([run("a", losses=[4.0, 3.0, 2.5]), run("b", losses=[4.0, 2.0, 3.0])])
    assert [curve.mean for curve in curves] == [(2.0, 1.5, 1.25), (2.0, 1.0, 1.5)]
    with pytest.raises(DataError, match="lowest loss is 0"):
        relative_curves([run(losses=[1.0, 0.0])])


def test_the_mean_over_seeds_comes_with_its_t_interval_or_with_its_range() -> None:
    some = [run("a", seed, losses=[value, 1.0]) for seed, value in enumerate([2.0, 3.0, 7.0])]
    (curve,), (wide,) = relative_curves(some), relative_curves(some, band="range")
    reference = stats.t.interval(0.95, 2, loc=4.0, scale=stats.sem([2.0, 3.0, 7.0]))
    assert (curve.low[0], curve.high[0]) == pytest.approx(reference)
    assert curve.mean == (4.0, 1.0) and curve.low[1] == curve.high[1] == 1.0 and curve.runs == 3
    assert (wide.low, wide.mean, wide.high) == ((2.0, 1.0), (4.0, 1.0), (7.0, 1.0))
    (single,) = relative_curves([run()])
    assert single.low == single.mean == single.high


def test_runs_that_were_observed_elsewhere_or_do_not_say_where_have_no_mean() -> None:
    for runs, axis in (
        ([run("a", 0), run("a", 1, steps=[1, 2, 4])], "steps"),
        ([run("a", 0), run("a", 1, losses=[1.0])], "seconds"),
        ([run("a", seconds=())], "seconds"),
    ):
        with pytest.raises(DataError, match="'a'"):
            relative_curves(runs, axis=axis)  # type: ignore[arg-type]


def test_speed_is_the_time_between_observations_over_the_examples_between_them() -> None:
    (curve,) = speed_curves([run("a", 0, seconds=[5.0, 6.0, 9.0]), run("a", 1, seconds=[1.0, 4.0, 5.0])])
    assert curve.x == (200.0, 300.0) and curve.mean == pytest.approx((0.02, 0.02))
    assert (curve.low, curve.high) == (pytest.approx((0.01, 0.01)), pytest.approx((0.03, 0.03)))
    with pytest.raises(DataError, match="its speed needs two"):
        speed_curves([run(losses=[1.0])])


def test_the_filter_leaves_a_cubic_as_it_is_and_calms_noise() -> None:
    for count, tolerance in ((300, 0.05), (99, 1e-9)):  # an even window lies half an observation to one side
        x = np.linspace(-1, 1, count)
        cubic = 2 + x - x**2 + 3 * x**3
        assert smooth(cubic)[0] == pytest.approx(cubic, abs=tolerance)
    noise = np.random.default_rng(0).standard_normal(300)
    assert np.std(smooth(noise)[0]) < 0.35 * np.std(noise)


# -- the pictures ---------------------------------------------------------------------------------


def is_picture(path: Path) -> bool:
    data = path.read_bytes()
    return data.startswith(b"\x89PNG") and len(data) > 5_000


def test_confusion_matrices_are_averaged_over_runs_and_rounded_down(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [run("a", 0, confusion=[[1, 2], [3, 4]]), run("a", 1, confusion=[[2, 2], [4, 4]]),
             run("b", confusion=None)]  # fmt: skip
    assert {v: mean.tolist() for v, mean in figures.mean_confusions(found).items()} == {"a": [[1, 2], [3, 4]]}
    words = figures.draw_confusions(found, tmp_path / "a.png", names=["cat", "dog"])
    assert "averaged over 2 of a runs and rounded down" in words and is_picture(tmp_path / "a.png")
    for runs in ([run("a"), run("b", confusion=np.eye(3).tolist())], [run("b", confusion=None)]):
        with pytest.raises(DataError, match="classes"):
            figures.mean_confusions(runs)


@pytest.mark.costly
def test_a_report_holds_every_picture_and_table_with_its_caption(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics = {"accuracy": 0.5, "best_recall": 0.4, "best_precision": 0.3, "best_f_beta": 0.2}
    some = [
        run(variant, seed, losses=[4.0 - i, 3.0 - 0.5 * seed, 2.0 + i], metrics=metrics)
        for i, variant in enumerate(("Logit-DP", "Naive-DP", "Non-private"))
        for seed in (0, 1)
    ]
    batches = [run("Naive-DP", 0, batch_size=size) for size in (10, 100)]
    page = VariantReport(runs=some, baseline="Non-private", batch_runs=batches, title="Ships & cats").write(tmp_path)
    text = page.read_text()
    assert text.startswith("# Ships &amp; cats")
    names = ["relative_loss", "smoothed_loss", "batch_sizes", "confusion", "runtime"]
    assert [text.index(f"({name}.png)") for name in names] == sorted(text.index(f"({name}.png)") for name in names)
    assert all(is_picture(tmp_path / f"{name}.png") for name in names)
    assert [r.variant for r in read_runs(tmp_path / "runs.jsonl")] == [r.variant for r in some]
    assert len(read_runs(tmp_path / "batch_runs.jsonl")) == 2
