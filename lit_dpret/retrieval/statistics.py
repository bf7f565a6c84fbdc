"""Uncertainty of means over queries or training runs, and tests of differences between systems.

**Over queries**, one test collection is resampled by our own seeded code: SciPy's permutation test draws differently,
which would change every p-value reported so far. **Over training runs** (`seed_interval`, `seed_test`), Student's t
is valid for few runs; tests are unpaired (Welch, 1947), and a system that is not trained is one exact number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_dpret.errors import ConfigurationError, DataError

_CHUNK = 2**22  # drawn numbers held at a time


@dataclass(frozen=True)
class Interval:
    """A mean and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class PairedTest:
    """The mean difference of ``a`` and ``b`` over queries, and its p-value."""

    difference: float
    p_value: float


@dataclass(frozen=True)
class SeedTest:
    """The difference of the means over runs of ``a`` and ``b``, its t-interval, and the two-sided p-value."""

    difference: float
    low: float
    high: float
    p_value: float


def bootstrap_interval(values: ArrayLike, *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return the percentile bootstrap interval of the mean over queries (Efron, 1979); all NaN without values.

    Queries are drawn with replacement, as many as there are; the bounds are quantiles of the resampled means.
    """
    if not np.size(values):
        return Interval(math.nan, math.nan, math.nan)
    return macro_interval([values], level=level, resamples=resamples, seed=seed)


def macro_interval(
    groups: Sequence[ArrayLike],
    weights: Sequence[float] | None = None,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return the percentile bootstrap interval of the mean over groups of the groups' own means.

    Each group has equal weight, whatever its size, unless ``weights`` are given. Queries are drawn separately in each
    group. BEIR reports CQADupStack this way, as the mean of twelve forums. So does the last row of a table of several
    data sets.
    """
    _check_level(level)
    data = [_vector("a group", values) for values in groups]
    if not data or not all(len(values) for values in data):
        raise DataError("A mean over groups needs at least one group, and a query in each.")
    share = _vector("weights", [1.0] * len(data) if weights is None else weights)
    if len(share) != len(data) or not (share > 0).all():
        raise DataError(f"{len(data)} groups need as many positive weights, not {weights}.")
    share = share / share.sum()
    means = np.zeros(max(resamples, 0))
    for number, values in enumerate(data):
        done = 0
        for rng, draws in _chunks(resamples, len(values), seed + number):
            drawn = values[rng.integers(0, len(values), (draws, len(values)))]
            means[done : done + draws] += share[number] * drawn.mean(axis=1)
            done += draws
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(share @ [values.mean() for values in data]), float(low), float(high))


def paired_randomisation_test(a: ArrayLike, b: ArrayLike, *, resamples: int = 10_000, seed: int = 0) -> PairedTest:
    """Run Fisher's randomisation test, two-sided, on the difference of two systems' means over the same queries.

    If the systems were alike, each query's two values could just as well have been swapped. The p-value is the share
    of random swaps with a difference at least as large, counting the observed one (Smucker et al., CIKM 2007).
    """
    first, second = _vector("a", a), _vector("b", b)
    if len(first) != len(second) or not len(first):
        raise DataError(f"A paired test needs the same queries twice; got {len(first)} and {len(second)} values.")
    difference = first - second
    observed = abs(float(difference.mean()))
    threshold = observed - 1e-12 * max(1.0, float(np.abs(difference).max()))
    reached = 0
    for rng, draws in _chunks(resamples, len(difference), seed):
        signs = rng.integers(0, 2, (draws, len(difference)), dtype=np.int8) * 2 - 1
        reached += int((np.abs(signs @ difference) / len(difference) >= threshold).sum())
    return PairedTest(float(difference.mean()), (reached + 1) / (resamples + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for multiple tests (Holm, 1979).

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def seed_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Return the mean over training runs with its t-interval; the bounds are NaN for a single run.

    Example:
        >>> seed_interval([0.50, 0.52, 0.54])
        Interval(mean=0.52, low=0.4703..., high=0.5696...)
    """
    from scipy import stats  # takes a second, which most importers of this module need not spend

    _check_level(level)
    runs = _vector("values", values, least=1, per="run")
    mean = float(runs.mean())
    if len(runs) == 1:
        return Interval(mean, math.nan, math.nan)
    reach = float(stats.t.ppf((1 + level) / 2, len(runs) - 1)) * math.sqrt(float(runs.var(ddof=1)) / len(runs))
    return Interval(mean, mean - reach, mean + reach)


def seed_test(a: Sequence[float], b: Sequence[float]) -> SeedTest:
    """Run Welch's t-test between the runs of two settings; a one-sample test if one side is a single number.

    Guarantees:
        - Swapping ``a`` and ``b`` flips the sign of the difference and keeps the p-value.
        - If the runs do not vary at all, the p-value is 1 where they agree and 0 otherwise.
    """
    from scipy import stats

    first, second = (_vector(name, runs, least=1, per="run") for name, runs in (("a", a), ("b", b)))
    if len(first) == len(second) == 1:
        raise DataError("Two single numbers cannot be compared over training runs: give at least two runs of one side.")
    difference = float(first.mean() - second.mean())
    if not np.ptp(first) and not np.ptp(second):
        return SeedTest(difference, difference, difference, 1.0 if difference == 0.0 else 0.0)
    if len(first) == 1 or len(second) == 1:  # the differences are one sample, whose mean is tested against 0
        found = stats.ttest_1samp(first - second, 0.0)
    else:
        found = stats.ttest_ind(first, second, equal_var=False)
    bounds = found.confidence_interval(0.95)
    return SeedTest(difference, float(bounds.low), float(bounds.high), float(found.pvalue))


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ConfigurationError(f"level={level} must be above 0 and below 1.")


def _vector(name: str, values: ArrayLike, *, least: int = 0, per: str = "query") -> NDArray[np.float64]:
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or len(data) < least or not np.isfinite(data).all():
        raise DataError(
            f"{name} must have one finite number per {per}; got the shape {data.shape}, or a NaN or infinity."
        )
    return data


def _chunks(resamples: int, length: int, seed: int) -> list[tuple[np.random.Generator, int]]:
    """Return the draws, all from one stream, in parts that fit into memory."""
    if resamples < 1:
        raise ConfigurationError(f"resamples={resamples} must be at least 1.")
    rng = np.random.default_rng(seed)
    size = max(1, _CHUNK // length)
    return [(rng, min(size, resamples - start)) for start in range(0, resamples, size)]
