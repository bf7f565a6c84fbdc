"""Orders of paper 000 are called shown only where intervals are apart."""

from __future__ import annotations

import pytest

from lit_dpret.retrieval.statistics import Interval
from reproduction.paper_000.retrieval import Order
from reproduction.paper_000.table import PaperRow


def row(mean: float, reach: float, **more: object) -> PaperRow:
    return PaperRow(system="ours", epsilon="3", metrics={"ndcg": Interval(mean, mean - reach, mean + reach)}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("better", "worse", "said"),
    [
        (row(0.6, 0.05), row(0.4, 0.05), "holds, 0.600 against 0.400, and the intervals do not overlap."),
        (row(0.4, 0.05), row(0.6, 0.05), "the other way round, 0.400 against 0.600, and the intervals do not"),
        (row(0.5, 0.1), row(0.55, 0.1), "the other way round, 0.500 against 0.550, and the intervals overlap"),
        (row(0.5, 0.1), row(0.5, 0.1), "equal, "),
    ],
)
def test_an_order_is_called_shown_only_where_the_intervals_are_apart(
    better: PaperRow, worse: PaperRow, said: str
) -> None:
    told = Order(better, worse).told("ndcg", "nDCG@10")
    assert told is not None and said in told and told.startswith("ours at ε = 3 above ours at ε = 3, in nDCG@10")
