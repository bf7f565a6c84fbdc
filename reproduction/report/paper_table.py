"""A table of a paper with our numbers beside the paper's, as Markdown, page, data, spreadsheet and picture.

Every row names what it promises in the same line: an epsilon without its delta, unit and neighbours is not a claim.
A number of the paper stands beside ours where a row of ours is the paper's; both may be missing on their own.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.cards.page import Block, Bullets, Grid, Paragraph, Section
from lit_dpret.report.figures import new_figure, save_png, tidy
from lit_dpret.report.page import Picture
from lit_dpret.report.table import show
from lit_dpret.retrieval.statistics import Interval

Theirs = float | str
"""A number of the paper; in words where it prints no number."""


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One row.

    Args:
        source: What the numbers belong to, in our words.
        epsilon: As a table shows it: ``3``, ``∞`` or ``public only``.
        group: What it shares with other rows, such as a data set; empty where a table has no groups.
        ours: Ours by column, bounds NaN where there are none; empty where it was not run here.
        paper: The paper's by column.
        beside: Which row of the paper that is; empty for none.
        privacy: What ours promises, in a line with delta, unit and neighbours.
        note: What a reader must know of this row.
    """

    source: str
    epsilon: str
    group: str = ""
    ours: Mapping[str, Interval] = field(default_factory=dict)
    paper: Mapping[str, Theirs] = field(default_factory=dict)
    beside: str = ""
    privacy: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One table.

    Args:
        name: Of its files.
        title: With the number of the paper's table.
        columns: Titles of the measures, by their names in the rows.
        rows: In the order of the table.
        caption: On what, and by how many runs, ours were measured; what the intervals cover.
        notes: Remarks below it.
        group: What `PaperRow.group` is; empty where there are no groups.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[PaperRow]
    caption: str
    notes: Sequence[str] = ()
    group: str = ""

    def grid(self) -> Grid:
        """The table; each measure in two columns, ours and the paper's."""
        theirs = [name for name in self.columns if any(name in row.paper for row in self.rows)]
        header = [*([self.group] if self.group else []), "source", "ε"]
        numeric: set[int] = set()
        for name, title in self.columns.items():
            for shown in [f"{title}, ours", *([f"{title}, paper"] if name in theirs else [])]:
                numeric.add(len(header))
                header.append(shown)
        with_beside = any(row.beside for row in self.rows)
        header += [*(["paper's row"] if with_beside else []), "what ours promises"]
        lines, before = [], None
        for row in self.rows:
            cells: list[object] = ["" if row.group == before else row.group] if self.group else []
            cells += [row.source, row.epsilon]
            for name in self.columns:
                cells.append(show(row.ours.get(name)))
                if name in theirs:
                    cells.append(_their(row.paper.get(name)))
            cells += [*([row.beside] if with_beside else []), "; ".join(x for x in (row.privacy, row.note) if x)]
            lines.append(cells)
            before = row.group
        return Grid(header, lines, frozenset(numeric))

    def section(self, picture: Path | None = None) -> Section:
        """The table as a part of a page."""
        blocks: list[Block] = [Paragraph(self.caption), self.grid()]
        if picture is not None:
            blocks.append(Picture(picture, self.title))
        if self.notes:
            blocks.append(Bullets(list(self.notes)))
        return Section(self.title, blocks)

    def facts(self) -> dict[str, Any]:
        """The table as JSON values; NaN becomes null."""
        return {
            "name": self.name,
            "title": self.title,
            "caption": self.caption,
            "columns": dict(self.columns),
            "notes": list(self.notes),
            "rows": [
                {
                    "group": row.group,
                    "source": row.source,
                    "epsilon": row.epsilon,
                    "ours": {
                        name: {"mean": _number(i.mean), "low": _number(i.low), "high": _number(i.high)}
                        for name, i in row.ours.items()
                    },
                    "paper": dict(row.paper),
                    "papers_row": row.beside,
                    "privacy": row.privacy,
                    "note": row.note,
                }
                for row in self.rows
            ],
        }

    def csv(self) -> str:
        """One line per row; each measure in four columns: ours, low, high, the paper's."""
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator="\n")
        columns = [f"{title}{end}" for title in self.columns.values() for end in ("", " low", " high", " paper")]
        writer.writerow(["group", "source", "epsilon", *columns, "paper's row", "privacy", "note"])
        for row in self.rows:
            numbers: list[object] = []
            for name in self.columns:
                i = row.ours.get(name)
                ours = [None] * 3 if i is None else [_number(i.mean), _number(i.low), _number(i.high)]
                numbers += ["" if value is None else value for value in [*ours, row.paper.get(name)]]
            writer.writerow([row.group, row.source, row.epsilon, *numbers, row.beside, row.privacy, row.note])
        return file.getvalue()


def _their(value: Theirs | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
    return save_png(figure_of(table), path, owner_only=owner_only)


def figure_of(table: PaperTable) -> Any:
    """The picture as a figure of matplotlib."""
    height = 1.4 + 0.3 * len(table.rows)
    width = 2.9 if len(table.columns) <= 2 else 2.2
    figure = new_figure(4.2 + width * len(table.columns), height)
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
    tidy(axis, grid="x")
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
