"""A table of a paper as one picture: a panel for each measure, a line for each row, ours filled and theirs hollow.

Drawn with matplotlib, which is an extra (``pip install "lit-dpret[plot]"``).
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from lit_dpret.files import write_whole
from lit_dpret.retrieval.statistics import Interval
from reproduction.report.paper_table import PaperRow, PaperTable

_OURS, _PUBLIC, _PAPER = "#0072B2", "#009E73", "#777777"  # Okabe and Ito (2008)
_HOLLOW: dict[str, Any] = {
    "color": _PAPER, "marker": "o", "markersize": 10, "markerfacecolor": "none", "linestyle": ""
}  # fmt: skip
PUBLIC_ONLY = "public only"


def draw_paper_table(table: PaperTable, path: Path, *, owner_only: bool = False) -> Path:
    """Write the picture of a table as a PNG, for its owner alone if asked for.

    Raises:
        StorageError: The file cannot be written.
    """
    kept = io.BytesIO()
    figure_of(table).savefig(kept, dpi=110, format="png")
    return write_whole(path, kept.getvalue(), owner_only=owner_only)


def figure_of(table: PaperTable) -> Any:
    """The picture as a figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.4 + 0.3 * len(table.rows)
    width = 2.9 if len(table.columns) <= 2 else 2.2
    figure = Figure(figsize=(4.2 + width * len(table.columns), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(table.columns), sharey=True, squeeze=False)[0]
    for axis, (name, title) in zip(axes, table.columns.items(), strict=True):
        _panel(axis, table, name)
        axis.set_xlabel(title)
    axes[0].set_yticks(range(len(table.rows)), [_label(row) for row in table.rows])
    axes[0].set_ylim(len(table.rows) - 0.5, -0.5)
    figure.suptitle(table.title, x=0.01, ha="left", fontsize=11)
    figure.legend(handles=_legend(table), loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return figure


def _panel(axis: Any, table: PaperTable, name: str) -> None:
    for place, row in enumerate(table.rows):
        interval, theirs = row.ours.get(name), row.paper.get(name)
        if interval is not None and math.isfinite(interval.mean):
            colour, marker = _style(row)
            axis.errorbar(
                [interval.mean], [place], xerr=_reach(interval), color=colour, marker=marker, capsize=3, linestyle=""
            )
        if isinstance(theirs, float | int):
            axis.plot([theirs], [place], zorder=4, **_HOLLOW)  # a ring, so that ours is seen where the two are equal
    axis.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.08)


def _reach(interval: Interval) -> list[list[float]] | None:
    if math.isnan(interval.low):
        return None
    return [[max(0.0, interval.mean - interval.low)], [max(0.0, interval.high - interval.mean)]]


def _style(row: PaperRow) -> tuple[str, str]:
    return (_PUBLIC, "s") if row.epsilon == PUBLIC_ONLY else (_OURS, "o")


def _label(row: PaperRow) -> str:
    name = f"{row.group}: {row.source}" if row.group else row.source
    if row.epsilon in ("", PUBLIC_ONLY):
        return ", ".join(part for part in (name, row.epsilon) if part)
    return f"{name}, ε = {row.epsilon}"


def _legend(table: PaperTable) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_OURS, marker="o", linestyle="", label="ours, with its interval")]
    if any(row.epsilon == PUBLIC_ONLY for row in table.rows):
        handles.append(Line2D([], [], color=_PUBLIC, marker="s", linestyle="", label="ours, no private data"))
    if any(row.paper for row in table.rows):
        label = "paper, other data and models"
        handles.append(Line2D([], [], label=label, **_HOLLOW))
    return handles
