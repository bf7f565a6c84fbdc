"""Tables 3 and 4: retrieval by epsilon and by model size, from synthetic queries and directly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from reproduction.paper_000.study import Cell, Trainings
from reproduction.paper_000.table import (
    PUBLIC_ONLY,
    PaperRow,
    PaperTable,
    columns_of,
    row_beside,
    rows_of_the_paper_alone,
    shown,
)
from reproduction.published import ORIGINAL, SIZES


@dataclass(frozen=True)
class Order:
    """A pair of rows, the first of which is claimed to be better."""

    better: PaperRow
    worse: PaperRow
    paper: bool = True

    def told(self, metric: str, title: str) -> str | None:
        """Return the order in words; None if our rows do not both have the metric."""
        ours, other = self.better.metrics.get(metric), self.worse.metrics.get(metric)
        if ours is None or other is None:
            return None
        theirs = ""
        a, b = self.better.paper.get(metric), self.worse.paper.get(metric)
        if self.paper and a is not None and b is not None:
            theirs = f" The paper: {a:.4f} against {b:.4f}."
        verdict = "holds" if ours.mean > other.mean else "the other way round" if ours.mean < other.mean else "equal"
        # Both rows are evaluated on the same queries, so overlapping intervals neither show an order nor exclude one.
        # Nor do they reflect the luck of a run: `experiment=compare_modes` tests differences over queries and runs.
        apart = ours.low > other.high or other.low > ours.high
        sure = "and the intervals do not overlap" if apart else "and the intervals overlap, which decides nothing"
        return (
            f"{_name(self.better)} above {_name(self.worse)}, in {title}: {verdict}, {ours.mean:.3f} against "
            f"{other.mean:.3f}, {sure}.{theirs}"
        )


def _name(row: PaperRow) -> str:
    return row.system if row.epsilon == "public only" else f"{row.system} at ε = {row.epsilon}"


COLUMNS = columns_of("table_3_retrieval")
PUBLIC_NAMES = {
    "bm25": "BM25", "zero_shot": "zero-shot encoder", "pseudo": "retriever from pseudo-queries of the passages",
}  # fmt: skip


def tables(study: Trainings) -> list[PaperTable]:
    """Return both tables, after doing every training that is missing."""
    base = study.baselines()
    top = [row_beside("table_3", (ORIGINAL, None), COLUMNS, replace(base["original"], system="original queries"))]
    public = [
        PaperRow(**vars(replace(base[key], system=name)), epsilon=PUBLIC_ONLY) for key, name in PUBLIC_NAMES.items()
    ]
    made = [
        row_beside(
            "table_3", study.point(cell), COLUMNS, replace(study.synthetic(cell), system=study.described(cell.size))
        )
        for cell in study.cells()
    ]
    finite = sorted(study.finite, reverse=True)
    direct = [
        row_beside("table_4", (ORIGINAL, eps), COLUMNS, replace(study.direct(eps), system="original queries"))
        for eps in finite
    ]
    alone = rows_of_the_paper_alone("table_3", COLUMNS, [*top, *made])
    orders = [*sizes_note(study), *_told(_orders(study, top[0], made, public))]
    above = _told(_above_direct(study, made, direct))
    return [
        PaperTable.of("table_3_retrieval", [*top, *made, *alone, *public], orders),
        PaperTable.of("table_4_direct", [*top, *direct, *public], above),
    ]


def _orders(study: Trainings, original: PaperRow, made: Sequence[PaperRow], public: Sequence[PaperRow]) -> list[Order]:
    by_cell = dict(zip(study.cells(), made, strict=True))
    main = [by_cell[cell] for cell in _by_budget(study)]
    found = [Order(more, less) for less, more in pairwise(main)]
    found += [Order(row, original) for row in main if row.epsilon == shown(None)]
    sizes = [size for size in SIZES if size in study.beside.values()]
    named = {paper: size for size, paper in study.beside.items()}
    for smaller, larger in pairwise(named[size] for size in sizes):
        both = [eps for eps in study.finite if {Cell(smaller, eps), Cell(larger, eps)} <= set(by_cell)]
        found += [Order(by_cell[Cell(larger, eps)], by_cell[Cell(smaller, eps)]) for eps in both]
    return found + [Order(row, other, paper=False) for row in main for other in public if other.system != "BM25"]


def _above_direct(study: Trainings, made: Sequence[PaperRow], direct: Sequence[PaperRow]) -> list[Order]:
    by_eps = {row.epsilon: row for row in direct}
    by_cell = dict(zip(study.cells(), made, strict=True))
    return [Order(by_cell[c], by_eps[shown(c.eps)]) for c in _by_budget(study) if shown(c.eps) in by_eps]


def _by_budget(study: Trainings) -> list[Cell]:
    eps = sorted(study.eps, key=lambda value: math.inf if value is None else value)
    return [Cell(study.main, value) for value in eps]


def _told(orders: Sequence[Order]) -> list[str]:
    name, title = next(iter(COLUMNS.items()))
    return [text for order in orders if (text := order.told(name, title)) is not None]


def sizes_note(study: Trainings) -> list[str]:
    """State that the sizes are ours, and to which of the paper's they correspond."""
    names = [
        f"{study.described(size)} is next to the paper's {paper}"
        for size, paper in study.beside.items()
        if size in study.sizes
    ]
    return [f"The sizes are ours: {'; '.join(names)}. Such a row is not a model of that size."] if names else []
