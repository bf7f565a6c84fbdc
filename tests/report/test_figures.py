"""Drawings: bars as long as their numbers, within their frame; and the picture of every kind of plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lit_dpret.cards.forecast import describe_plan
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan
from lit_dpret.report.chart import bar_chart
from lit_dpret.report.figures import draw_plan
from lit_dpret.report.table import RowResult
from lit_dpret.retrieval.statistics import Interval

SVG = "{http://www.w3.org/2000/svg}"


def parse(rows: list[RowResult]) -> ElementTree.Element:
    return ElementTree.fromstring(bar_chart(rows))


def row(name: str, mean: float, low: float, high: float) -> RowResult:
    return RowResult(name, {"nDCG@10": Interval(mean, low, high)})


def test_bars_are_as_long_as_their_means_and_whiskers_reach_their_bounds() -> None:
    drawing = parse([row("a", 0.2, 0.1, 0.3), row("b", 0.4, 0.35, 0.4)])
    short, long = (float(bar.get("width", "")) for bar in drawing.iter(f"{SVG}rect"))
    assert long == pytest.approx(2 * short, rel=1e-3)
    left = float(next(drawing.iter(f"{SVG}rect")).get("x", ""))
    path = next(drawing.iter(f"{SVG}path")).get("d", "")
    low, high = (float(x) for x in re.match(r"M([\d.]+) [\d.]+H([\d.]+)M", path).groups())  # type: ignore[union-attr]
    assert (low - left) == pytest.approx(short / 2, abs=0.2)
    assert (high - left) == pytest.approx(short * 1.5, abs=0.2)


@pytest.mark.parametrize("top", [0.001, 0.99, 55.0])
def test_nothing_leaves_the_drawing(top: float) -> None:
    drawing = parse([row("a" * 80, top / 2, 0.0, top)])
    width = float(drawing.get("width", ""))
    for bar in drawing.iter(f"{SVG}rect"):
        assert float(bar.get("x", "")) + float(bar.get("width", "")) <= width
    for text in drawing.iter(f"{SVG}text"):
        shown = text.text or ""
        x, room = float(text.get("x", "")), 7.5 * len(shown)  # wider than 13 px digits are
        anchor = text.get("text-anchor", "start")
        start = x - {"start": 0.0, "middle": room / 2, "end": room}[anchor]
        assert start >= -45 and start + room <= width + 45, shown


def test_a_long_name_is_shortened_in_the_drawing_and_whole_in_its_title_and_none_becomes_markup() -> None:
    name = "dual encoder on synthetic queries, t5-small, round-trip filtered"
    drawing = parse([row(name, 0.1, 0.1, 0.1)])
    assert name in (next(drawing.iter(f"{SVG}title")).text or "")
    assert any((text.text or "").endswith("…") for text in drawing.iter(f"{SVG}text"))
    assert not list(parse([row("<script>x</script>", 0.1, 0.1, 0.1)]).iter(f"{SVG}script"))


def facts(neighbours: Any = "zero_out", **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"steps": 20, "max_grad_norm": 0.5, "n_public": 2000, "noise_multiplier": 8.0}
    request = PlainSamplingRequest(sampling="poisson", expected_batch_size=40)
    budget = PrivacyBudget(eps=3.0, delta=1e-5, neighbours=neighbours)
    for name in set(changes) & set(vars(request)):
        setattr(request, name, changes.pop(name))
    return describe_plan(PrivacyPlan.build(budget, request, **settings | changes))


@pytest.mark.costly
@pytest.mark.parametrize(
    "made",
    [
        {"sampling": "shuffle"},
        {"sampling": "full_batch"},
        pytest.param(
            {"neighbours": "replace_one", "sampling": "fixed_size", "accountant": "rdp", "noise_multiplier": 30.0},
            marks=pytest.mark.slow,
        ),
        {"neighbours": "add_or_remove", "n_public": None, "sample_rate": 0.02},
    ],
    ids=lambda made: "-".join(map(str, made.values())),
)
def test_every_kind_of_plan_can_be_drawn(made: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = draw_plan(facts(**made), tmp_path / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
