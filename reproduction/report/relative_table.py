"""Test metrics of several variants in one table, in the form of paper 002's tables 1 to 4.

Each cell holds the mean over runs, the standard deviation over runs, and the mean relative to a
baseline variant (tables 1 and 2 divide by Non-Private; tables 3 and 4 show the numbers themselves).
The paper's recall, precision and F-beta are those of the best class of each run.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lit_dpret.cards.page import Grid
from lit_dpret.errors import DataError, StorageError
from reproduction.report.paper_002 import METRICS
from reproduction.report.variant_runs import VariantRun, by_variant

PAPER_METRICS: Mapping[str, str] = {
    "accuracy": "Accuracy",
    "best_recall": "Recall (best class)",
    "best_precision": "Precision (best class)",
    "best_f_beta": "F-beta (best class)",
}
Form = Literal["relative", "absolute"]


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


@dataclass(frozen=True, kw_only=True)
class RelativeTable:
    """Metrics by variant.

    Attributes:
        baseline: The variant that the others are divided by; None for none.
        metrics: Title of each metric, by name.
        rows: The cells of each variant, by metric name.
    """

    baseline: str | None
    metrics: Mapping[str, str]
    rows: Mapping[str, Mapping[str, Cell]]


def relative_table(
    runs: Sequence[VariantRun], *, baseline: str | None, metrics: Mapping[str, str] = PAPER_METRICS
) -> RelativeTable:
    """The table of ``runs``.

    Args:
        runs: All runs of the comparison.
        baseline: The variant that the others are divided by; None for none.
        metrics: Which metrics to show, and their titles.

    Raises:
        DataError: There is no such baseline, or a run lacks a metric.
    """
    groups = by_variant(runs)
    if baseline is not None and baseline not in groups:
        raise DataError(f"The baseline {baseline!r} is not among the variants {', '.join(groups)}.")
    for run in runs:
        for name in metrics:
            if name not in run.metrics:
                raise DataError(f"The run {run.variant!r} of seed {run.seed} has no metric {name!r}.")
    values = {v: {name: [run.metrics[name] for run in group] for name in metrics} for v, group in groups.items()}
    base = {name: statistics.fmean(values[baseline][name]) for name in metrics} if baseline is not None else {}
    rows = {
        variant: {name: _cell(found, base.get(name)) for name, found in by_name.items()}
        for variant, by_name in values.items()
    }
    return RelativeTable(baseline=baseline, metrics=dict(metrics), rows=rows)


def _cell(values: Sequence[float], base: float | None) -> Cell:
    mean = statistics.fmean(values)
    return Cell(
        mean=mean,
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        relative=mean / base if base else None,
        runs=len(values),
    )


def shares_of_the_gain(table: RelativeTable, *, start: str, metric: str = "accuracy") -> str:
    """What each variant keeps of the baseline's gain over ``start``, in a sentence; empty where that is no gain.

    A mean divided by the baseline's counts what the encoder had before it was trained as if it had been learned.
    """
    if table.baseline is None or start not in table.rows or metric not in table.metrics:
        return ""
    base, low = table.rows[table.baseline][metric].mean, table.rows[start][metric].mean
    if base <= low:
        return ""
    shares = [
        f"{variant} {(cells[metric].mean - low) / (base - low):.0%}"
        for variant, cells in table.rows.items()
        if variant not in (table.baseline, start)
    ]
    return (
        f"Of the gain of {table.baseline} over {start.lower()} encoders in {table.metrics[metric].lower()} "
        f"({low:.3f} to {base:.3f}): {', '.join(shares)}."
    )


def table_grid(table: RelativeTable, *, form: Form) -> Grid:
    """Relative means, or means with standard deviations.

    Raises:
        DataError: A relative table is asked for without a baseline.
    """
    if form == "relative" and table.baseline is None:
        raise DataError("A relative table needs a baseline variant to divide by.")
    rows = [[variant, *(_show(cells[name], form) for name in table.metrics)] for variant, cells in table.rows.items()]
    return Grid(("", *table.metrics.values()), rows, frozenset(range(1, 1 + len(table.metrics))))


def to_markdown(table: RelativeTable, *, form: Form) -> str:
    """The table as GitHub markdown.

    Raises:
        DataError: As `table_grid`.
    """
    return table_grid(table, form=form).markdown() + "\n"


def _show(cell: Cell, form: Form) -> str:
    if form == "relative":
        return "–" if cell.relative is None else f"{cell.relative:.3f}"
    return f"{cell.mean:.3f}" if cell.deviation is None else f"{cell.mean:.3f} / {cell.deviation:.3f}"


def caption(table: RelativeTable, *, form: Form) -> str:
    """What the numbers are, in two sentences."""
    counts = {cell.runs for cells in table.rows.values() for cell in cells.values()}
    low, high = min(counts), max(counts)
    over = f"{low} run" if low == high == 1 else f"{low} runs" if low == high else f"{low} to {high} runs"
    best = "" if not any(name.startswith("best_") for name in table.metrics) else (
        " Recall, precision and F-beta are those of each run's best class, averaged over runs."
    )  # fmt: skip
    if form == "relative":
        return f"Test metrics over {over}, each mean divided by that of {table.baseline}.{best}"
    spread = "" if high == 1 else ": mean / standard deviation"
    return f"Test metrics over {over}{spread}.{best}"


def to_json(table: RelativeTable) -> dict[str, Any]:
    """The whole table as plain JSON values."""
    rows = {v: {name: asdict(cell) for name, cell in cells.items()} for v, cells in table.rows.items()}
    return {"baseline": table.baseline, "metrics": dict(table.metrics), "rows": rows}


def read_table(path: Path) -> RelativeTable:
    """The table that `write_table` wrote as JSON.

    Raises:
        DataError: The file cannot be read, or holds no table.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = {v: {name: Cell(**cell) for name, cell in cells.items()} for v, cells in found["rows"].items()}
        return RelativeTable(baseline=found["baseline"], metrics=found["metrics"], rows=rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} holds no table ({type(error).__name__}).") from error


def write_table(table: RelativeTable, folder: Path, *, name: str = "metrics") -> list[Path]:
    """Write ``name.csv`` and ``name.json`` with every number, and ``name.md`` to read.

    Raises:
        StorageError: A file cannot be written.
    """
    paths = [folder / f"{name}.{suffix}" for suffix in ("csv", "json", "md")]
    forms: list[Form] = ["absolute"] if table.baseline is None else ["relative", "absolute"]
    markdown = "\n".join(f"{caption(table, form=form)}\n\n{to_markdown(table, form=form)}" for form in forms)
    try:
        with paths[0].open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["variant", "metric", "mean", "standard_deviation", "relative", "runs"])
            for variant, cells in table.rows.items():
                for metric, cell in cells.items():
                    writer.writerow(
                        [variant, metric, cell.mean, _blank(cell.deviation), _blank(cell.relative), cell.runs]
                    )
        paths[1].write_text(json.dumps(to_json(table), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        paths[2].write_text(markdown, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder} could not be written to: {error.strerror}.") from error
    return paths


def _blank(value: float | None) -> float | str:
    return "" if value is None else value


def beside_the_paper(table: RelativeTable, paper: Mapping[str, tuple[float, ...]], *, relative: bool) -> Grid:
    """Each cell ours / the paper's; a dash where one of them has no such variant.

    Args:
        table: Ours.
        paper: The paper's rows by variant, in the order of `reproduction.report.paper_002.METRICS`.
        relative: Compare means divided by the baseline's, not the means.
    """
    shown = [name for name in METRICS if name in table.metrics]
    rows: list[list[str]] = []
    for variant in dict.fromkeys([*table.rows, *paper]):
        cells = []
        for name in shown:
            cell = table.rows.get(variant, {}).get(name)
            ours = None if cell is None else cell.relative if relative else cell.mean
            theirs = paper[variant][METRICS.index(name)] if variant in paper else None
            cells.append(f"{_number(ours)} / {_number(theirs)}")
        rows.append([variant, *cells])
    header = ("ours / paper", *(table.metrics[name] for name in shown))
    return Grid(header, rows, frozenset(range(1, len(header))))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
