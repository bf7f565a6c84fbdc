"""Loss curves of several variants on one scale, in the form of paper 002's figures 1, 2 and 5.

*Relative loss* is the observed loss divided by the lowest loss of all runs and variants in the
comparison (caption of figure 1): the best moment of the best run stands at 1. It hides the scale of
the loss and keeps ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import signal, stats

from lit_dpret.errors import ConfigurationError, DataError
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
