"""A comparison of two systems for a console, as Markdown and as JSON: differences, intervals, p-values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lit_dpret.cards.page import Block, Bullets, Grid, Paragraph, Section, to_markdown
from lit_dpret.files import write_whole
from lit_dpret.retrieval.comparison import Comparison, Difference
from lit_dpret.retrieval.metrics import Metric

_HEAD = ("data", "metric", "a", "b", "a - b", "better / worse", "p", "p (Holm)")


def comparison_table(comparison: Comparison) -> Table:
    """Return the comparison for ``rich.print``, in 80 columns; a row in bold differs significantly."""
    caption = f"{_caption(comparison)} Bold: significant."
    table = Table(title=_title(comparison), title_justify="left", caption=caption, caption_justify="left")
    table.add_column("metric\ndata")
    for name in ("a", "b", "a - b", "better /\nworse", "p\np (Holm)"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in comparison.cells:
        data, metric, a, b, difference, counts, p, corrected = _cells(cell)
        row = (f"{metric}\n{data}", a, b, difference.replace(" ", "\n", 1), counts.replace(" of ", "\nof "))
        style = "bold" if comparison.significant(cell) else None
        table.add_row(*(Text(text) for text in (*row, f"{p}\n{corrected}")), style=style)
    return table


def write_comparison(comparison: Comparison, folder: Path, about: Mapping[str, Any] | None = None) -> tuple[Path, Path]:
    """Write ``comparison.json`` and ``comparison.md``, which their owner alone may read."""
    rows = [(*_cells(cell), "yes" if comparison.significant(cell) else "no") for cell in comparison.cells]
    metrics = dict.fromkeys(Metric.parse(cell.metric) for cell in comparison.cells)
    blocks: list[Block] = [
        Grid((*_HEAD, "significant"), rows, frozenset(range(2, len(_HEAD)))),
        Paragraph(_caption(comparison)),
        Bullets([f"{metric.shown}: {metric.definition}." for metric in metrics]),
    ]
    facts = {**comparison.to_dict(), "data": dict(about or {})}  # by data set: of a, and of b
    texts = {
        "comparison.json": json.dumps(facts, indent=2, allow_nan=False) + "\n",
        "comparison.md": to_markdown(_title(comparison), "", [], [Section("Differences", blocks)]),
    }
    machine, reader = (write_whole(folder / name, text, owner_only=True) for name, text in texts.items())
    return machine, reader


def _title(comparison: Comparison) -> str:
    return f"a: {comparison.a}, b: {comparison.b}"


def _caption(comparison: Comparison) -> str:
    tests = len(comparison.cells)
    return (
        f"a - b: mean difference with its {comparison.level:.0%} bootstrap interval. p: paired randomisation test, "
        f"{comparison.resamples:,} swaps; Holm corrects for {tests} {'test' if tests == 1 else 'tests'}. "
        f"Significant: p (Holm) at most {1 - comparison.level:.2g}. All this is about the choice "
        "of queries, not luck in training."
    )


def _cells(cell: Difference) -> tuple[str, ...]:
    d = cell.difference
    return (
        cell.data, Metric.parse(cell.metric).shown, f"{cell.a:.4f}", f"{cell.b:.4f}",
        f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]", f"{cell.better} / {cell.worse} of {cell.queries}",
        _p(cell.p_value), _p(cell.p_holm),
    )  # fmt: skip


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}"
