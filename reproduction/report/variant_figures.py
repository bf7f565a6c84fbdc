"""Pictures of a comparison of variants, in the form of paper 002's figures 1 to 5.

Every ``draw_`` function writes one PNG and returns its caption, which explains the lines, bands and colours. It raises
`DataError` if the runs cannot be compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import signal, stats

from lit_dpret.errors import DataError
from lit_dpret.report.figures import STYLES, new_figure, save_png, tidy
from reproduction.report.variant_runs import VariantRun, by_variant, ties_of

Band = Literal["interval", "range"]
Axis = Literal["steps", "examples", "seconds"]
Floats = NDArray[np.float64]
LEVEL = 0.95
WINDOW, ORDER = 100, 3  # of figure 2's filter, as in the paper


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The mean of a variant's runs at each observation, and a band around it."""

    variant: str
    x: tuple[float, ...]  # where it was observed; for seconds, the mean over the runs
    mean: tuple[float, ...]
    low: tuple[float, ...]  # equal to the mean if there is one run
    high: tuple[float, ...]
    runs: int


def lowest_loss(runs: Iterable[VariantRun]) -> float:
    """Return the lowest loss of all runs."""
    lowest = min(min(run.losses) for run in runs)
    if not lowest > 0:
        raise DataError(f"The lowest loss is {lowest:g}: relative losses need a positive one.")
    return float(lowest)


def relative_curves(runs: Sequence[VariantRun], *, axis: Axis = "examples", band: Band = "interval") -> list[Curve]:
    """Return the mean loss of each variant, divided by the lowest loss of all runs, with a band along ``axis``.

    The band is the 95 % t-interval of the mean over seeds, or the ``range`` from the lowest run to the highest, as the
    paper shades it.
    """
    scale = lowest_loss(runs)
    return [
        _mean_curve(
            variant, [observed(run, axis) for run in group], [np.asarray(run.losses) / scale for run in group],
            band=band, shared_x=axis != "seconds",
        )
        for variant, group in by_variant(runs).items()
    ]  # fmt: skip


def speed_curves(runs: Sequence[VariantRun]) -> list[Curve]:
    """Return seconds per example between observations, over the examples seen (figure 5, left)."""
    curves = []
    for variant, group in by_variant(runs).items():
        seen, clocks = [observed(run, "examples") for run in group], [observed(run, "seconds") for run in group]
        if any(len(x) < 2 for x in seen):
            raise DataError(f"The variant {variant!r} has one observation; its speed needs two.")
        speeds = [np.diff(clock) / np.diff(x) for clock, x in zip(clocks, seen, strict=True)]
        curves.append(_mean_curve(variant, [x[1:] for x in seen], speeds, band="range"))
    return curves


def _mean_curve(
    variant: str, x: Sequence[Floats], values: Sequence[Floats], *, band: Band, shared_x: bool = True
) -> Curve:
    if len({len(places) for places in x}) > 1 or (shared_x and any(not np.array_equal(x[0], p) for p in x)):
        raise DataError(f"The runs of {variant!r} were not observed at the same points, so they have no mean.")
    stacked = np.stack(values)
    runs, mean = len(stacked), stacked.mean(axis=0)
    low, high = stacked.min(axis=0), stacked.max(axis=0)
    if band == "interval" and runs > 1:
        half = float(stats.t.ppf((1 + LEVEL) / 2, runs - 1)) * stacked.std(axis=0, ddof=1) / np.sqrt(runs)
        low, high = mean - half, mean + half
    return Curve(
        variant=variant, x=_plain(np.mean(x, axis=0)), mean=_plain(mean), low=_plain(low), high=_plain(high), runs=runs
    )


def observed(run: VariantRun, axis: Axis) -> Floats:
    """Return where ``run`` was observed, shape (observations,)."""
    places = getattr(run, axis)
    if not len(places):
        raise DataError(f"The run {run.variant!r} of seed {run.seed} does not record its {axis}.")
    return np.asarray(places, dtype=float)


def smooth(values: ArrayLike) -> tuple[tuple[float, ...], int | None]:
    """Apply the Savitzky-Golay filter of figure 2: a polynomial through a sliding window of observations.

    A curve shorter than the window gets the largest odd window that fits. If no window exceeds the order, the curve is
    unchanged and its window is None. An even window, such as the paper's, has no middle observation: its curve is
    shifted by half an observation.
    """
    data = np.asarray(values, dtype=float)
    fits = WINDOW if len(data) >= WINDOW else len(data) - 1 + len(data) % 2
    if fits <= ORDER:
        return _plain(data), None
    return _plain(signal.savgol_filter(data, fits, ORDER)), fits


def mean_confusions(runs: Sequence[VariantRun]) -> dict[str, np.ndarray]:
    """Return the confusion matrix of each variant, averaged over its runs and rounded down (figures 3 and 4)."""
    groups = {v: [run.confusion for run in group if run.confusion is not None] for v, group in by_variant(runs).items()}
    groups = {variant: group for variant, group in groups.items() if group}
    sizes = {len(matrix) for group in groups.values() for matrix in group}
    if len(sizes) != 1:
        raise DataError(f"There is no mean of confusion matrices of {sorted(sizes) or 'no'} classes.")
    return {variant: np.floor(np.mean(np.asarray(group, dtype=float), axis=0)) for variant, group in groups.items()}


def _plain(values: Floats) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


# -- the figures -----------------------------------------------------------------------------------

_AXES = {"steps": "steps", "examples": "examples seen", "seconds": "seconds"}
_MOST_NUMBERED = 12  # classes up to which a confusion matrix shows its numbers
_RELATIVE = "the observed loss divided by the lowest loss of all runs shown."
_INTERVAL = "bands are 95 % t-intervals of that mean"
_RANGE = "bands reach from the lowest run to the highest"


def draw_relative_loss(
    runs: Sequence[VariantRun], path: Path, *, axis: Axis = "examples", title: str = "", of: str = "training loss"
) -> str:
    """Draw figure 1, left: mean relative loss of each variant, with a band over its runs; ``of`` names the losses."""
    curves = relative_curves(runs, axis=axis)
    figure, (panel,) = _figure(1)
    _draw_curves(panel, curves)
    _dress(panel, xlabel=_AXES[axis], ylabel=f"relative {of}", title=title)
    _log_if_wide(panel, curves)
    _save(figure, path)
    return f"{_counts(curves)}. Relative {of}: {_RELATIVE} Lines are means over runs; {_INTERVAL}."


def draw_held_out(runs: Sequence[VariantRun], path: Path) -> str:
    """Draw the same for the loss on images that were not trained on."""
    return draw_relative_loss([replace(run, losses=run.held_out) for run in runs], path, of="held-out loss")


def draw_batch_sizes(runs: Sequence[VariantRun], path: Path, *, variant: str) -> str:
    """Draw figure 1, right: single runs of a variant by batch size, relative to the lowest loss of ``runs``."""
    found: dict[int, VariantRun] = {}
    # For each batch size, draw the run of the lowest seed.
    for run in sorted(runs, key=lambda run: run.seed):
        if run.variant == variant and run.batch_size is not None:
            found.setdefault(run.batch_size, run)
    if not found:
        raise DataError(f"No run of {variant!r} records its batch size.")
    lowest = lowest_loss(runs)
    figure, (panel,) = _figure(1)
    for number, (size, run) in enumerate(sorted(found.items())):
        # Small batches are noisy, which would hide dashes. Line widths distinguish the runs, thin behind thick.
        wide = 0.6 + 1.6 * number / max(1, len(found) - 1)
        colour = STYLES[number % len(STYLES)][0]
        values = np.asarray(run.losses) / lowest
        panel.plot(observed(run, "examples"), values, color=colour, linewidth=wide, label=f"n = {size:,}")
    _dress(panel, xlabel=_AXES["examples"], ylabel="relative training loss", title=variant)
    _save(figure, path)
    return f"Single runs of {variant} with batches of n examples. Relative training loss: {_RELATIVE}"


def draw_smoothed_loss(runs: Sequence[VariantRun], path: Path, *, axis: Axis = "steps", title: str = "") -> str:
    """Draw figure 2: relative loss of each variant's lowest-seed run, light as observed and dark as smoothed."""
    single = [min(group, key=lambda run: run.seed) for group in by_variant(runs).values()]
    lowest = lowest_loss(single)
    figure, (panel,) = _figure(1)
    windows: dict[str, str] = {}
    for run, (colour, dashes, _) in zip(single, itertools.cycle(STYLES), strict=False):
        x, values = observed(run, axis), np.asarray(run.losses) / lowest
        smoothed, window = smooth(values)
        windows[run.variant] = "with too few observations to smooth" if window is None else f"window {window}"
        panel.plot(x, values, color=colour, alpha=0.28, linewidth=0.9)
        panel.plot(x, smoothed, color=colour, linestyle=dashes, linewidth=1.8, label=run.variant)
    _dress(panel, xlabel=_AXES[axis], ylabel="relative training loss", title=title)
    _save(figure, path)
    one = set(windows.values())
    told = one.pop() if len(one) == 1 else "; ".join(f"{variant}: {window}" for variant, window in windows.items())
    return (
        f"A single run of each variant. Relative training loss: {_RELATIVE} Light lines are the observed values; dark "
        f"lines are smoothed by a Savitzky-Golay filter of order {ORDER}, {told}."
    )


def draw_confusions(runs: Sequence[VariantRun], path: Path, *, names: Sequence[str] = (), title: str = "") -> str:
    """Draw figures 3 and 4: the confusion matrix of each variant, averaged over its runs and rounded down."""
    means = mean_confusions(runs)
    top = max(float(mean.max()) for mean in means.values())
    classes = len(next(iter(means.values())))
    figure, panels = _figure(len(means), width=4.6, height=5.2, layout="compressed")
    for panel, (variant, mean) in zip(panels, means.items(), strict=True):
        picture = panel.imshow(mean, cmap="Blues", vmin=0, vmax=top)
        panel.set_title(variant, fontsize=11)
        if classes <= _MOST_NUMBERED:
            ticks: Sequence[str] = names or [str(i) for i in range(classes)]
            panel.set_xticks(range(classes), ticks, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
            panel.set_yticks(range(classes), ticks if panel is panels[0] else [""] * classes, fontsize=8)
            for (row, column), count in np.ndenumerate(mean):
                colour = "white" if count > 0.6 * top else "black"
                panel.text(column, row, f"{count:.0f}", ha="center", va="center", fontsize=6.5, color=colour)
        panel.tick_params(length=0)
        panel.set_xlabel("predicted")
    panels[0].set_ylabel("true")
    figure.colorbar(picture, ax=panels, shrink=0.7, pad=0.015, label="images")
    if title:
        figure.suptitle(title, fontsize=12)
    _save(figure, path)
    counted = [
        f"{sum(run.confusion is not None for run in group)} of {variant}"
        for variant, group in by_variant(runs).items()
        if variant in means
    ]
    said = (
        f"Confusion matrices at the last evaluation, averaged over {', '.join(counted)} runs and rounded down. All "
        "panels share one scale."
    )
    return f"{said} {ties_of(runs)}".rstrip()


def draw_runtime(runs: Sequence[VariantRun], path: Path, *, title: str = "") -> str:
    """Draw figure 5: seconds per example over examples seen (left), mean relative loss over mean runtime (right)."""
    speeds, losses = speed_curves(runs), relative_curves(runs, axis="seconds", band="range")
    figure, (left, right) = _figure(2, width=5.6)
    _draw_curves(left, speeds, scale=1000)
    _dress(left, xlabel=_AXES["examples"], ylabel="milliseconds per example")
    _log_if_wide(left, speeds)
    _draw_curves(right, losses, bands=False)
    _dress(right, xlabel="seconds since the start, mean over runs", ylabel="relative training loss")
    _log_if_wide(right, losses)
    if title:
        figure.suptitle(title, fontsize=12)
    _save(figure, path)
    return (
        f"{_counts(losses)}. Left: milliseconds per example between observations; {_RANGE}. Right: mean "
        f"relative training loss over mean runtime; {_RELATIVE}"
    )


def _counts(curves: Sequence[Curve]) -> str:
    return ", ".join(f"{curve.variant}: {curve.runs} {'run' if curve.runs == 1 else 'runs'}" for curve in curves)


def _figure(
    panels: int, *, width: float = 6.4, height: float = 4.2, layout: str = "constrained"
) -> tuple[Any, list[Any]]:
    """Make a figure with panels side by side."""
    figure = new_figure(width * panels, height, layout=layout)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _draw_curves(panel: Any, curves: Sequence[Curve], *, bands: bool = True, scale: float = 1) -> None:
    for curve, (colour, dashes, _) in zip(curves, itertools.cycle(STYLES), strict=False):
        marker = "o" if len(curve.x) == 1 else None
        mean, low, high = (scale * np.asarray(values) for values in (curve.mean, curve.low, curve.high))
        panel.plot(curve.x, mean, color=colour, linestyle=dashes, marker=marker, label=curve.variant)
        if bands and curve.runs > 1:
            panel.fill_between(curve.x, low, high, color=colour, alpha=0.18, linewidth=0)


def _dress(panel: Any, *, xlabel: str, ylabel: str, title: str = "") -> None:
    panel.set(xlabel=xlabel, ylabel=ylabel, title=title)
    tidy(panel)
    panel.xaxis.set_major_formatter(_short)
    panel.legend(frameon=False, fontsize=9)


def _log_if_wide(panel: Any, curves: Sequence[Curve]) -> None:
    """Set a logarithmic scale if the values span more than a factor of 20."""
    values = [value for curve in curves for value in curve.mean]
    if min(values) > 0 and max(values) / min(values) > 20:
        panel.set_yscale("log")


def _short(value: float, _position: int | None = None) -> str:
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}" if math.isfinite(value) else ""


def _save(figure: Any, path: Path) -> None:
    save_png(figure, path, owner_only=False, dpi=130, bbox_inches="tight", pad_inches=0.1)
