"""Our metrics and the paper's in one table."""

from __future__ import annotations

from collections.abc import Mapping

from lit_dpret.cards.page import Grid
from reproduction.report.paper_002 import METRICS
from reproduction.report.relative_table import RelativeTable


def beside_the_paper(table: RelativeTable, paper: Mapping[str, tuple[float, ...]], *, relative: bool) -> Grid:
    """Each cell ours / the paper's; a dash where one of them has no such variant.

    Args:
        table: Ours.
        paper: The paper's rows by variant, in the order of `reproduction.report.paper_002.METRICS`.
        relative: Compare means divided by the baseline's, not the means.
    """
    shown = [name for name in METRICS if name in table.metrics]
    rows: list[list[str]] = []
    for variant in dict.fromkeys([*table.rows, *paper]):
        cells = []
        for name in shown:
            cell = table.rows.get(variant, {}).get(name)
            ours = None if cell is None else cell.relative if relative else cell.mean
            theirs = paper[variant][METRICS.index(name)] if variant in paper else None
            cells.append(f"{_show(ours)} / {_show(theirs)}")
        rows.append([variant, *cells])
    header = ("ours / paper", *(table.metrics[name] for name in shown))
    return Grid(header, rows, frozenset(range(1, len(header))))


def _show(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
