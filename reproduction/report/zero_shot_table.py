"""One system on many data sets: a row for each, a last one for their mean, and what is missing in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table as ConsoleTable

from lit_dpret.cards.page import Bullets, Paragraph, Section
from lit_dpret.report.page import Page
from lit_dpret.report.table import Table
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

    def table(self, *, measured_only: bool = False) -> Table:
        """The sets, the mean last, without the missing ones if asked for."""
        listed = [*self.sets, SetResult(name=self.mean_name, metrics=self.mean)]
        rows = [
            [one.name, one.queries or None, *(one.metrics.get(metric) for metric in self.metrics), one.note]
            for one in listed
            if one.metrics or not measured_only
        ]
        places = frozenset(range(2, 2 + len(self.metrics)))
        return Table(
            ["data set", "queries", *self.definitions(), "note"], rows, measured=places, numeric=frozenset({1})
        )

    def console(self) -> ConsoleTable:
        """The measured sets for ``rich.print``."""
        caption = "mean over queries, below it the 95 % bootstrap interval"
        return self.table(measured_only=True).console(title=f"{self.system}\n{self.privacy}", caption=caption)

    def write(self, folder: Path) -> dict[str, Path]:
        """Write ``zero_shot.json``, ``.md``, ``.html`` and ``.csv``.

        Raises:
            StorageError: One of them cannot be written.
        """
        meant = [f"{name}: {text}." for name, text in self.definitions().items()]
        said = Paragraph("Means over queries with 95 % bootstrap intervals.")
        sections = [Section("By data set", [self.table(), said, Bullets(meant)])]
        return Page(
            name="zero_shot", title=self.system, subtitle=self.privacy, sections=sections, facts=self.to_dict(),
            tables={"zero_shot.csv": self.table()}, owner_only=False,
        ).write(folder)  # fmt: skip
