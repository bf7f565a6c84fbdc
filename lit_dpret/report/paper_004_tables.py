"""Table 1 of paper 004 from the stored results of `task=federated`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lit_dpret.cards.page import Grid
from lit_dpret.report.federated_words import show
from lit_dpret.report.paper_004 import COLUMNS, TABLE_1
from lit_dpret.retrieval.statistics import Interval


def table_1(systems: Mapping[str, Any]) -> Grid:
    """Each cell ours / the paper's, in the paper's order and under its headings.

    Args:
        systems: By name, as ``systems`` of ``pdd_as2.json``.
    """
    body: list[list[object]] = []
    heading = ""
    for system, (group, label, theirs) in TABLE_1.items():
        if system not in systems:
            continue
        if group != heading:
            heading = group
            body.append([group, *([""] * len(COLUMNS))])
        measures = systems[system]["measures"]
        papers = ["–"] * len(COLUMNS) if theirs is None else [f"{paper:.3f}" for paper in theirs]
        cells = [
            f"{_cell(measures[name]['over_silos'])} / {paper}" for name, paper in zip(COLUMNS, papers, strict=True)
        ]
        body.append([label, *cells])
    return Grid(("ours / paper", *COLUMNS.values()), body, frozenset(range(1, 1 + len(COLUMNS))))


def _cell(found: Mapping[str, float | None]) -> str:
    """The mean with its interval over seeds; nothing where silos elsewhere keep their measures."""
    if found.get("mean") is None:
        return "withheld"
    mean, low, high = (math.nan if (end := found.get(name)) is None else end for name in ("mean", "low", "high"))
    return show(Interval(mean, low, high))
