"""Figures in one style, drawn with matplotlib, which is an extra (``pip install "lit-dpret[plot]"``).

The colours are those of Okabe and Ito (2008), distinguishable with the common forms of colour blindness.
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
from lit_dpret.privacy.budget import show_delta, show_epsilon

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
# Lines differ in dashes and markers as well as in colour.
STYLES: tuple[tuple[str, Any, str], ...] = (
    (BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, ":", "^"), (PURPLE, "-.", "D"), ("#000000", (0, (5, 1)), "v"),
    ("#E69F00", (0, (3, 1, 1, 1)), "P"), ("#56B4E9", (0, (1, 1)), "X"),
)  # fmt: skip


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Refuse to draw if matplotlib is not installed."""
    if not can_draw():
        raise ConfigurationError(
            "Figures are drawn with matplotlib, which is not installed. Set task.plot=null instead of task.plot=true, "
            'or run: pip install "lit-dpret[plot]"'
        )


def new_figure(width: float, height: float, *, layout: str = "constrained") -> Any:
    """Make a figure without a display, with this size in inches."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)  # type: ignore[arg-type]
    FigureCanvasAgg(figure)
    return figure


def tidy(axis: Any, *, grid: str = "both") -> None:
    """Hide the upper and right spines, and draw a light grid behind the data."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(visible=True, axis=grid, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


def save_png(figure: Any, path: Path, *, owner_only: bool, dpi: int = 110, **how: Any) -> Path:
    """Write a figure as a PNG, atomically."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png", **how)
    return write_whole(path, drawn.getvalue(), owner_only=owner_only)


def draw_sweep(rows: Sequence[Mapping[str, Any]], *, metric: str, varied: Sequence[str], path: Path) -> Path:
    """Draw a sweep as in paper 000: a metric over epsilon, one line per model size."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    axis, lines = varied[0], varied[1:]
    kept = [row for row in rows if metric in row["metrics"]]
    # Infinity is at the right end of the axis, apart from the numbers, because it is another mode, not a large epsilon.
    # Only its owner can read the picture: scores may be of private queries.
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
    """Return a key that sorts numbers by size, even within a word (``eps3`` before ``eps16``), and ``inf`` last."""
    text = str(value)
    digits = text.lstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_=")
    try:
        return float(digits or text), text
    except ValueError:
        return math.inf, text


# -- the plan: epsilon step by step, noise over batch, several units, and the ceilings of attacks


_NAMES = {
    "poisson": "Poisson sampling", "truncated_poisson": "truncated Poisson", "fixed_size": "fixed size",
    "shuffle": "shuffled, no amplification", "full_batch": "all units in every step",
}  # fmt: skip


def draw_plan(facts: Mapping[str, Any], path: Path) -> Path:
    """Draw the facts of `describe_plan` as a PNG."""
    budget = facts["plan"]["budget"]
    figure = new_figure(12, 9)
    axes = figure.subplots(2, 2)
    figure.suptitle(
        f"epsilon {show_epsilon(facts['epsilon'])} at delta {show_delta(budget['delta'])}, unit={budget['unit']}, "
        f"neighbours={budget['neighbours']}: noise multiplier {facts['noise_multiplier']:.4g}, {facts['steps']} steps",
        fontsize=12,
    )
    _over_steps(axes[0, 0], facts)
    _over_batch(axes[0, 1], facts)
    _several_units(axes[1, 0], facts)
    _attacks(axes[1, 1], facts)
    for axis in axes.flat:
        tidy(axis)
    return save_png(figure, path, owner_only=False)


def _over_steps(axis: Any, facts: Mapping[str, Any]) -> None:
    lines = [line for line in facts["epsilon_over_steps"] if line["points"]]
    for (colour, dashes, marker), line in zip(STYLES, lines, strict=False):
        steps, values = zip(*line["points"], strict=True)
        name = f"{_NAMES[line['sampling']]}, {line['neighbours']}"
        if line["amplified"]:
            axis.plot(steps, values, dashes, color=colour, marker=marker, markersize=4, label=name)
        else:
            # A pass is charged when it begins.
            axis.plot(steps, values, dashes, color=colour, drawstyle="steps-pre", label=name)
    axis.axhline(facts["plan"]["budget"]["eps"], color=GREY, linewidth=1.0)
    axis.annotate(
        "budget", (0.01, facts["plan"]["budget"]["eps"]), xycoords=("axes fraction", "data"),
        xytext=(0, 3), textcoords="offset points", fontsize=9, color=GREY,
    )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="steps", ylabel="epsilon", title="Epsilon spent, by law and neighbours")
    _legend_above(axis, 0.4)


def _legend_above(axis: Any, share: float) -> None:
    """Put the legend of lines that rise to the right above them, on a logarithmic axis."""
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** share)
    axis.legend(loc="upper left", fontsize=9, frameon=False)


def _over_batch(axis: Any, facts: Mapping[str, Any]) -> None:
    axis.set(xlabel="expected batch size", ylabel="noise multiplier / batch", title="Noise to batch at the budget")
    table = facts["knee"]
    if table is None:
        axis.text(0.5, 0.5, "the number of units is not public", ha="center", transform=axis.transAxes)
        return
    width = len(table["epochs"])
    reached = False
    for column, (colour, dashes, marker) in zip(range(width), STYLES, strict=False):
        cells = [cell for cell in table["cells"][column::width] if cell["noise_to_batch"] is not None]
        if not cells:
            continue
        batches = [cell["batch"] for cell in cells]
        ratios = [cell["noise_to_batch"] for cell in cells]
        passes = f"{table['epochs'][column]:.3g} passes"
        axis.plot(batches, ratios, dashes, color=colour, marker=marker, markersize=4, label=passes)
        knee = table["knees"][column]["batch"]
        if knee in batches:
            reached = True
            place = batches.index(knee)
            axis.plot([knee], [ratios[place]], "o", markersize=13, markerfacecolor="none", color="black")
    axis.axvline(facts["expected_batch_size"], color=GREY, linewidth=1.0)
    axis.annotate(
        "planned", (facts["expected_batch_size"], 0.02), xycoords=("data", "axes fraction"),
        xytext=(4, 0), textcoords="offset points", fontsize=9, color=GREY,
    )  # fmt: skip
    if reached:
        axis.plot([], [], "o", markersize=10, markerfacecolor="none", color="black", label="knee")
    axis.set(xscale="log", yscale="log")
    axis.legend(loc="upper right", fontsize=9, frameon=False)


def _several_units(axis: Any, facts: Mapping[str, Any]) -> None:
    users, unit = facts["user_level"], facts["plan"]["budget"]["unit"]
    columns = [c for c in users["columns"] if any(row["epsilon"] is not None for row in c["rows"])]
    for order, ((colour, dashes, marker), column) in enumerate(zip(STYLES, columns, strict=False)):
        rows = [row for row in column["rows"] if row["epsilon"] is not None]
        cap = f", cap {column['cap']}" if column["cap"] else ""
        name = _NAMES[column["sampling"]] + cap + (" (one only)" if len(rows) == 1 else "")
        places = [[row["units"] for row in column["rows"]].index(row["units"]) for row in rows]
        values = [row["epsilon"] for row in rows]
        # The planned law is a ring under the others, with its numbers below its line.
        ring = {"markersize": 12, "markerfacecolor": "none"} if order == 0 else {"markersize": 6}
        axis.plot(places, values, dashes, color=colour, marker=marker, label=name, **ring)
        for place, value in zip(places, values, strict=True):
            axis.annotate(
                show_epsilon(value), (place, value), xytext=(0, 9 if order else -18), textcoords="offset points",
                ha="center", fontsize=8, color=colour,
            )  # fmt: skip
    counts = [row["units"] for row in users["columns"][0]["rows"]]
    plural = "queries" if unit == "query" else f"{unit}s"
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    axis.set(yscale="log", xlabel=f"{plural} of one person", ylabel="epsilon of all of them")
    axis.set_title(f"Several {plural}, under {users['neighbours']}")
    axis.margins(x=0.08, y=0.18)
    _legend_above(axis, 0.35)


def _attacks(axis: Any, facts: Mapping[str, Any]) -> None:
    axis.set_title("No attack on one unit does better than")
    ceilings = facts["ceilings"]
    if ceilings is None:
        axis.text(0.5, 0.5, "no curve is known for this law", ha="center", transform=axis.transAxes)
        return
    rates = ceilings["tpr_at_fpr"].items()
    bars = [("member or not,\nhalf and half", ceilings["membership_accuracy"], 0.5)]
    bars += [(f"true positives at\n{float(rate):.3g} false ones", value, float(rate)) for rate, value in rates]
    guesses = ((prior, value) for prior, value in ceilings["secret_guess"].items() if float(prior) >= 1e-6)
    bars += [(f"a secret that one\nguesses with {prior}", value, float(prior)) for prior, value in guesses]
    places = range(len(bars))
    axis.barh(places, [bar[1] for bar in bars], color=BLUE, height=0.62, label="ceiling of any attack")
    axis.plot([bar[2] for bar in bars], places, "D", color=ORANGE, markersize=7, label="guessing without the model")
    axis.set_yticks(places, [bar[0] for bar in bars], fontsize=9)
    for place, bar in zip(places, bars, strict=True):
        axis.annotate(
            f"{bar[1]:.3g}", (max(bar[1], bar[2]), place), xytext=(9, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="probability", xlim=(min(bar[2] for bar in bars) / 3, 4.0))
    axis.legend(loc="lower center", bbox_to_anchor=(0.4, -0.28), ncols=2, fontsize=9, frameon=False)
