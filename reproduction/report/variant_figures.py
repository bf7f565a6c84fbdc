"""Pictures of a comparison of variants, in the form of paper 002's figures 1 to 5.

Every function draws one PNG and returns its caption, which says what the lines, bands and colours
are; the caption is not part of the picture. Drawn with matplotlib, which is an extra
(``pip install "lit-dpret[plot]"``). Variants are told apart by dashes as well as by colour, and the
colours are those of Okabe and Ito (2008), which people with the common forms of colour blindness can
tell apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import signal, stats

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.report.figures import new_figure, save_png, tidy
from reproduction.report.variant_runs import VariantRun, by_variant

Band = Literal["interval", "range"]
Axis = Literal["steps", "examples", "seconds"]
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The mean of a variant's runs at each observation, and a band around it.

    Attributes:
        variant: Whose it is.
        x: Where it was observed; for seconds, the mean over the runs.
        mean: Mean over the runs.
        low: Lower end of the band; equal to the mean where there is one run.
        high: Upper end of the band.
        runs: How many runs.
    """

    variant: str
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    runs: int


@dataclass(frozen=True, kw_only=True)
class Smoothed:
    """A curve after the Savitzky-Golay filter.

    Attributes:
        values: As many as there were.
        window: Observations in the sliding window; None where the curve was too short to smooth.
    """

    values: tuple[float, ...]
    window: int | None


def lowest_loss(runs: Iterable[VariantRun]) -> float:
    """The lowest loss of all runs.

    Raises:
        DataError: It is not positive, so that nothing can be divided by it.
    """
    lowest = min(min(run.losses) for run in runs)
    if not lowest > 0:
        raise DataError(f"The lowest loss is {lowest:g}: losses relative to it mean nothing unless it is positive.")
    return float(lowest)


def relative_curves(
    runs: Sequence[VariantRun], *, axis: Axis = "examples", band: Band = "interval", lowest: float | None = None
) -> list[Curve]:
    """The mean relative loss of each variant.

    Args:
        runs: All runs of the comparison; a variant's runs are observed at the same steps.
        axis: What the curves run over.
        band: ``interval``: the 95 % t-interval of the mean over seeds. ``range``: from the lowest run
            to the highest, as the paper shades.
        lowest: What losses are divided by; None for the lowest of ``runs``.

    Raises:
        DataError: Runs of a variant were observed at different places, or lack the axis.
    """
    scale = lowest_loss(runs) if lowest is None else lowest
    return [
        mean_curve(
            variant,
            x=[observed(run, axis) for run in group],
            values=[np.asarray(run.losses, dtype=float) / scale for run in group],
            band=band,
            shared_x=axis != "seconds",
        )
        for variant, group in by_variant(runs).items()
    ]


def speed_curves(runs: Sequence[VariantRun], *, band: Band = "range") -> list[Curve]:
    """Seconds per example between observations, over the examples seen (figure 5, left).

    Raises:
        DataError: A run lacks examples or seconds, or has fewer than two observations.
    """
    curves = []
    for variant, group in by_variant(runs).items():
        seen, clocks = [observed(run, "examples") for run in group], [observed(run, "seconds") for run in group]
        if any(len(x) < 2 for x in seen):
            raise DataError(f"The variant {variant!r} has one observation; its speed needs two.")
        speeds = [np.diff(clock) / np.diff(x) for clock, x in zip(clocks, seen, strict=True)]
        curves.append(mean_curve(variant, x=[x[1:] for x in seen], values=speeds, band=band))
    return curves


def mean_curve(
    variant: str,
    *,
    x: Sequence[NDArray[np.float64]],
    values: Sequence[NDArray[np.float64]],
    band: Band,
    shared_x: bool = True,
) -> Curve:
    """The mean over runs of ``values``, each of shape (observations,).

    Args:
        variant: Whose it is, for the message.
        x: Where each run was observed.
        values: What was observed.
        band: See `relative_curves`.
        shared_x: Whether all runs must have the same ``x``; otherwise its mean is taken.

    Raises:
        DataError: The runs were not observed at the same places.
    """
    if band not in ("interval", "range"):
        raise ConfigurationError(f"band={band!r} is not one of interval, range.")
    if len({len(places) for places in x}) > 1 or (shared_x and any(not np.array_equal(x[0], p) for p in x)):
        raise DataError(f"The runs of {variant!r} were not observed at the same places; there is no mean of them.")
    stacked = np.stack(values)
    mean = stacked.mean(axis=0)
    low, high = stacked.min(axis=0), stacked.max(axis=0)
    if band == "interval":
        half = _half_width(stacked)
        low, high = mean - half, mean + half
    return Curve(
        variant=variant, x=_plain(np.mean(x, axis=0)), mean=_plain(mean), low=_plain(low), high=_plain(high),
        runs=len(stacked),
    )  # fmt: skip


def _half_width(stacked: NDArray[np.float64]) -> NDArray[np.float64]:
    """Half of the t-interval of the mean over axis 0; zero for one run, of which nothing is known."""
    runs = len(stacked)
    if runs == 1:
        return np.zeros_like(stacked[0])
    deviation: NDArray[np.float64] = stacked.std(axis=0, ddof=1)
    half: NDArray[np.float64] = float(stats.t.ppf((1 + LEVEL) / 2, runs - 1)) * deviation / np.sqrt(runs)
    return half


def observed(run: VariantRun, axis: Axis) -> NDArray[np.float64]:
    """Where ``run`` was observed, shape (observations,).

    Raises:
        DataError: The run does not tell.
    """
    if axis not in ("steps", "examples", "seconds"):
        raise ConfigurationError(f"axis={axis!r} is not one of steps, examples, seconds.")
    places = getattr(run, axis)
    if not len(places):
        raise DataError(f"The run {run.variant!r} of seed {run.seed} does not tell its {axis}.")
    return np.asarray(places, dtype=float)


def smooth(values: ArrayLike, *, window: int = 100, order: int = 3) -> Smoothed:
    """The Savitzky-Golay filter of figure 2: a polynomial through a sliding window of observations.

    A curve shorter than the window gets the largest odd window that fits; one with no window above
    ``order`` is left as it is. An even window, such as the paper's, has no middle observation: its
    curve lies half an observation to one side.

    Args:
        values: The curve, shape (observations,).
        window: Observations in the window; 100 in the paper.
        order: Of the polynomial; 3 in the paper.
    """
    data = np.asarray(values, dtype=float)
    if not 0 <= order < window:
        raise ConfigurationError(f"window={window} must be above order={order}, which is at least 0.")
    fits = window if len(data) >= window else len(data) - 1 + len(data) % 2
    if fits <= order:
        return Smoothed(values=_plain(data), window=None)
    return Smoothed(values=_plain(signal.savgol_filter(data, fits, order)), window=fits)


def _plain(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


_STYLES = (
    ("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#56B4E9", (0, (5, 1))),
    ("#E69F00", (0, (3, 1, 1, 1))), ("#000000", (0, (1, 1))),
)  # fmt: skip
_AXES = {"steps": "steps", "examples": "examples seen", "seconds": "seconds"}
_MOST_NUMBERED = 12  # classes up to which a confusion matrix shows its numbers


def draw_relative_loss(
    runs: Sequence[VariantRun],
    path: Path,
    *,
    axis: Axis = "examples",
    band: Band = "interval",
    title: str = "",
    of: str = "training loss",
) -> str:
    """Figure 1, left: mean relative training loss of each variant, with a band over its runs.

    Args:
        runs: All runs of the comparison.
        path: Of the PNG.
        axis: What the curves run over.
        band: See `relative_curves`.
        title: Above the picture.
        of: What ``losses`` are, where they are no training losses.

    Raises:
        ConfigurationError: matplotlib is not installed.
        DataError: The runs cannot be compared.
        StorageError: The picture cannot be written.
    """
    curves = relative_curves(runs, axis=axis, band=band)
    figure, (panel,) = _figure(1)
    _draw_curves(panel, curves)
    _dress(panel, xlabel=_AXES[axis], ylabel=f"relative {of}", title=title)
    _log_if_wide(panel, [value for curve in curves for value in curve.mean])
    _save(figure, path)
    return f"{_counts(curves)}. Relative {of}: {_RELATIVE} Lines are means over runs; {_BANDS[band]}."


def draw_batch_sizes(runs: Sequence[VariantRun], path: Path, *, variant: str, title: str = "") -> str:
    """Figure 1, right: single runs of one variant with different batch sizes, relative to the lowest loss of ``runs``.

    The run of the lowest seed of each batch size is drawn.

    Raises:
        ConfigurationError: matplotlib is not installed.
        DataError: The variant has no run with a batch size.
        StorageError: The picture cannot be written.
    """
    found: dict[int, VariantRun] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        if run.variant == variant and run.batch_size is not None:
            found.setdefault(run.batch_size, run)
    if not found:
        raise DataError(f"No run of {variant!r} tells its batch size.")
    lowest = lowest_loss(runs)
    figure, (panel,) = _figure(1)
    for number, ((size, run), (colour, _)) in enumerate(
        zip(sorted(found.items()), itertools.cycle(_STYLES), strict=False)
    ):
        # Small batches are noisy, where dashes would not show: widths tell the lines apart, thin behind thick.
        wide = 0.6 + 1.6 * number / max(1, len(found) - 1)
        colour = _STYLES[number % len(_STYLES)][0]
        values = np.asarray(run.losses) / lowest
        panel.plot(observed(run, "examples"), values, color=colour, linewidth=wide, label=f"n = {size:,}")
    _dress(panel, xlabel=_AXES["examples"], ylabel="relative training loss", title=title or variant)
    _save(figure, path)
    return f"Single runs of {variant} with batches of n examples. Relative training loss: {_RELATIVE}"


def draw_smoothed_loss(
    runs: Sequence[VariantRun], path: Path, *, axis: Axis = "steps", window: int = 100, order: int = 3, title: str = ""
) -> str:
    """Figure 2: relative loss of a single run of each variant, light as observed and dark as smoothed.

    The run of the lowest seed of each variant is drawn.

    Raises:
        ConfigurationError: matplotlib is not installed, or the window does not exceed the order.
        DataError: The runs cannot be compared.
        StorageError: The picture cannot be written.
    """
    single = [min(group, key=lambda run: run.seed) for group in by_variant(runs).values()]
    lowest = lowest_loss(single)
    figure, (panel,) = _figure(1)
    windows: dict[str, int | None] = {}
    for run, (colour, dashes) in zip(single, itertools.cycle(_STYLES), strict=False):
        x, values = observed(run, axis), np.asarray(run.losses) / lowest
        smoothed = smooth(values, window=window, order=order)
        windows[run.variant] = smoothed.window
        panel.plot(x, values, color=colour, alpha=0.28, linewidth=0.9)
        panel.plot(x, smoothed.values, color=colour, linestyle=dashes, linewidth=1.8, label=run.variant)
    _dress(panel, xlabel=_AXES[axis], ylabel="relative training loss", title=title)
    _save(figure, path)
    return (
        f"A single run of each variant. Relative training loss: {_RELATIVE} Light lines are the observed values; dark "
        f"lines are smoothed by a Savitzky-Golay filter of order {order}, {_told(windows)}."
    )


def draw_confusions(runs: Sequence[VariantRun], path: Path, *, names: Sequence[str] = (), title: str = "") -> str:
    """Figures 3 and 4: the confusion matrix of each variant, averaged over its runs and rounded down.

    Args:
        runs: Those without a confusion matrix are passed over.
        path: Of the PNG.
        names: Names of the classes; numbers where there are none.
        title: Above the picture.

    Raises:
        ConfigurationError: matplotlib is not installed.
        DataError: No run has a confusion matrix, or they differ in size.
        StorageError: The picture cannot be written.
    """
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
    return (
        "Confusion matrices at the last evaluation, averaged over "
        + ", ".join(
            f"{sum(run.confusion is not None for run in group)} of {variant}"
            for variant, group in by_variant(runs).items()
            if variant in means
        )
        + " runs and rounded down. All panels share one scale."
    )


def draw_runtime(runs: Sequence[VariantRun], path: Path, *, title: str = "") -> str:
    """Figure 5: seconds per example over examples seen (left), mean relative loss over mean runtime (right).

    Raises:
        ConfigurationError: matplotlib is not installed.
        DataError: A run lacks examples or seconds, or the runs cannot be compared.
        StorageError: The picture cannot be written.
    """
    speeds, losses = speed_curves(runs, band="range"), relative_curves(runs, axis="seconds", band="range")
    figure, (left, right) = _figure(2, width=5.6)
    _draw_curves(left, speeds, scale=1000)
    _dress(left, xlabel=_AXES["examples"], ylabel="milliseconds per example")
    _log_if_wide(left, [value for curve in speeds for value in curve.mean])
    _draw_curves(right, losses, bands=False)
    _dress(right, xlabel="seconds since the start, mean over runs", ylabel="relative training loss")
    _log_if_wide(right, [value for curve in losses for value in curve.mean])
    if title:
        figure.suptitle(title, fontsize=12)
    _save(figure, path)
    return (
        f"{_counts(losses)}. Left: milliseconds per example between observations; {_BANDS['range']}. Right: mean "
        f"relative training loss over mean runtime; {_RELATIVE}"
    )


def mean_confusions(runs: Sequence[VariantRun]) -> dict[str, np.ndarray]:
    """The confusion matrix of each variant, averaged over its runs and rounded down (figures 3 and 4).

    Raises:
        DataError: No run has one, or they differ in size.
    """
    groups = {v: [run.confusion for run in group if run.confusion is not None] for v, group in by_variant(runs).items()}
    groups = {variant: group for variant, group in groups.items() if group}
    sizes = {len(matrix) for group in groups.values() for matrix in group}
    if len(sizes) != 1:
        raise DataError(f"There is no mean of confusion matrices of {sorted(sizes) or 'no'} classes.")
    return {variant: np.floor(np.mean(np.asarray(group, dtype=float), axis=0)) for variant, group in groups.items()}


_RELATIVE = "the observed loss divided by the lowest loss of all runs shown."
_BANDS = {
    "interval": "bands are 95 % t-intervals of that mean",
    "range": "bands reach from the lowest run to the highest",
}


def _counts(curves: Sequence[Curve]) -> str:
    return ", ".join(f"{curve.variant}: {curve.runs} {'run' if curve.runs == 1 else 'runs'}" for curve in curves)


def _told(windows: dict[str, int | None]) -> str:
    """Which window each variant got, in one phrase where all got the same."""
    phrases = {
        variant: "with too few observations to smooth" if size is None else f"window {size}"
        for variant, size in windows.items()
    }
    if len(set(phrases.values())) == 1:
        return next(iter(phrases.values()))
    return "; ".join(f"{variant}: {phrase}" for variant, phrase in phrases.items())


def _figure(
    panels: int, *, width: float = 6.4, height: float = 4.2, layout: str = "constrained"
) -> tuple[Any, list[Any]]:
    """A figure with panels side by side."""
    figure = new_figure(width * panels, height, layout=layout)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _draw_curves(panel: Any, curves: Sequence[Curve], *, bands: bool = True, scale: float = 1) -> None:
    for curve, (colour, dashes) in zip(curves, itertools.cycle(_STYLES), strict=False):
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


def _log_if_wide(panel: Any, values: Sequence[float]) -> None:
    """A logarithmic scale where the values span more than a factor of 20."""
    if min(values) > 0 and max(values) / min(values) > 20:
        panel.set_yscale("log")


def _short(value: float, _position: int | None = None) -> str:
    """A tick such as 250k or 1.5M."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}" if math.isfinite(value) else ""


def _save(figure: Any, path: Path) -> None:
    save_png(figure, path, owner_only=False, dpi=130, bbox_inches="tight", pad_inches=0.1)
