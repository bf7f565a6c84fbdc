"""The table of one regime of `task=end_to_end`: our rows and the paper's, and how synthetic queries compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from lit_dpret.modules import DualEncoder
from lit_dpret.report.table import RowResult
from lit_dpret.retrieval.statistics import (
    Interval,
    bootstrap_interval,
    paired_randomisation_test,
    seed_interval,
    seed_test,
)
from lit_dpret.tasks.encoder_privacy import PUBLIC
from lit_dpret.tasks.pipeline import METRIC_NAMES
from reproduction.paper_000.table import PUBLIC_ONLY, PaperRow, PaperTable, named, shown
from reproduction.published import MAIN, ORIGINAL, Point, by_point
from reproduction.recipe import Recipe
from reproduction.report.comparison import LEVEL, p_value
from reproduction.study import budget_name

# Each metric's values for every test question, from one training or from a system that is not trained.
Run = Mapping[str, Sequence[float]]
FIRST = next(iter(METRIC_NAMES.values()))
_TABLES = {ORIGINAL: "table_4", MAIN: "table_3"}


@dataclass(frozen=True, kw_only=True)
class Regime:
    """An encoder, and the ways in which it is trained."""

    label: str  # of its table
    # Makes the dual encoder, given ``privacy``, ``optimizer`` and ``temperature``.
    retriever: Callable[..., DualEncoder]
    ways: Mapping[str, Recipe]
    as_in_the_paper: bool = False  # whether its rows show the paper's numbers as well


@dataclass(frozen=True)
class Cell:
    """One row: an encoder trained in one way under one budget; an epsilon of None means no privacy."""

    regime: str
    way: str
    eps: float | None

    @property
    def name(self) -> str:
        return f"{self.regime}-{self.way}-{budget_name(self.eps)}"

    def run(self, seed: int) -> str:
        return f"{self.name}-seed{seed}"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The known results of one regime."""

    name: str  # of the regime
    regime: Regime
    runs: Mapping[Cell, Mapping[int, Run]]  # for each of its rows, by seed; empty for a row that was not run
    claims: Mapping[Cell, str]  # what one run of a row promises, in one line, for rows with a run
    start: Run  # the untrained encoder
    start_privacy: str
    bm25: Run

    def table(self) -> PaperTable:
        """Return the regime's table; it includes rows that were not run, and says so."""
        order = {way: place for place, way in enumerate(self.regime.ways)}
        cells = sorted(self.runs, key=lambda cell: (order[cell.way], -math.inf if cell.eps is None else -cell.eps))
        public = [
            PaperRow(system="BM25", metrics=_over_queries(self.bm25), privacy=PUBLIC, epsilon=PUBLIC_ONLY),
            PaperRow(
                system="the untrained encoder", metrics=_over_queries(self.start), privacy=self.start_privacy,
                epsilon=PUBLIC_ONLY,
            ),
        ]  # fmt: skip
        rows, regime = [*map(self._row, cells), *public], self.regime.label
        return PaperTable.of("end_to_end", rows, list(self._orders()), name=f"end_to_end_{self.name}", regime=regime)

    def _row(self, cell: Cell) -> PaperRow:
        recipe, runs = self.regime.ways[cell.way], self.runs[cell]
        point, theirs = self._beside(cell)
        ours = RowResult(recipe.label, note="not run yet")
        if runs:
            several, seeds = len(runs) > 1, ", ".join(map(str, runs))
            ours = RowResult(
                recipe.label,
                metrics=_over_runs(list(runs.values())) if several else _over_queries(next(iter(runs.values()))),
                privacy=self.claims[cell],
                note=f"runs with seeds {seeds}" if several else f"one run, seed {seeds}",
            )
        return PaperRow(
            **vars(ours), epsilon=shown(cell.eps), paper=theirs, beside=named(point) if point and theirs else ""
        )

    def _beside(self, cell: Cell) -> tuple[Point | None, dict[str, float]]:
        """Return the paper's row that corresponds to ours, and its numbers; only the paper's ways have one."""
        recipe, point = self.regime.ways[cell.way], None
        if not self.regime.as_in_the_paper:
            return None, {}
        if recipe.learns_from_synthetic:
            point = None if recipe.round_trip_filter is not None else (MAIN, cell.eps)
        elif recipe.mode.name in ("none", "per_example_duplicated"):
            point = (ORIGINAL, cell.eps)
        theirs = () if point is None else by_point(_TABLES[point[0]]).get(point, ())
        return point, dict(zip(METRIC_NAMES.values(), theirs, strict=False))  # the paper has no MRR

    def _orders(self) -> Iterator[str]:
        ways = self.regime.ways
        budgets = sorted({cell.eps for cell in self.runs}, key=lambda eps: math.inf if eps is None else eps)
        for eps, way in product(budgets, ways):
            cell = Cell(self.name, way, eps)
            if not (first := self.runs.get(cell)):
                continue
            name, ours = f"ε = {shown(eps)}: {ways[way].label}", self._beside(cell)[1].get(FIRST)
            yield f"{name} {_against(first, {0: self.start}, 'the untrained encoder', trained=False)}"
            for other, recipe in ways.items() if ways[way].learns_from_synthetic else ():
                second = Cell(self.name, other, eps)
                if self.runs.get(second) and not recipe.learns_from_synthetic:
                    theirs = self._beside(second)[1].get(FIRST)
                    beside = f" The paper: {ours:.4f} against {theirs:.4f}." if ours and theirs else ""
                    yield f"{name} {_against(first, self.runs[second], recipe.label)}{beside}"


def _over_queries(run: Run) -> dict[str, Interval]:
    return {metric: bootstrap_interval(values) for metric, values in run.items()}


def _over_runs(runs: Sequence[Run]) -> dict[str, Interval]:
    return {metric: seed_interval([float(np.mean(run[metric])) for run in runs]) for metric in runs[0]}


def _against(first: Mapping[int, Run], second: Mapping[int, Run], name: str, *, trained: bool = True) -> str:
    """State whether some runs have a higher nDCG@10 than others, tested over the runs or over the test questions."""
    ours, other = ([np.asarray(run[FIRST]) for run in runs.values()] for runs in (first, second))
    if len(ours) > 1 and (len(other) > 1 or not trained):
        test = seed_test([float(v.mean()) for v in ours], [float(v.mean()) for v in other])
        gap, p = Interval(test.difference, test.low, test.high), test.p_value
        how = f"over {len(ours)} runs" if not trained else f"over {len(ours)} and {len(other)} runs"
    else:
        a, b = np.mean(ours, axis=0), np.mean(other, axis=0)
        gap, p = bootstrap_interval(a - b), paired_randomisation_test(a, b).p_value
        how = "over the test questions, not over runs"
    means = f"{np.mean(ours):.3f} against {np.mean(other):.3f}"
    verdict = ("are above" if gap.mean > 0 else "are below") if p < LEVEL else "do not differ significantly from"
    return f"{verdict} {name}, {means}: {gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}] {how}, p {p_value(p)}."
