"""What every figure shares: one look, told apart by dashes and markers as well as by colour, and one way to a PNG.

Drawn with matplotlib, which is an extra (``pip install "lit-dpret[plot]"``). The colours are those of Okabe and Ito
(2008), which people with the common forms of colour blindness can tell apart.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.errors import ConfigurationError
from lit_dpret.files import write_whole

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
# Lines are told apart by dashes and markers as well as by colour.
STYLES: tuple[tuple[str, Any, str], ...] = (
    (BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, ":", "^"), (PURPLE, "-.", "D"), ("#000000", (0, (5, 1)), "v"),
    ("#E69F00", (0, (3, 1, 1, 1)), "P"), ("#56B4E9", (0, (1, 1)), "X"),
)  # fmt: skip


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Refuse to draw where matplotlib is not installed."""
    if not can_draw():
        raise ConfigurationError(
            "Figures are drawn with matplotlib, which is not installed. Where task.plot=true asks for them, null goes "
            'without; or run: pip install "lit-dpret[plot]"'
        )


def new_figure(width: float, height: float, *, layout: str = "constrained") -> Any:
    """Make a figure that needs no display, of so many inches."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)  # type: ignore[arg-type]
    FigureCanvasAgg(figure)
    return figure


def tidy(axis: Any, *, grid: str = "both") -> None:
    """Leave out the frame's upper and right side, and draw a light grid behind the data."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(visible=True, axis=grid, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


def save_png(figure: Any, path: Path, *, owner_only: bool, dpi: int = 110, **how: Any) -> Path:
    """Write a figure as a PNG, whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png", **how)
    return write_whole(path, drawn.getvalue(), owner_only=owner_only)


def draw_sweep(rows: Sequence[Mapping[str, Any]], *, metric: str, varied: Sequence[str], path: Path) -> Path:
    """Draw a sweep as paper 000 shows it: a metric over epsilon, one line for each model size.

    Infinity stands at the right end of the axis, apart from the numbers, because it is another mode and no large
    epsilon. The picture is for its owner alone: scores may be of private queries.
    """
    figure = new_figure(7, 4.5)
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
    axes.set(xlabel=axis, ylabel=metric)
    if lines:
        axes.legend(fontsize="small")
    return save_png(figure, path, owner_only=True, dpi=150)


def _order(value: Any) -> tuple[float, str]:
    """Sort numbers by size, also inside a word (``eps3`` before ``eps16``), and ``inf`` last."""
    text = str(value)
    digits = text.lstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_=")
    try:
        return float(digits or text), text
    except ValueError:
        return math.inf, text
