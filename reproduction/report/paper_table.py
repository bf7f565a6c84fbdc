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
from lit_dpret.report.picture import Picture
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
