from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from lit_dpret.report.chart import bar_chart
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
