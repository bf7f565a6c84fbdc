"""Systems trained several times each, and which of them really differ.

A difference is called significant here only where the training runs carry it: a system that is better on
these queries by the luck of its noise is not better. Whether the choice of queries carries it as well
stands beside. All comparisons of one budget and one metric are one family (Holm, 1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from lit_dpret.errors import DataError
from lit_dpret.retrieval.statistics import (
    Interval,
    bootstrap_interval,
    holm,
    paired_randomisation_test,
    seed_interval,
    seed_test,
)


@dataclass(frozen=True, kw_only=True)
class ModeRow:
    """One system: what its runs reached, what it promises, and how it was trained.

    Args:
        name: Of the system.
        per_run: Metric to its mean over queries for each training run; one number where nothing is trained.
        per_query: Metric to one value per query, averaged over the runs.
        budget: The epsilon at which it is compared; None for a system that stands beside every budget.
        variant: What it has in common with the same system at another budget.
        privacy: What one of its runs promises, in a line.
        settings: How it was trained, for the table of settings; empty where nothing was.
    """

    name: str
    per_run: Mapping[str, Sequence[float]]
    per_query: Mapping[str, Sequence[float]]
    budget: float | None = None
    variant: str = ""
    privacy: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        return min(len(values) for values in self.per_run.values())

    def over_runs(self, metric: str) -> Interval:
        """Mean and t-interval over training runs; without bounds where there is one number only."""
        return seed_interval(self.per_run[metric])

    def over_queries(self, metric: str) -> Interval:
        """The same mean with the bootstrap interval over queries, the training runs taken as they are."""
        return bootstrap_interval(self.per_query[metric])


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far ``first`` is above ``second``.

    Args:
        first, second: Names of the systems; ``first`` has the higher mean.
        metric: Of the values.
        budget: The family; None for the same mode at two budgets, or where there are no budgets.
        difference: Of the means.
        low, high: The 95 % interval of the difference over training runs, for this one comparison.
        p_runs: Over training runs, adjusted for the family.
        p_queries: Over queries, adjusted for the family.
    """

    first: str
    second: str
    metric: str
    budget: float | None
    difference: float
    low: float
    high: float
    p_runs: float
    p_queries: float

    def is_significant(self, level: float = 0.05) -> bool:
        """Whether the training runs carry the difference."""
        return self.p_runs < level

    def holds_over_queries(self, level: float = 0.05) -> bool:
        """Whether the choice of queries carries it."""
        return self.p_queries < level


def differences(rows: Sequence[ModeRow], metric: str, references: Sequence[str] = ()) -> list[Difference]:
    """Every two systems of one budget, and every mode at its budgets; each set one family.

    Where no system has a budget, every two of them are compared, as one family.

    Guarantees:
        - Two systems that were not trained are not compared: there are no runs to judge by.
        - The p-values of a family are adjusted together.

    Args:
        rows: The systems; those without a budget take part in every family.
        metric: Which of their metrics.
        references: Names of the systems of which at least one takes part in every comparison of a budget; the
            fewer comparisons, the less the adjustment for them costs. Without any, every two systems are compared.

    Raises:
        DataError: Rows were judged on different queries.
    """
    if len({len(row.per_query[metric]) for row in rows}) > 1:
        raise DataError("Systems that were judged on different queries cannot be compared.")
    found: list[Difference] = []
    if all(row.budget is None for row in rows):
        return _family(list(combinations(rows, 2)), metric, None)
    budgets = sorted({row.budget for row in rows if row.budget is not None})
    for budget in budgets:
        of_budget = [row for row in rows if row.budget in (None, budget)]
        pairs = list(combinations(of_budget, 2))
        asked = [pair for pair in pairs if not references or {row.name for row in pair} & set(references)]
        found += _family(asked, metric, budget)
    same = [(a, b) for a, b in combinations(rows, 2) if a.variant and a.variant == b.variant and a.budget != b.budget]
    return found + _family(same, metric, None)


def _family(pairs: Sequence[tuple[ModeRow, ModeRow]], metric: str, budget: float | None) -> list[Difference]:
    ordered = [
        pair if _mean(pair[0], metric) >= _mean(pair[1], metric) else (pair[1], pair[0])
        for pair in pairs
        if max(pair[0].runs, pair[1].runs) > 1
    ]
    tests = [seed_test(a.per_run[metric], b.per_run[metric]) for a, b in ordered]
    over_queries = [paired_randomisation_test(a.per_query[metric], b.per_query[metric]) for a, b in ordered]
    adjusted = zip(holm([t.p_value for t in tests]), holm([t.p_value for t in over_queries]), strict=True)
    return [
        Difference(
            first=a.name, second=b.name, metric=metric, budget=budget, difference=test.difference,
            low=test.low, high=test.high, p_runs=p_runs, p_queries=p_queries,
        )
        for (a, b), test, (p_runs, p_queries) in zip(ordered, tests, adjusted, strict=True)
    ]  # fmt: skip


def _mean(row: ModeRow, metric: str) -> float:
    return float(np.mean(row.per_run[metric]))
