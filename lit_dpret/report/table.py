"""A table of results, for a page, a console, a spreadsheet and a program.

A system's privacy is in the same row as its metrics: a quality number without its price is not a result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.table import Table as ConsoleTable
from rich.text import Text

from lit_dpret.cards.blocks import Grid
from lit_dpret.errors import DataError
from lit_dpret.files import write_whole
from lit_dpret.retrieval.statistics import Interval


@runtime_checkable
class Measured(Protocol):
    """A mean and its bounds, NaN if unknown: an interval of metrics, or of an audit."""

    @property
    def mean(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


METRICS = ("nDCG@10", "Recall@10", "MRR@10")


@dataclass(frozen=True)
class RowResult:
    """The results of one system, and their privacy cost."""

    system: str  # name of the system
    # Mean and 95 % confidence interval per metric, e.g. ``{"nDCG@10": Interval(...)}``.
    metrics: Mapping[str, Interval] = field(default_factory=dict)
    # Epsilon with unit, neighbours and delta in one line (``privacy_line`` of a card), or that it has none.
    privacy: str = ""
    note: str = ""  # anything else that a reader must know about the numbers


def metric_names(rows: Sequence[RowResult]) -> list[str]:
    """Return the metrics of all rows: the usual three first, the rest in order of appearance."""
    present = dict.fromkeys(name for row in rows for name in row.metrics)
    return [name for name in METRICS if name in present] + [name for name in present if name not in METRICS]


def show(interval: Measured | None, *, sign: str = "") -> str:
    """Format ``0.412 [0.398, 0.425]``, or a dash without a measurement; ``sign="+"`` shows the sign of a gain.

    If all samples or seeds gave one value, there is no interval: one without width would look like certainty.
    """
    if interval is None or math.isnan(interval.mean):
        return "–"
    if math.isnan(interval.low) or math.isnan(interval.high) or abs(interval.high - interval.low) < 1e-9:
        return f"{interval.mean:{sign}.3f}"
    return f"{interval.mean:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def plain(value: object) -> str:
    """Return a value for a table: a dash for None, four significant digits for a float."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def verdict(gain: Interval) -> str:
    """State whether a difference over seeds confirms the claimed order."""
    if not math.isfinite(gain.low):
        return "one seed decides nothing"
    if gain.high - gain.low < 1e-9:
        return "all seeds agree, which decides nothing"
    if gain.low > 0:
        return "holds"
    return "the other way round" if gain.high < 0 else "not decided"


def interval_of(found: Mapping[str, Any]) -> Interval:
    """Return the interval from the output of `ends`."""
    return Interval(*(math.nan if found[end] is None else float(found[end]) for end in ("mean", "low", "high")))


def ends(interval: Measured) -> dict[str, float | None]:
    """Return mean, low and high for JSON, with null for NaN."""
    found = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


@dataclass(frozen=True)
class Table:
    """Rows whose cells are text, numbers or intervals."""

    header: Sequence[str]  # titles of the columns
    rows: Sequence[Sequence[object]]  # their cells; None for a missing measurement
    # The columns whose cells are intervals; a spreadsheet has three columns for each of them.
    measured: frozenset[int] = frozenset()
    numeric: frozenset[int] = frozenset()  # further columns that are right-aligned

    def grid(self) -> Grid:
        """Return the table for a page, with each interval after its mean."""
        rows = [[self._shown(column, cell) for column, cell in enumerate(row)] for row in self.rows]
        return Grid(self.header, rows, self.numeric | self.measured)

    def html(self) -> str:
        return self.grid().html()

    def markdown(self) -> str:
        return self.grid().markdown()

    def console(self, *, title: str, caption: str) -> ConsoleTable:
        """Return the table for ``rich.print``: intervals below their numbers."""
        left: Any = "left"
        table = ConsoleTable(title=title, title_justify=left, caption=caption, caption_justify=left, show_lines=True)
        for column, name in enumerate(self.header):
            flush = column in self.numeric | self.measured
            table.add_column(name, justify="right" if flush else "left", no_wrap=column in self.measured)
        for row in self.rows:
            cells = [str(self._shown(column, cell)) for column, cell in enumerate(row)]
            table.add_row(
                *(Text(cell.replace(" ", "\n", 1) if i in self.measured else cell) for i, cell in enumerate(cells))
            )
        return table

    def csv(self) -> str:
        """Return all numbers at full precision; an interval takes three columns: name, name low, name high."""

        def ends(cell: object) -> list[object]:
            found = [cell.mean, cell.low, cell.high] if isinstance(cell, Measured) else [math.nan] * 3
            return [None if math.isnan(end) else end for end in found]

        header: list[str] = []
        for column, name in enumerate(self.header):
            header += [f"{name}{end}" for end in (("", " low", " high") if column in self.measured else ("",))]
        lines = [
            [one for column, cell in enumerate(row) for one in (ends(cell) if column in self.measured else [cell])]
            for row in self.rows
        ]
        return Grid(header, lines).csv()

    def _shown(self, column: int, cell: object) -> object:
        if column in self.measured:
            return show(cell if isinstance(cell, Measured) else None)
        return "" if cell is None else cell


def grid_of(lines: Sequence[Mapping[str, object]]) -> Grid:
    """Return mappings with the same keys as a table; empty without lines."""
    return Grid(list(lines[0]) if lines else [], [list(line.values()) for line in lines])


def settings_grid(head: Sequence[str], lines: Sequence[tuple[Sequence[object], Mapping[str, object]]]) -> Grid:
    """Return a table of settings: the first cells of each line, then a column for each setting of any line."""
    names = list(dict.fromkeys(name for _, settings in lines for name in settings))
    body = [[*first, *(plain(settings.get(name)) for name in names)] for first, settings in lines]
    header = [*head, *(name.replace("_", " ") for name in names)]
    return Grid(header, body, frozenset(range(len(head), len(header))))


def console_table(rows: Sequence[RowResult], *, title: str = "") -> ConsoleTable:
    """Return the table for ``rich.print``, in 80 columns: intervals below numbers, privacy below names."""
    names = metric_names(rows)
    table = ConsoleTable(
        title=title or None, title_justify="left", caption="mean, and below it the 95 % confidence interval",
        caption_justify="left", show_lines=True,
    )  # fmt: skip
    table.add_column("System, and what it promises", min_width=20)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [Text("\n".join(show(row.metrics.get(name)).split(" ", 1))) for name in names]
        words = Text(row.system, style="bold")
        for line in (row.privacy or "privacy not stated", row.note):
            words.append(f"\n{line}" if line else "", style="not bold")
        table.add_row(words, *cells)
    return table


def result_table(rows: Sequence[RowResult]) -> Table:
    """Return systems with their metrics and, in the same row, the privacy cost of each."""
    names = metric_names(rows)
    noted = any(row.note for row in rows)
    lines = [
        [row.system, *(row.metrics.get(name) for name in names), row.privacy or "not stated",
         *([row.note] if noted else [])]
        for row in rows
    ]  # fmt: skip
    header = ["System", *names, "Privacy", *(["Note"] if noted else [])]
    return Table(header, lines, measured=frozenset(range(1, 1 + len(names))))


def write_csv(rows: Sequence[RowResult], path: Path, about: Mapping[str, str] | None = None) -> None:
    """Write one line per system, readable only by the owner; each metric takes three columns, the mean and its bounds.

    ``about`` (`data_facts`) is repeated in each line.
    """
    more = about or {}
    names = metric_names(rows)
    lines = [
        [row.system, *(row.metrics.get(name) for name in names), row.privacy, row.note, *more.values()] for row in rows
    ]
    table = Table(["system", *names, "privacy", "note", *more], lines, measured=frozenset(range(1, 1 + len(names))))
    write_whole(path, table.csv(), owner_only=True)


def to_json(rows: Sequence[RowResult]) -> list[dict[str, Any]]:
    """Return the rows as plain JSON values; NaN becomes null."""
    return [
        {
            "system": row.system,
            "metrics": {name: ends(interval) for name, interval in row.metrics.items()},
            "privacy": row.privacy,
            "note": row.note,
        }
        for row in rows
    ]


def from_json(data: Sequence[Mapping[str, Any]]) -> list[RowResult]:
    """Return the rows that ``to_json`` wrote."""
    try:
        return [
            RowResult(
                system=row["system"],
                metrics={name: interval_of(found) for name, found in row["metrics"].items()},
                privacy=row["privacy"],
                note=row["note"],
            )
            for row in data
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"A result row is malformed: {error!r}.") from error


def write_json(rows: Sequence[RowResult], path: Path, about: Mapping[str, str] | None = None) -> None:
    """Write ``to_json`` to a file, readable only by the owner; ``about`` (`data_facts`) is repeated in each row."""
    write_whole(
        path,
        json.dumps([row | dict(about or {}) for row in to_json(rows)], indent=2, allow_nan=False) + "\n",
        owner_only=True,
    )
