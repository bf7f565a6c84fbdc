"""A sweep as the paper shows it: a metric over epsilon, one line for each model size.

Drawn with matplotlib (``pip install "lit-dpret[plot]"``). Infinity stands at the right end of the axis, apart from
the numbers, because it is another mode and no large epsilon.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.files import write_whole
from lit_dpret.report.plan_figure import STYLES, can_draw

__all__ = ["can_draw", "draw_sweep"]


def draw_sweep(rows: Sequence[Mapping[str, Any]], *, metric: str, varied: Sequence[str], path: Path) -> Path:
    """Write the picture of finished trials as a PNG, for its owner alone: scores may be of private queries.

    Args:
        rows: Trials with their settings, ``metrics`` and ``epsilon``.
        metric: What is drawn; trials without it are left out.
        varied: The settings in which the trials differ; the first is the axis, the others name the lines.
        path: The file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axis, lines = varied[0], varied[1:]
    kept = [row for row in rows if metric in row["metrics"]]
    places = {value: place for place, value in enumerate(sorted({row[axis] for row in kept}, key=_order))}
    names = list(dict.fromkeys(tuple(row.get(name) for name in lines) for row in kept))
    for number, name in enumerate(names):
        colour, dash, marker = STYLES[number % len(STYLES)]
        points = sorted(
            (places[row[axis]], row["metrics"][metric]) for row in kept if tuple(row.get(n) for n in lines) == name
        )
        label = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in zip(lines, name, strict=True))
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=dash, marker=marker, label=label or None)
    axes.set_xticks(list(places.values()), [str(value) for value in places])
    axes.set_xlabel(axis)
    axes.set_ylabel(metric)
    if lines:
        axes.legend(fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    return write_whole(path, drawn.getvalue(), owner_only=True)


def _order(value: Any) -> tuple[float, str]:
    """Numbers by size, also inside a word (``eps3`` before ``eps16``), and ``inf`` last."""
    text = str(value)
    digits = text.lstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_=")
    try:
        return float(digits or text), text
    except ValueError:
        return math.inf, text
