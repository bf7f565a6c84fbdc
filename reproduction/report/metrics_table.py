"""Test metrics of several variants in one table, in the form of paper 002's tables 1 to 4.

Each cell holds the mean over runs, the standard deviation over runs, and the mean relative to a baseline variant
(tables 1 and 2 divide by Non-Private; tables 3 and 4 show the numbers themselves). The paper's recall, precision and
F-beta are those of the best class of each run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.page import Block, Grid, Paragraph
from lit_dpret.errors import DataError
from lit_dpret.files import write_whole
from reproduction.report.variant_runs import VariantRun, by_variant

#: In the order of the paper's columns.
PAPER_METRICS: Mapping[str, str] = {
    "accuracy": "Accuracy",
    "best_recall": "Recall (best class)",
    "best_precision": "Precision (best class)",
    "best_f_beta": "F-beta (best class)",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One metric of one variant.

    Attributes:
        mean: Over the runs.
        deviation: Standard deviation over the runs (divided by runs - 1); None for one run.
        relative: The mean over the baseline's mean; None without a baseline, or where that is 0.
        runs: How many runs.
    """

    mean: float
    deviation: float | None
    relative: float | None
    runs: int

    @classmethod
    def of(cls, values: Sequence[float], base: float | None) -> Cell:
        mean, several = statistics.fmean(values), len(values) > 1
        return cls(
            mean=mean, deviation=statistics.stdev(values) if several else None,
            relative=mean / base if base else None, runs=len(values),
        )  # fmt: skip

    def show(self, *, relative: bool) -> str:
        if relative:
            return _number(self.relative)
        return _number(self.mean) if self.deviation is None else f"{self.mean:.3f} / {self.deviation:.3f}"


@dataclass(frozen=True, kw_only=True)
class MetricsTable:
    """Metrics by variant."""

    baseline: str | None
    metrics: Mapping[str, str]
    rows: Mapping[str, Mapping[str, Cell]]

    @classmethod
    def of(
        cls, runs: Sequence[VariantRun], *, baseline: str | None, metrics: Mapping[str, str] = PAPER_METRICS
    ) -> MetricsTable:
        """Return the table of all runs of a comparison."""
        groups = by_variant(runs)
        if baseline is not None and baseline not in groups:
            raise DataError(f"The baseline {baseline!r} is not among the variants {', '.join(groups)}.")
        for run, name in ((run, name) for run in runs for name in metrics if name not in run.metrics):
            raise DataError(f"The run {run.variant!r} of seed {run.seed} has no metric {name!r}.")
        values = {v: {name: [run.metrics[name] for run in group] for name in metrics} for v, group in groups.items()}
        base = {name: statistics.fmean(values[baseline][name]) for name in metrics} if baseline is not None else {}
        rows = {
            variant: {name: Cell.of(found, base.get(name)) for name, found in by_name.items()}
            for variant, by_name in values.items()
        }
        return cls(baseline=baseline, metrics=dict(metrics), rows=rows)

    @classmethod
    def read(cls, path: Path) -> MetricsTable:
        """Return the table that `write` wrote as JSON."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows = {v: {name: Cell(**cell) for name, cell in cells.items()} for v, cells in found["rows"].items()}
            return cls(baseline=found["baseline"], metrics=found["metrics"], rows=rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} holds no table ({type(error).__name__}).") from error

    def write(self, folder: Path, *, name: str = "metrics") -> list[Block]:
        """Write ``name.csv`` and ``name.json`` with every number, and ``name.md`` to read; return what that shows."""
        lines = [
            [variant, metric, cell.mean, cell.deviation, cell.relative, cell.runs]
            for variant, cells in self.rows.items()
            for metric, cell in cells.items()
        ]
        forms = [False] if self.baseline is None else [True, False]
        blocks: list[Block] = []
        for relative in forms:
            blocks += [Paragraph(self.caption(relative=relative)), self.grid(relative=relative)]
        texts = {
            "csv": Grid(["variant", "metric", "mean", "standard_deviation", "relative", "runs"], lines).csv(),
            "json": json.dumps(asdict(self), indent=2, allow_nan=False) + "\n",
            "md": "\n\n".join(block.markdown() for block in blocks) + "\n",
        }
        for ending, text in texts.items():
            write_whole(folder / f"{name}.{ending}", text)
        return blocks

    def grid(self, *, relative: bool) -> Grid:
        """Relative means, or means with standard deviations."""
        rows = [[v, *(cells[name].show(relative=relative) for name in self.metrics)] for v, cells in self.rows.items()]
        return Grid(("", *self.metrics.values()), rows, frozenset(range(1, 1 + len(self.metrics))))

    def caption(self, *, relative: bool) -> str:
        """Say what the numbers are, in two sentences."""
        counts = {cell.runs for cells in self.rows.values() for cell in cells.values()}
        low, high = min(counts), max(counts)
        over = f"{low} run" if low == high == 1 else f"{low} runs" if low == high else f"{low} to {high} runs"
        best = ""
        if any(name.startswith("best_") for name in self.metrics):
            best = " Recall, precision and F-beta are those of each run's best class, averaged over runs."
        if relative:
            return f"Test metrics over {over}, each mean divided by that of {self.baseline}.{best}"
        return f"Test metrics over {over}{'' if high == 1 else ': mean / standard deviation'}.{best}"

    def shares_of_the_gain(self, *, start: str, metric: str = "accuracy") -> str:
        """Say what each variant keeps of the baseline's gain over ``start``; empty where there is no gain.

        A mean divided by the baseline's counts what the encoder had before it was trained as if it had been learned.
        """
        if self.baseline is None or start not in self.rows or metric not in self.metrics:
            return ""
        base, low = self.rows[self.baseline][metric].mean, self.rows[start][metric].mean
        if base <= low:
            return ""
        shares = [
            f"{variant} {(cells[metric].mean - low) / (base - low):.0%}"
            for variant, cells in self.rows.items()
            if variant not in (self.baseline, start)
        ]
        return (
            f"Of the gain of {self.baseline} over {start.lower()} encoders in {self.metrics[metric].lower()} "
            f"({low:.3f} to {base:.3f}): {', '.join(shares)}."
        )

    def beside_the_paper(self, paper: Mapping[str, Sequence[float]], *, relative: bool) -> Grid:
        """Return each cell ours / the paper's; a dash where one of them has no such variant."""
        rows: list[list[str]] = []
        for variant in dict.fromkeys([*self.rows, *paper]):
            cells: list[Any] = [self.rows.get(variant, {}).get(name) for name in PAPER_METRICS]
            ours = [cell and (cell.relative if relative else cell.mean) for cell in cells]
            theirs = paper.get(variant, [None] * len(PAPER_METRICS))
            pairs = zip(ours, theirs, strict=True)
            rows.append([variant, *(f"{_number(mine)} / {_number(theirs)}" for mine, theirs in pairs)])
        header = ("ours / paper", *PAPER_METRICS.values())
        return Grid(header, rows, frozenset(range(1, len(header))))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
