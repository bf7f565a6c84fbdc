"""One comparison table, for a console, a spreadsheet and a program.

Each row is a system, each metric comes with its confidence interval, and the privacy column stands
in the same row: a number of quality without its price is not a result.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lit_dpret.errors import DataError
from lit_dpret.files import write_whole
from lit_dpret.retrieval.statistics import Interval

METRICS = ("nDCG@10", "Recall@10", "MRR@10")


@dataclass(frozen=True)
class RowResult:
    """What one system reached, and what it cost.

    Args:
        system: Name of the system.
        metrics: Mean and 95 % confidence interval per metric, e.g. ``{"nDCG@10": Interval(...)}``.
        privacy: Epsilon with unit, neighbours and delta in one line (``privacy_line`` of a card),
            or in words that there is none.
        note: Anything a reader must know beside the numbers.
    """

    system: str
    metrics: Mapping[str, Interval] = field(default_factory=dict)
    privacy: str = ""
    note: str = ""


def metric_names(rows: Sequence[RowResult]) -> list[str]:
    """The metrics that any row has: the usual three first, the rest in order of appearance."""
    present = dict.fromkeys(name for row in rows for name in row.metrics)
    return [name for name in METRICS if name in present] + [name for name in present if name not in METRICS]


def show(interval: Interval | None) -> str:
    """``0.412 [0.398, 0.425]``, or a dash where nothing was measured."""
    if interval is None or math.isnan(interval.mean):
        return "–"
    if math.isnan(interval.low) or math.isnan(interval.high):
        return f"{interval.mean:.3f}"
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def console_table(rows: Sequence[RowResult], *, title: str = "") -> Table:
    """The table for ``rich.print``; it fits 80 columns: intervals and privacy stand below their numbers and names."""
    names = metric_names(rows)
    table = Table(
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


def write_csv(rows: Sequence[RowResult], path: Path) -> None:
    """One line per system, for the file's owner alone; each metric in three columns: name, name low, name high."""
    names = metric_names(rows)
    header = ["system", *(column for name in names for column in (name, f"{name} low", f"{name} high"))]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow([*header, "privacy", "note"])
    for row in rows:
        numbers: list[object] = []
        for name in names:
            interval = row.metrics.get(name)
            numbers += ["", "", ""] if interval is None else [interval.mean, interval.low, interval.high]
        writer.writerow([row.system, *numbers, row.privacy, row.note])
    write_whole(path, file.getvalue(), owner_only=True)


def to_json(rows: Sequence[RowResult]) -> list[dict[str, Any]]:
    """The rows as plain JSON values; NaN becomes null."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return [
        {
            "system": row.system,
            "metrics": {
                name: {"mean": number(i.mean), "low": number(i.low), "high": number(i.high)}
                for name, i in row.metrics.items()
            },
            "privacy": row.privacy,
            "note": row.note,
        }
        for row in rows
    ]


def from_json(data: Sequence[Mapping[str, Any]]) -> list[RowResult]:
    """The rows that ``to_json`` wrote.

    Raises:
        DataError: A row lacks a field.
    """
    try:
        return [
            RowResult(
                system=row["system"],
                metrics={
                    name: Interval(*(math.nan if i[end] is None else i[end] for end in ("mean", "low", "high")))
                    for name, i in row["metrics"].items()
                },
                privacy=row["privacy"],
                note=row["note"],
            )
            for row in data
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"A result row is malformed: {error!r}.") from error


def write_json(rows: Sequence[RowResult], path: Path) -> None:
    """``to_json`` as a file, for its owner alone."""
    write_whole(path, json.dumps(to_json(rows), indent=2, allow_nan=False) + "\n", owner_only=True)
