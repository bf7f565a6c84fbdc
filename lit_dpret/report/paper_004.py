"""Table 1 of paper 004 (PDD-AS2): the paper's numbers, ours beside them, and what cannot be among them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lit_dpret.cards.page import Grid
from lit_dpret.report.table import show
from lit_dpret.retrieval.statistics import Interval

_PAPER: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# Columns of Table 1 by our names, with their titles.
COLUMNS: Mapping[str, str] = _PAPER["columns"]
# Rows in the paper's order: by our name the group's heading, the paper's name and its numbers; none for a row of ours.
TABLE_1: Mapping[str, tuple[str, str, list[float] | None]] = {
    row["system"]: (row["group"], row["label"], row["values"]) for row in _PAPER["rows"]
}
# Rows that no train query has a say in, given the collections; the second learns from a silo's sentences.
WITHOUT_QUERIES: tuple[Literal["zero_shot", "pseudo_queries"], ...] = ("zero_shot", "pseudo_queries")
# What the paper says is better than what, in its text or by its table.
ORDERS: list[tuple[str, str]] = [(better, worse) for better, worse in _PAPER["orders"]]


def impossible_cells() -> list[tuple[str, str, float, float]]:
    """Return rows whose passage R@k is below their sentence R@k, which equation 9 excludes.

    A passage scores as its best sentence, so the passage of a sentence among the first k is among the first k.

    Example:
        >>> impossible_cells()[0]
        ('Central-training', 'R@20', 0.629, 0.553)
    """
    names = list(COLUMNS)
    found = []
    for _, name, values in TABLE_1.values():
        if values is None:
            continue
        for level in ("success@1", "success@20", "success@100", "mrr@10"):
            sentence, passage = (values[names.index(f"{side}/{level}")] for side in ("sentence", "passage"))
            if passage < sentence:
                found.append((name, level.replace("success", "R"), sentence, passage))
    return found


def table_1(systems: Mapping[str, Any]) -> Grid:
    """Return each cell ours / the paper's, in the paper's order and under its headings."""
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
        ours = [_cell(measures[name]["over_silos"]) for name in COLUMNS]
        body.append([label, *(f"{mine} / {paper}" for mine, paper in zip(ours, papers, strict=True))])
    return Grid(("ours / paper", *COLUMNS.values()), body, frozenset(range(1, 1 + len(COLUMNS))))


def _cell(found: Mapping[str, float | None]) -> str:
    """Return the mean with its interval over seeds; nothing where silos elsewhere keep their measures."""
    if found.get("mean") is None:
        return "withheld"
    mean, low, high = (math.nan if (end := found.get(name)) is None else end for name in ("mean", "low", "high"))
    return show(Interval(mean, low, high))
