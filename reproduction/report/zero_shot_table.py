"""One system on many data sets: a row for each, a last one for their mean, and what is missing in words."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lit_dpret.errors import StorageError
from lit_dpret.report.table import show
from lit_dpret.retrieval.metrics import Metric
from lit_dpret.retrieval.statistics import Interval


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """One data set.

    Args:
        name: Of the set.
        metrics: Mean over its queries by metric, with intervals; empty where it was not measured.
        queries: How many queries.
        note: Why it is missing, or in what it departs from the published set.
    """

    name: str
    metrics: dict[str, Interval] = field(default_factory=dict)
    queries: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ZeroShotTable:
    """All data sets of one system.

    Args:
        system: Its name.
        privacy: What it promises, in one line.
        metrics: In the order of the columns.
        sets: In the order of the rows, missing ones among them.
        mean: Mean over the measured sets by metric, each set counting alike; empty where none was.
    """

    system: str
    privacy: str
    metrics: tuple[str, ...]
    sets: tuple[SetResult, ...]
    mean: dict[str, Interval] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """The sets without a number."""
        return [one.name for one in self.sets if not one.metrics]

    @property
    def mean_name(self) -> str:
        """What the last row is the mean of; a mean over some sets is not that over all."""
        measured = len(self.sets) - len(self.missing)
        return f"mean of all {measured}" if not self.missing else f"mean of {measured} of {len(self.sets)}"

    def definitions(self) -> dict[str, str]:
        """Each metric as it is shown, with its definition."""
        return {metric.shown: metric.definition for metric in map(Metric.parse, self.metrics)}

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "system": self.system,
            "privacy": self.privacy,
            "definitions": {name: Metric.parse(name).definition for name in self.metrics},
            "sets": [asdict(one) for one in self.sets],
            "mean": {name: asdict(interval) for name, interval in self.mean.items()},
            "mean_of": self.mean_name,
            "missing": self.missing,
        }

    def rows(self) -> list[tuple[str, dict[str, Interval], str, str]]:
        """Name, metrics, number of queries and note of every row, the mean last."""
        listed = [(one.name, one.metrics, f"{one.queries:,}" if one.queries else "", one.note) for one in self.sets]
        return [*listed, (self.mean_name, self.mean, "", "")]

    def to_console(self) -> Table:
        """The measured sets for ``rich.print``: intervals below their numbers, notes below the names."""
        caption = "mean over queries, below it the 95 % bootstrap interval"
        table = Table(title=f"{self.system}\n{self.privacy}", title_justify="left", caption=caption, show_lines=True)
        table.add_column("data set", min_width=16)
        table.add_column("queries", justify="right")
        for metric in map(Metric.parse, self.metrics):
            table.add_column(metric.shown, justify="right", no_wrap=True)
        for name, found, queries, note in self.rows():
            if not found:
                continue
            cells = [Text("\n".join(show(found.get(metric)).split(" ", 1))) for metric in self.metrics]
            table.add_row(Text(f"{name}\n{note}" if note else name), queries, *cells)
        return table

    def to_markdown(self) -> str:
        """The same as markdown, with the definitions."""
        shown = list(self.definitions())
        lines = [f"# {self.system}", "", self.privacy, "", f"| data set | queries | {' | '.join(shown)} | note |"]
        lines.append("| :-- | --: |" + " --: |" * len(shown) + " :-- |")
        for name, found, queries, note in self.rows():
            cells = " | ".join(show(found.get(metric)) for metric in self.metrics)
            lines.append(f"| {name} | {queries} | {cells} | {note} |")
        lines += ["", "Means over queries with 95 % bootstrap intervals.", ""]
        lines += [f"* {name}: {text}." for name, text in self.definitions().items()]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> list[Path]:
        """Write ``zero_shot.json``, ``.md`` and ``.csv``.

        Raises:
            StorageError: One of them cannot be written.
        """
        paths = [folder / f"zero_shot.{suffix}" for suffix in ("json", "md", "csv")]
        try:
            paths[0].write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
            paths[1].write_text(self.to_markdown(), encoding="utf-8")
            with paths[2].open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(self._lines())
        except OSError as error:
            raise StorageError(f"{error.filename} cannot be written: {error.strerror}.") from error
        return paths

    def _lines(self) -> list[Sequence[object]]:
        head = ["data set", "queries", *(f"{m}{end}" for m in self.definitions() for end in ("", " low", " high"))]
        lines: list[Sequence[object]] = [[*head, "note"]]
        for name, found, queries, note in self.rows():
            numbers: list[object] = []
            for metric in self.metrics:
                i = found.get(metric)
                numbers += ["", "", ""] if i is None else [i.mean, i.low, i.high]
            lines.append([name, queries.replace(",", ""), *numbers, note])
        return lines
