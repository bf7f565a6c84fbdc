"""Compare two systems on the same queries: their difference, and its significance.

The interval is for the mean *difference* (queries are drawn in pairs). The p-value is that of a paired randomisation
test; it is also reported with Holm's adjustment for all cells of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lit_dpret.errors import DataError
from lit_dpret.retrieval.metrics import Metric, Values
from lit_dpret.retrieval.statistics import Interval, bootstrap_interval, holm, paired_randomisation_test


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two systems in one metric on one data set."""

    data: str
    metric: str
    a: float
    b: float
    difference: Interval  # mean of ``a - b`` over queries, with its bootstrap interval
    p_value: float  # two-sided, of the paired randomisation test
    p_holm: float  # the same, adjusted for all cells of the comparison
    queries: int
    better: int
    worse: int  # number of queries on which it was worse; on the others they tie


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two systems over a grid of data sets and metrics."""

    a: str
    b: str
    cells: tuple[Difference, ...]  # data sets in order, each with all metrics
    level: float = 0.95  # the confidence of the intervals; 1 - level is the threshold of `significant`
    resamples: int = 10_000  # random swaps of each test

    def significant(self, cell: Difference) -> bool:
        """Return whether this cell is significant, corrected for the whole grid."""
        return cell.p_holm <= 1 - self.level

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without values of single queries."""
        return {
            "a": self.a,
            "b": self.b,
            "level": self.level,
            "resamples": self.resamples,
            "correction": f"Holm over {len(self.cells)} tests",
            "definitions": {name: Metric.parse(name).definition for name in {c.metric: None for c in self.cells}},
            "cells": [{**asdict(cell), "significant": self.significant(cell)} for cell in self.cells],
        }


def compare_values(
    a: Mapping[str, Mapping[str, Values]],
    b: Mapping[str, Mapping[str, Values]],
    *,
    names: tuple[str, str] = ("a", "b"),
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compare values of the same queries in the same order.

    Each maps data set and metric to one value per query, for the system of that name. ``resamples`` is random swaps per
    test; the smallest possible p-value is 1 / (resamples + 1).
    """
    if a.keys() != b.keys() or any(a[data].keys() != b[data].keys() for data in a):
        raise DataError(f"{names[0]} and {names[1]} were not measured on the same data sets by the same metrics.")
    if not any(a.values()):
        raise DataError(f"There are no values by which to compare {names[0]} with {names[1]}.")
    cells: list[Difference] = []
    for data, values in a.items():
        for metric, first in values.items():
            second = b[data][metric]
            test = paired_randomisation_test(first, second, resamples=resamples, seed=seed)
            interval = bootstrap_interval(first - second, level=level, seed=seed)
            cells.append(
                Difference(
                    data=data, metric=metric, a=float(first.mean()), b=float(second.mean()), difference=interval,
                    p_value=test.p_value, p_holm=test.p_value, queries=len(first),
                    better=int((first > second).sum()), worse=int((first < second).sum()),
                )
            )  # fmt: skip
    adjusted = holm([cell.p_value for cell in cells])
    corrected = tuple(replace(cell, p_holm=p) for cell, p in zip(cells, adjusted, strict=True))
    return Comparison(a=names[0], b=names[1], cells=corrected, level=level, resamples=resamples)
