"""Our metrics and the paper's in one table."""

from __future__ import annotations

from collections.abc import Mapping

from lit_dpret.report.paper_002 import METRICS
from lit_dpret.report.relative_table import RelativeTable


def beside_the_paper(table: RelativeTable, paper: Mapping[str, tuple[float, ...]], *, relative: bool) -> str:
    """A markdown table: each cell ours / the paper's; a dash where one of them has no such variant.

    Args:
        table: Ours.
        paper: The paper's rows by variant, in the order of `lit_dpret.report.paper_002.METRICS`.
        relative: Compare means divided by the baseline's, not the means.
    """
    shown = [name for name in METRICS if name in table.metrics]
    lines = [
        "| ours / paper | " + " | ".join(table.metrics[name] for name in shown) + " |",
        "| --- |" + " ---: |" * len(shown),
    ]
    for variant in dict.fromkeys([*table.rows, *paper]):
        cells = []
        for name in shown:
            cell = table.rows.get(variant, {}).get(name)
            ours = None if cell is None else cell.relative if relative else cell.mean
            theirs = paper[variant][METRICS.index(name)] if variant in paper else None
            cells.append(f"{_show(ours)} / {_show(theirs)}")
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _show(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
