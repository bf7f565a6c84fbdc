"""How sure a result is over training runs, and whether two ways of training really differ.

Under privacy noise two runs of one setting end in different models. What speaks for the *setting* is
the mean over runs, and its uncertainty comes from the runs: here Student's t, which holds for few runs
where their results are about normal. It does not cover the choice of test queries; for that there is
`lit_dpret.retrieval.statistics`, and a claim should stand in both.

Noise and coins of a run come from its own secret stream, so that runs of two settings share no randomness
that pairing could take out. Tests are therefore unpaired (Welch, 1947), and a system that is not trained
is one exact number (a one-sample test).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.statistics import Interval


@dataclass(frozen=True)
class SeedTest:
    """How far the mean over runs of ``a`` is above that of ``b``, its t-interval, and the two-sided p-value."""

    difference: float
    low: float
    high: float
    p_value: float


def seed_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """The mean over training runs with its t-interval.

    Example:
        >>> seed_interval([0.50, 0.52, 0.54])
        Interval(mean=0.52, low=0.4703..., high=0.5696...)

    Args:
        values: One result per run.
        level: The confidence.

    Returns:
        The bounds are NaN for a single run, whose uncertainty is unknown.

    Raises:
        ConfigurationError: level is out of range.
        DataError: There is no value, or one is not finite.
    """
    runs = _runs("values", values)
    return _around(float(runs.mean()), _variance_of_mean(runs), len(runs) - 1, _checked(level))


def seed_test(a: Sequence[float], b: Sequence[float], *, level: float = 0.95) -> SeedTest:
    """Welch's t-test between the runs of two settings; a one-sample test where one side is a single number.

    Guarantees:
        - Swapping ``a`` and ``b`` turns the sign of the difference and leaves the p-value.
        - Runs that do not vary at all give a p-value of 1 where they agree, else of 0.

    Args:
        a: One result per run; a single number is taken for exact, as of a system without training.
        b: The same of the other setting.
        level: Confidence of the interval of the difference.

    Raises:
        ConfigurationError: level is out of range.
        DataError: Both sides are single numbers, or a value is not finite.
    """
    first, second = _runs("a", a), _runs("b", b)
    if len(first) == len(second) == 1:
        raise DataError("Two single numbers cannot be compared over training runs: give at least two runs of one side.")
    parts = [(_variance_of_mean(runs), len(runs) - 1) for runs in (first, second) if len(runs) > 1]
    difference, variance = float(first.mean() - second.mean()), sum(part for part, _ in parts)
    if variance == 0.0:
        _checked(level)
        return SeedTest(difference, difference, difference, 1.0 if difference == 0.0 else 0.0)
    freedom = variance**2 / sum(part**2 / runs for part, runs in parts)  # Welch and Satterthwaite
    p_value = 2.0 * float(stats.t.sf(abs(difference) / math.sqrt(variance), freedom))
    interval = _around(difference, variance, freedom, _checked(level))
    return SeedTest(difference, interval.low, interval.high, p_value)


def _around(mean: float, variance: float, freedom: float, level: float) -> Interval:
    if freedom < 1 and math.isnan(variance):
        return Interval(mean, math.nan, math.nan)
    reach = float(stats.t.ppf((1.0 + level) / 2.0, freedom)) * math.sqrt(variance)
    return Interval(mean, mean - reach, mean + reach)


def _variance_of_mean(runs: NDArray[np.float64]) -> float:
    return math.nan if len(runs) == 1 else float(runs.var(ddof=1)) / len(runs)


def _checked(level: float) -> float:
    if not 0 < level < 1:
        raise ConfigurationError(f"level={level} must lie strictly between 0 and 1.")
    return level


def _runs(name: str, values: Sequence[float]) -> NDArray[np.float64]:
    runs = np.asarray(values, dtype=np.float64)
    if runs.ndim != 1 or not len(runs) or not np.isfinite(runs).all():
        raise DataError(f"{name} must be at least one finite number, one per training run; got {list(values)}.")
    return runs
