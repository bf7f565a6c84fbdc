"""A table of our numbers and the paper's, as Markdown, page, data, spreadsheet and picture.

Every row states what it promises in the same line: an epsilon without its delta, unit and neighbours is not a claim. A
number of the paper is shown in our row that corresponds to the paper's. Either number may be missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from lit_dpret.cards.blocks import Banner, Block, Bullets, Code, Grid, Paragraph, Section, to_markdown
from lit_dpret.files import write_whole
from lit_dpret.report.figures import can_draw, new_figure, save_png, tidy
from lit_dpret.report.page import Page, Picture, Sheet
from lit_dpret.report.table import RowResult, Table, ends
from reproduction.published import Point, by_point

PUBLIC_ONLY = "public only"
_TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))


def columns_of(table: str) -> dict[str, str]:
    """Return the measures of a table of ``tables.yaml``, each with its title."""
    return dict(_TABLES[table]["columns"])


def shown(eps: float | None) -> str:
    """Return an epsilon as tables show it."""
    return "∞" if eps is None else f"{eps:g}"


def named(point: Point) -> str:
    """Return the name of a row of the paper, as in its tables."""
    return f"{point[0]}, ε = {shown(point[1])}"


@dataclass(frozen=True, kw_only=True)
class PaperRow(RowResult):
    """One row: our intervals by column, with NaN for missing bounds, and the paper's numbers."""

    epsilon: str  # as a table shows it: ``3``, ``∞`` or ``public only``
    group: str = ""  # shared with other rows, such as a data set; empty if a table has no groups
    paper: Mapping[str, float] = field(default_factory=dict)  # the paper's numbers by column
    beside: str = ""  # the row of the paper that they come from; empty for none


def row_beside(table: str, point: Point, columns: Mapping[str, str], ours: RowResult) -> PaperRow:
    """Return our row, with the numbers of the paper's ``point`` in ``table`` if there are any."""
    theirs = by_point(table).get(point)
    return PaperRow(
        **vars(ours), epsilon=shown(point[1]), beside="" if theirs is None else named(point),
        paper={} if theirs is None else dict(zip(columns, theirs, strict=True)),
    )  # fmt: skip


def rows_of_the_paper_alone(table: str, columns: Mapping[str, str], ours: Sequence[PaperRow]) -> list[PaperRow]:
    """Return the paper's rows to which none of ours corresponds."""
    known = {row.beside for row in ours}
    return [
        row_beside(table, point, columns, RowResult(point[0], note="not run here"))
        for point in by_point(table)
        if named(point) not in known
    ]


@dataclass(frozen=True)
class PaperTable:
    """One table."""

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[PaperRow]
    caption: str
    notes: Sequence[str] = ()
    group: str = ""

    @classmethod
    def of(
        cls, of: str, rows: Sequence[PaperRow], notes: Sequence[str] = (), *, name: str | None = None,
        columns: Mapping[str, str] | None = None, **facts: object,
    ) -> PaperTable:  # fmt: skip
        """Return a table of ``tables.yaml``; ``facts`` fill its title and caption."""
        told = _TABLES[of]
        title, caption = (told[words].format(**facts) for words in ("title", "caption"))
        below = [*notes, *told.get("notes", ())]
        return cls(name or of, title, columns or columns_of(of), rows, caption, below, told.get("group", ""))

    def grid(self) -> Grid:
        """Return the table, with each measure in two columns: ours and the paper's."""
        theirs = [name for name in self.columns if any(name in row.paper for row in self.rows)]
        with_beside = any(row.beside for row in self.rows)
        header = [*([self.group] if self.group else []), "source", "ε"]
        measured, numeric = set(), set()
        for name, title in self.columns.items():
            measured.add(len(header))
            header.append(f"{title}, ours")
            if name in theirs:
                numeric.add(len(header))
                header.append(f"{title}, paper")
        header += [*(["paper's row"] if with_beside else []), "our guarantee"]
        lines, before = [], None
        for row in self.rows:
            cells: list[object] = ["" if row.group == before else row.group] if self.group else []
            cells += [row.system, row.epsilon]
            for name in self.columns:
                cells.append(row.metrics.get(name))
                if name in theirs:  # a rank is a whole number
                    value = row.paper.get(name, "–")
                    cells.append(f"{value:.4f}" if isinstance(value, float) else value)
            cells += [*([row.beside] if with_beside else []), "; ".join(x for x in (row.privacy, row.note) if x)]
            lines.append(cells)
            before = row.group
        return Table(header, lines, measured=frozenset(measured), numeric=frozenset(numeric)).grid()

    def sheet(self) -> Table:
        """Return every number, one line per row, each measure in four columns: ours, low, high and the paper's."""
        header = ["group", "source", "epsilon"]
        measured = frozenset(range(3, 3 + 2 * len(self.columns), 2))
        header += [f"{title}{end}" for title in self.columns.values() for end in ("", " paper")]
        lines = [
            [row.group, row.system, row.epsilon,
             *(cell for name in self.columns for cell in (row.metrics.get(name), row.paper.get(name))),
             row.beside, row.privacy, row.note]
            for row in self.rows
        ]  # fmt: skip
        return Table([*header, "paper's row", "privacy", "note"], lines, measured=measured)

    def blocks(self, picture: Path | None = None) -> list[Block]:
        """Return the parts of the table that a page shows."""
        drawn = [] if picture is None else [Picture(picture, self.title)]
        notes = [Bullets(list(self.notes))] if self.notes else []
        return [Paragraph(self.caption), self.grid(), *drawn, *notes]

    def facts(self) -> dict[str, Any]:
        """Return the table as JSON values; NaN becomes null."""
        rows = [
            {
                "group": row.group, "source": row.system, "epsilon": row.epsilon,
                "ours": {name: ends(interval) for name, interval in row.metrics.items()}, "paper": dict(row.paper),
                "papers_row": row.beside, "privacy": row.privacy, "note": row.note,
            }
            for row in self.rows
        ]  # fmt: skip
        return {
            "name": self.name, "title": self.title, "caption": self.caption, "columns": dict(self.columns),
            "notes": list(self.notes), "rows": rows,
        }  # fmt: skip


class Shown(Protocol):
    """The part of a page that shows one table, of numbers or of examples."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    def blocks(self, picture: Path | None = None) -> list[Block]: ...
    def facts(self) -> dict[str, Any]: ...
    def sheet(self) -> Sheet: ...


def write_tables(tables: Sequence[Shown], folder: Path, *, owner_only: bool) -> list[Section]:
    """Write each table's ``NAME.md``, ``.csv``, ``.json`` and, if it can be drawn, ``.png``; return the sections."""
    sections = []
    for table in tables:
        picture = None
        if isinstance(table, PaperTable) and can_draw():
            picture = save_png(figure_of(table), folder / f"{table.name}.png", owner_only=owner_only)
        section = Section(table.title, table.blocks(picture))
        sections.append(section)
        texts = {
            "md": to_markdown(table.title, "", [], [Section("Result", section.blocks)]),
            "csv": table.sheet().csv(),
            "json": json.dumps(table.facts(), indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        }
        for ending, text in texts.items():
            write_whole(folder / f"{table.name}.{ending}", text, owner_only=owner_only)
    return sections


_INTERNAL = (
    "Internal: these numbers were computed on queries not declared public. No guarantee covers them; keep the "
    "page where the queries are kept."
)


def write_page(
    name: str, title: str, tables: Sequence[Shown], run_dir: Path, *, about: str, public: bool, spent: str,
    lead: Sequence[str] = (), more: Sequence[Section] = (), command: str, seconds: Mapping[str, float],
    facts: Mapping[str, Any],
) -> dict[str, Path]:  # fmt: skip
    """Write a page of tables and the files of each into ``report``, readable only by the owner unless ``public``."""
    folder, hours = run_dir / "report", sum(seconds.values()) / 3600
    first: list[Block] = [*([] if public else [Banner(_INTERNAL)]), *([Banner(spent, "caution")] if spent else [])]
    first += [Paragraph(text) for text in (about, *lead) if text]
    took = Paragraph(f"{hours:.1f} hours of work in {len(seconds)} stages.")
    sections = [
        *write_tables(tables, folder, owner_only=not public), *more,
        Section("How to get this again", [Code(command), took]),
    ]  # fmt: skip
    whole = {
        "title": title, "public": public, "about": about, "spent": spent, **facts, "command": command,
        "seconds": {stage: round(value, 1) for stage, value in seconds.items()},
        "tables": [table.facts() for table in tables],
    }  # fmt: skip
    page = Page(name=name, title=title, lead=first, sections=sections, facts=whole, owner_only=not public)
    return page.write(folder)


# -- the picture -----------------------------------------------------------------------------------

_OURS, _PUBLIC, _PAPER = "#0072B2", "#009E73", "#777777"  # Okabe and Ito (2008)
_HOLLOW: dict[str, Any] = {
    "color": _PAPER, "marker": "o", "markersize": 10, "markerfacecolor": "none", "linestyle": ""
}  # fmt: skip


def figure_of(table: PaperTable) -> Any:
    """Draw a panel for each measure, ours with its interval and the paper's as a ring; return a matplotlib figure."""
    width = 2.9 if len(table.columns) <= 2 else 2.2
    figure = new_figure(4.2 + width * len(table.columns), 1.4 + 0.3 * len(table.rows))
    axes = figure.subplots(1, len(table.columns), sharey=True, squeeze=False)[0]
    for axis, (name, title) in zip(axes, table.columns.items(), strict=True):
        _panel(axis, table, name)
        axis.set_xlabel(title)
    axes[0].set_yticks(
        range(len(table.rows)),
        [_label(row) + ("" if row.paper or _measured(row) else " (not run)") for row in table.rows],
    )
    axes[0].set_ylim(len(table.rows) - 0.5, -0.5)
    figure.suptitle(table.title, x=0.01, ha="left", fontsize=11)
    figure.legend(handles=_legend(table), loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return figure


def _panel(axis: Any, table: PaperTable, name: str) -> None:
    for place, row in enumerate(table.rows):
        interval = row.metrics.get(name)
        if interval is not None and math.isfinite(interval.mean):
            colour, marker = (_PUBLIC, "s") if row.epsilon == PUBLIC_ONLY else (_OURS, "o")
            reach = None
            if not math.isnan(interval.low):
                reach = [[max(0.0, interval.mean - interval.low)], [max(0.0, interval.high - interval.mean)]]
            axis.errorbar([interval.mean], [place], xerr=reach, color=colour, marker=marker, capsize=3, linestyle="")
        if name in row.paper:
            # a ring, so that ours stays visible if the two are equal
            axis.plot([row.paper[name]], [place], zorder=4, **_HOLLOW)
    tidy(axis, grid="x")
    axis.margins(x=0.08)


def _measured(row: PaperRow) -> bool:
    return any(math.isfinite(interval.mean) for interval in row.metrics.values())


def _label(row: PaperRow) -> str:
    name = f"{row.group}: {row.system}" if row.group else row.system
    if row.epsilon in ("", PUBLIC_ONLY):
        return ", ".join(part for part in (name, row.epsilon) if part)
    return f"{name}, ε = {row.epsilon}"


def _legend(table: PaperTable) -> list[Any]:
    from matplotlib.lines import Line2D

    intervals = any(not math.isnan(interval.low) for row in table.rows for interval in row.metrics.values())
    label = "ours, with its interval" if intervals else "ours"
    handles = [Line2D([], [], color=_OURS, marker="o", linestyle="", label=label)]
    if any(row.epsilon == PUBLIC_ONLY for row in table.rows):
        handles.append(Line2D([], [], color=_PUBLIC, marker="s", linestyle="", label="ours, no private data"))
    if any(row.paper for row in table.rows):
        handles.append(Line2D([], [], label="paper, other data and models", **_HOLLOW))
    return handles
