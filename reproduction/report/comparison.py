"""Systems trained several times each, which of them really differ, and the report about it.

A difference is called significant only if it holds across training runs: a system that is better on these queries by
the luck of its noise is not better. Whether it also holds across queries is shown next to it. All comparisons of one
budget and one metric are one family (Holm, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from scipy import stats

from lit_dpret.cards.blocks import Banner, Block, Bullets, Code, Grid, Paragraph, Section
from lit_dpret.errors import DataError
from lit_dpret.report.chart import bar_chart
from lit_dpret.report.page import Drawing, Page, Sheet
from lit_dpret.report.table import RowResult, Table, console_table, ends, grid_of, settings_grid, show
from lit_dpret.retrieval.statistics import (
    Interval,
    bootstrap_interval,
    holm,
    paired_randomisation_test,
    seed_interval,
    seed_test,
)
from lit_dpret.settings import picked
from lit_dpret.tasks.parts import say
from reproduction.published import MAIN, ORIGINAL, by_point

_SCHEMA = "lit-dpret/mode-comparison/1"
LEVEL = 0.05
_HOW_SURE = (
    "Means over training runs, each with its own noise and coins, and 95 % intervals: of the t-distribution over "
    "training runs, and of the bootstrap over queries. The first reflects chance in training, the second the choice of "
    "queries; neither covers the other. Claims are those of the runs' privacy cards."
)
_HOW_TESTED = (
    "Significant means that the training runs support the difference at 0.05: Welch's t-test over runs (one-sample "
    "where a system is not trained), adjusted by Holm for all comparisons of its budget and metric. Runs are not "
    "paired: they share no noise and no coins. The randomisation test over queries is next to it, adjusted in the same "
    "way. The interval is for that difference alone, over training runs, and not adjusted."
)


@dataclass(frozen=True, kw_only=True)
class ModeRow:
    """One system: the scores of its runs, what it promises, and how it was trained."""

    name: str  # of the system
    # By metric, the mean over queries for each training run; one number if nothing is trained.
    per_run: Mapping[str, Sequence[float]]
    per_query: Mapping[str, Sequence[float]]  # by metric, one value per query, averaged over the runs
    # The epsilon at which it is compared; None for a system that is compared at every budget.
    budget: float | None = None
    variant: str = ""  # shared with the same system at other budgets
    privacy: str = ""  # what one of its runs promises, in one line
    # How it was trained, for the table of settings; empty if nothing was trained.
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        return min(len(values) for values in self.per_run.values())

    def over_runs(self, metric: str) -> Interval:
        return seed_interval(self.per_run[metric])

    def over_queries(self, metric: str) -> Interval:
        return bootstrap_interval(self.per_query[metric])


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between two systems: how far ``first`` is above ``second``."""

    first: str
    second: str
    metric: str
    budget: float | None  # the family; None for the same mode at two budgets, or if there are no budgets
    difference: float  # of the means, with its 95 % interval over training runs, for this comparison alone
    low: float
    high: float
    p_runs: float  # over training runs, adjusted for the family
    p_queries: float  # over queries, adjusted for the family

    def is_significant(self) -> bool:
        return self.p_runs < LEVEL

    def holds_over_queries(self) -> bool:
        return self.p_queries < LEVEL


def differences(rows: Sequence[ModeRow], metric: str, references: Sequence[str] = ()) -> list[Difference]:
    """Compare all pairs of systems at each budget, and each mode across budgets; each of these sets is one family.

    If no system has a budget, all pairs are compared, as one family.

    Guarantees:
        - Two systems that were not trained are not compared: there are no runs to judge by.
        - The p-values of a family are adjusted together.

    Args:
        rows: The systems; those without a budget take part in every family.
        metric: The metric to compare.
        references: Every comparison at a budget includes one of these: with fewer comparisons, the adjustment costs
            less. Without references, all pairs are compared.
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


class Headings(NamedTuple):
    """The names of a comparison: of its files, its page, and its rows on the console."""

    name: str
    title: str
    rows: str


COMPARE_MODES = Headings(name="compare_modes", title="One retriever under every privacy mode", rows="Privacy modes")


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """A comparison as a page, a table and data.

    Only the owner can read its files: they contain measures of private queries, which no budget covers.
    """

    rows: Sequence[ModeRow]
    headings: Headings = COMPARE_MODES
    metrics: Sequence[str]
    evaluated_on: str
    command: str
    notes: Sequence[str] = ()
    private_runs: int = 0
    spent: str = ""
    more: Sequence[Section] = ()
    references: Sequence[str] = ()

    def write(self, folder: Path) -> dict[str, Path]:
        """Write ``NAME.{html,md,json,csv}``, with the name from the headings, and ``differences.csv``."""
        found = {metric: differences(self.rows, metric, self.references) for metric in self.metrics}
        told = [
            asdict(each) | {"significant": each.is_significant(), "holds_over_queries": each.holds_over_queries()}
            for of_metric in found.values()
            for each in of_metric
        ]
        same = ("evaluated_on", "command", "notes", "private_runs", "spent", "references")
        facts = {"schema": _SCHEMA, **picked(self, *same), "differences": told}
        facts["rows"] = [_row_facts(row, self.metrics) for row in self.rows]
        name = self.headings.name
        tables: dict[str, Sheet] = {f"{name}.csv": _sheet(self.rows, self.metrics), "differences.csv": grid_of(told)}
        return Page(
            name=name, title=self.headings.title, lead=self._lead(), sections=self._sections(found), facts=facts,
            tables=tables,
        ).write(folder)  # fmt: skip

    def print(self) -> None:
        """Print the table, the significant differences and the notes."""
        shown = [RowResult(row.name, {m: row.over_runs(m) for m in self.metrics}, row.privacy) for row in self.rows]
        Console().print(console_table(shown, title=f"{self.headings.rows}; intervals over training runs"))
        first = self.metrics[0]
        lines = [
            f"{each.first} above {each.second}: {first} +{each.difference:.4f}, p over runs {p_value(each.p_runs)}"
            for each in differences(self.rows, first, self.references)
            if each.is_significant()
        ]
        say(*lines, *self.notes)

    def _lead(self) -> list[Block]:
        if not self.private_runs and not self.spent:
            return []
        together = self.spent or (
            f"{self.private_runs} trainings on the same private queries are behind this page. The epsilon of a row is "
            "that of one of its runs; all of them together have spent more, which was not added up."
        )
        for_what = "Use such a comparison for queries that may be read, not for queries to protect."
        return [Banner(f"{together} {for_what}", "caution")]

    def _sections(self, found: Mapping[str, Sequence[Difference]]) -> list[Section]:
        only = f" Only differences from {', '.join(self.references)} are tested." if self.references else ""
        first, budgeted = self.metrics[0], any(row.budget is not None for row in self.rows)
        drawn = [RowResult(system=row.name, metrics={first: row.over_runs(first)}) for row in self.rows]
        verdicts = [Paragraph(_HOW_TESTED + only), *_verdicts(found, budgeted=budgeted)]
        return [
            Section("Results", [Paragraph(f"Computed on {self.evaluated_on}."), *_results(self.rows, self.metrics)]),
            Section(f"{first}, with the interval over training runs", [Drawing(bar_chart(drawn))]),
            *self.more,
            Section("Which differences are significant", verdicts),
            Section("How each row was trained", [_settings(self.rows)]),
            *([Section("Notes", [Bullets(self.notes)])] if self.notes else []),
            Section("How to get this again", [Code(self.command)]),
        ]


def _results(rows: Sequence[ModeRow], metrics: Sequence[str]) -> list[Block]:
    claims, shared = _claims(rows)
    table = _measured(rows, metrics, {"Claim of one run": claims})
    return [Paragraph(f"{_HOW_SURE}{shared}"), table]


def _measured(rows: Sequence[ModeRow], metrics: Sequence[str], more: Mapping[str, Sequence[object]]) -> Table:
    """Return each metric with its interval over training runs and its interval over queries, and further columns."""
    measured = [f"{metric} over {what}" for metric in metrics for what in ("runs", "queries")]
    lines = [
        [row.name, *(cell for metric in metrics for cell in (row.over_runs(metric), row.over_queries(metric))), *rest]
        for row, *rest in zip(rows, *more.values(), strict=True)
    ]
    return Table(["System", *measured, *more], lines, measured=frozenset(range(1, 1 + len(measured))))


def _claims(rows: Sequence[ModeRow]) -> tuple[list[str], str]:
    """Return the claims for a narrow column, and a sentence with the part that all epsilons share, if any."""
    shared = {row.privacy.partition(", ")[2] for row in rows if row.privacy.startswith("epsilon = ")}
    if len(shared) != 1:
        return [row.privacy for row in rows], ""
    (end,) = shared
    return [row.privacy.removesuffix(f", {end}") for row in rows], f" Every epsilon is at {end}."


def _verdicts(found: Mapping[str, Sequence[Difference]], *, budgeted: bool) -> list[Block]:
    blocks: list[Block] = []
    unbudgeted = "the same mode at two budgets" if budgeted else "all rows"
    header = ("Better", "Worse", "Difference", "p over runs", "Significant", "p over queries")
    for metric, of_metric in found.items():
        for budget in dict.fromkeys(each.budget for each in of_metric):
            family = [each for each in of_metric if each.budget == budget]
            carried = sum(each.is_significant() for each in family)
            where = unbudgeted if budget is None else f"epsilon {budget:g}"
            blocks.append(Paragraph(f"{metric}, {where}: {carried} of {len(family)} differences are significant."))
            body = [
                (each.first, each.second, show(Interval(each.difference, each.low, each.high)), p_value(each.p_runs),
                 "yes" if each.is_significant() else "no", p_value(each.p_queries))
                for each in family
            ]  # fmt: skip
            blocks.append(Grid(header, body, frozenset({2, 3, 5})))
    return blocks


def _settings(rows: Sequence[ModeRow]) -> Grid:
    return settings_grid(["System", "runs"], [([row.name, row.runs], row.settings) for row in rows if row.settings])


def _row_facts(row: ModeRow, metrics: Sequence[str]) -> dict[str, Any]:
    measured = {
        metric: {
            "per_run": list(row.per_run[metric]), "over_runs": ends(row.over_runs(metric)),
            "over_queries": ends(row.over_queries(metric)),
        }
        for metric in metrics
    }  # fmt: skip
    facts = picked(row, "budget", "privacy") | {"settings": dict(row.settings)}
    return {"system": row.name, **facts, "metrics": measured}


def _sheet(rows: Sequence[ModeRow], metrics: Sequence[str]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.settings))
    more: dict[str, Sequence[object]] = {
        "runs": [row.runs if row.settings else None for row in rows],
        "privacy": [row.privacy for row in rows],
    }
    return _measured(rows, metrics, more | {name: [row.settings.get(name) for row in rows] for name in names})


def p_value(value: float) -> str:
    """Format a p-value for printing; never 0, which no test can show."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


# -- shares of the gain
#
# The share of the score that private training keeps, which the papers state, is large even for a system that learned
# nothing, since the untrained encoder already scores. The share of the *gain* starts there: 0 is the untrained encoder,
# 1 the same training without privacy.


# nDCG@10 of the paper's retrievers: from synthetic queries at epsilon = 3, and from the original ones without privacy.
PAPER: tuple[float, float] = tuple(by_point("table_3")[row][0] for row in ((MAIN, 3.0), (ORIGINAL, None)))


@dataclass(frozen=True)
class Share:
    """The share that a system keeps of a bound, a system without privacy."""

    system: str
    bound: str
    of_gain: Interval  # (system - start) / (bound - start), with the interval over training runs of both
    of_score: float  # system / bound


def share_of_gain(system: Sequence[float], bound: Sequence[float], start: float) -> Interval:
    """Return (mean of system - start) / (mean of bound - start), with a 95 % interval over runs (delta method).

    ``start`` is taken as exact: it is the score of a system that is not trained. The interval does not cover the
    choice of test queries.

    Example:
        >>> share_of_gain([0.44, 0.45, 0.46], [0.49, 0.50, 0.51], 0.40)
        Interval(mean=0.5..., low=0.2..., high=0.7...)

    Returns:
        The share with its bounds, which are NaN if either side has a single run.
    """
    above, most = np.asarray(system, float) - start, np.asarray(bound, float) - start
    if not most.mean() > 0:
        raise DataError(f"The bound gains {most.mean():.4f} over the start: there is nothing to take a share of.")
    share = float(above.mean() / most.mean())
    if min(len(above), len(most)) < 2:
        return Interval(share, math.nan, math.nan)
    parts = [
        (weight**2 * float(runs.var(ddof=1)) / len(runs), len(runs) - 1)
        for weight, runs in ((1.0, above), (share, most))
    ]
    variance = sum(part for part, _ in parts)
    if variance == 0.0:
        return Interval(share, share, share)
    freedom = variance**2 / sum(part**2 / runs for part, runs in parts)  # Welch and Satterthwaite
    reach = float(stats.t.ppf((1 + 0.95) / 2, freedom)) * math.sqrt(variance) / float(most.mean())
    return Interval(share, share - reach, share + reach)


def gain_shares(rows: Sequence[ModeRow], bounds: Sequence[ModeRow], start: ModeRow, metric: str) -> list[Share]:
    """Return the shares of each row in each bound; leave out a bound that gains nothing."""
    zero = start.over_runs(metric).mean
    return [
        Share(
            system=row.name,
            bound=bound.name,
            of_gain=share_of_gain(row.per_run[metric], bound.per_run[metric], zero),
            of_score=row.over_runs(metric).mean / bound.over_runs(metric).mean,
        )
        for row in rows
        for bound in bounds
        if bound.over_runs(metric).mean > zero
    ]


def share_section(shares: Sequence[Share], metric: str) -> Section:
    """Return the table of shares, explained with the paper's number."""
    bounds = list(dict.fromkeys(share.bound for share in shares))
    body: dict[str, list[object]] = {}
    for share in shares:  # those of one system are in the order of the bounds
        body.setdefault(share.system, [share.system]).extend([_percent(share.of_gain), f"{share.of_score:.1%}"])
    header = ["System", *(text for bound in bounds for text in (f"of the gain of {bound}", "of its score"))]
    explained = (
        f"Share of the gain: ({metric} - that of zero-shot) / (that of a row without privacy - that of zero-shot), "
        "with 95 % intervals over the training runs of both (delta method). Next to it is the share of the score, as "
        f"in the paper's numbers: {PAPER[0]:.4f} of {PAPER[1]:.4f}, {PAPER[0] / PAPER[1]:.1%} at epsilon 3, with "
        "another data set, encoder and generator; they do not say how much of it an untrained encoder reaches."
    )
    grid = Grid(header, list(body.values()), frozenset(range(1, len(header))))
    return Section("How much of the gain is kept", [Paragraph(explained), grid])


def _percent(interval: Interval) -> str:
    if not math.isfinite(interval.low):
        return f"{interval.mean:.0%}"
    return f"{interval.mean:.0%} [{interval.low:.0%}, {interval.high:.0%}]"
