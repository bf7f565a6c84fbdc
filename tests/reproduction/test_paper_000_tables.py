"""Tables of paper 000: ours beside the paper's in every form, and orders that are shown only where
intervals are apart.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from lit_dpret.retrieval.statistics import Interval
from reproduction.paper_000.retrieval import Order
from reproduction.paper_000.table import PaperRow, PaperTable, figure_of

NAN = float("nan")
TABLE = PaperTable(
    name="table_9",
    title="Table 9: nothing",
    columns={"ndcg": "nDCG@10", "bleu": "BLEU"},
    rows=[
        PaperRow(system="BM25", epsilon="public only", metrics={"ndcg": Interval(0.3, 0.2, 0.4)}, privacy="no queries"),
        PaperRow(system="ours", epsilon="3", metrics={"ndcg": Interval(0.5, 0.4, 0.6), "bleu": Interval(0.1, NAN, NAN)},
                 paper={"ndcg": 0.183}, beside="T5-Base, ε = 3", privacy="epsilon = 3 at delta = 1e-05"),
        PaperRow(system="T5-XL", epsilon="3", paper={"ndcg": 0.1854}, beside="T5-XL, ε = 3", note="not run here"),
    ],
    caption="Something.",
    notes=["A note."],
)  # fmt: skip


def test_every_number_is_in_the_spreadsheet_and_in_the_data() -> None:
    head, *rows = csv.reader(io.StringIO(TABLE.sheet().csv()))
    first = dict(zip(head, rows[1], strict=True))
    assert [first[f"nDCG@10{end}"] for end in ("", " low", " high", " paper")] == ["0.5", "0.4", "0.6", "0.183"]
    assert first["BLEU low"] == "" and first["privacy"] == "epsilon = 3 at delta = 1e-05"
    row = json.loads(json.dumps(TABLE.facts(), allow_nan=False))["rows"][1]
    assert row["ours"]["bleu"] == {"mean": 0.1, "low": None, "high": None} and row["papers_row"] == "T5-Base, ε = 3"


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


def test_a_picture_says_which_rows_were_not_run_and_promises_no_interval_where_there_is_none() -> None:
    bare = PaperRow(system="alone", epsilon="3", metrics={"ndcg": Interval(0.4, NAN, NAN)})
    table = PaperTable(
        name="table", title="A table", columns={"ndcg": "nDCG@10"},
        rows=[bare, PaperRow(system="missing", epsilon="8", metrics={})], caption="Something.", notes=[],
    )  # fmt: skip
    drawn = figure_of(table)
    assert [label.get_text() for label in drawn.axes[0].get_yticklabels()] == [
        "alone, ε = 3",
        "missing, ε = 8 (not run)",
    ]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["ours"]
    whole = figure_of(replace(table, rows=[row(0.5, 0.1)]))
    assert "interval" in whole.legends[0].get_texts()[0].get_text()
