"""Curves of a comparison on numbers small enough to check by hand, and pictures whose captions say what was drawn."""

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
from reproduction.report.variant_runs import VariantRun, read_runs
from reproduction.report.variants import VariantReport

pytest.importorskip("matplotlib")

VARIANTS = ("Logit-DP", "Naive-DP", "Non-private")


def runs(**fields: Any) -> list[VariantRun]:
    """Two runs of each of three variants."""
    return [
        run(v, seed, losses=[4.0 - i, 3.0 - 0.5 * seed, 2.0 + i], **fields)
        for i, v in enumerate(VARIANTS)
        for seed in (0, 1)
    ]


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
    with pytest.raises(DataError, match="'a' were not observed at the same places"):
        relative_curves([run("a", 0), run("a", 1, steps=[1, 2, 4])], axis="steps")
    with pytest.raises(DataError, match="'a' were not observed at the same places"):
        relative_curves([run("a", 0), run("a", 1, losses=[1.0])], axis="seconds")
    with pytest.raises(DataError, match="its seconds"):
        relative_curves([run(seconds=())], axis="seconds")


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


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The panels of every figure that is saved."""
    panels: list[Any] = []
    save = figures._save

    def keep(figure: Any, path: Path) -> None:
        panels.extend(figure.axes)
        save(figure, path)

    monkeypatch.setattr(figures, "_save", keep)
    return panels


def test_confusion_matrices_are_averaged_over_runs_rounded_down_and_numbered_where_they_are_small(
    drawn: list[Any], tmp_path: Path
) -> None:
    found = [run("a", 0, confusion=[[1, 2], [3, 4]]), run("a", 1, confusion=[[2, 2], [4, 4]]),
             run("b", confusion=None)]  # fmt: skip
    assert {v: mean.tolist() for v, mean in figures.mean_confusions(found).items()} == {"a": [[1, 2], [3, 4]]}
    words = figures.draw_confusions(found, tmp_path / "a.png", names=["cat", "dog"])
    assert "averaged over 2 of a runs and rounded down" in words and is_picture(tmp_path / "a.png")
    assert "tied" not in words
    voted = [run("a", metrics={"accuracy": 0.5, "tied_votes": 0.66, "lowest_accuracy": 0.4})]
    assert "nearest of the tied neighbours" in figures.draw_confusions(voted, tmp_path / "a.png")
    del drawn[2:]
    figures.draw_confusions([run(confusion=np.eye(20).tolist())], tmp_path / "b.png")
    assert len(drawn[0].texts) == 4 and not drawn[2].texts
    with pytest.raises(DataError, match=r"of \[2, 3\] classes"):
        figures.mean_confusions([run("a"), run("b", confusion=np.eye(3).tolist())])
    with pytest.raises(DataError, match="of no classes"):
        figures.mean_confusions([run("b", confusion=None)])


def test_a_report_holds_every_picture_and_table_with_its_caption(tmp_path: Path) -> None:
    metrics = {"accuracy": 0.5, "best_recall": 0.4, "best_precision": 0.3, "best_f_beta": 0.2}
    batches = [run("Naive-DP", 0, batch_size=size) for size in (10, 100)]
    page = VariantReport(
        runs=runs(metrics=metrics), baseline="Non-private", batch_runs=batches, title="Ships & cats"
    ).write(tmp_path / "report")
    text = page.read_text()
    assert text.startswith("# Ships &amp; cats")
    names = ["relative_loss", "smoothed_loss", "batch_sizes", "confusion", "runtime"]
    assert [text.index(f"({name}.png)") for name in names] == sorted(text.index(f"({name}.png)") for name in names)
    assert all(is_picture(page.parent / f"{name}.png") for name in names)
    assert text.count("| Logit-DP |") == 2 and "best class" in text
    assert [r.variant for r in read_runs(page.parent / "runs.jsonl")] == [r.variant for r in runs()]
    assert len(read_runs(page.parent / "batch_runs.jsonl")) == 2
