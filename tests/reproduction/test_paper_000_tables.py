"""Tables of paper 000: ours beside the paper's in every form, and orders that are shown only where
intervals are apart.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from lit_dpret.report.page import Picture
from lit_dpret.retrieval.statistics import Interval
from reproduction.paper_000.examples import Example, ExampleTable
from reproduction.paper_000.retrieval import Order
from reproduction.paper_000.table import PaperRow, PaperTable, write_tables
from reproduction.published import ORIGINAL, PAPER_000, by_point

NAN = float("nan")
TABLE = PaperTable(
    name="table_9",
    title="Table 9: nothing",
    columns={"ndcg": "nDCG@10", "bleu": "BLEU"},
    rows=[
        PaperRow(source="BM25", epsilon="public only", ours={"ndcg": Interval(0.3, 0.2, 0.4)}, privacy="no queries"),
        PaperRow(source="ours", epsilon="3", ours={"ndcg": Interval(0.5, 0.4, 0.6), "bleu": Interval(0.1, NAN, NAN)},
                 paper={"ndcg": 0.183}, beside="T5-Base, ε = 3", privacy="epsilon = 3 at delta = 1e-05"),
        PaperRow(source="T5-XL", epsilon="3", paper={"ndcg": 0.1854}, beside="T5-XL, ε = 3", note="not run here"),
    ],
    caption="Something.",
    notes=["A note."],
)  # fmt: skip


def test_ours_and_the_papers_stand_in_one_row_and_what_is_missing_is_a_dash() -> None:
    lines = TABLE.grid().markdown().splitlines()
    assert lines[0] == (
        "| source | ε | nDCG@10, ours | nDCG@10, paper | BLEU, ours | paper's row | what ours promises |"
    )
    assert lines[2] == "| BM25 | public only | 0.300 \\[0.200, 0.400\\] | – | – |  | no queries |"
    assert lines[3].startswith("| ours | 3 | 0.500 \\[0.400, 0.600\\] | 0.1830 | 0.100 | T5-Base, ε = 3 | epsilon = 3")
    assert lines[4] == "| T5-XL | 3 | – | 0.1854 | – | T5-XL, ε = 3 | not run here |"


def test_every_number_is_in_the_spreadsheet_and_in_the_data() -> None:
    head, *rows = csv.reader(io.StringIO(TABLE.sheet().csv()))
    first = dict(zip(head, rows[1], strict=True))
    assert [first[f"nDCG@10{end}"] for end in ("", " low", " high", " paper")] == ["0.5", "0.4", "0.6", "0.183"]
    assert first["BLEU low"] == "" and first["privacy"] == "epsilon = 3 at delta = 1e-05"
    row = json.loads(json.dumps(TABLE.facts(), allow_nan=False))["rows"][1]
    assert row["ours"]["bleu"] == {"mean": 0.1, "low": None, "high": None} and row["papers_row"] == "T5-Base, ε = 3"


def test_each_table_has_its_files_and_its_section_a_picture_where_there_are_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    examples = ExampleTable(
        name="texts", title="Texts", ours=[Example("a passage", [("mini, ε = 3", "a | query")])],
        theirs=Example("theirs", [("T5", "what")]), notes=["Chosen by hash."],
    )  # fmt: skip
    numbers, texts = write_tables([TABLE, examples], tmp_path, owner_only=False)
    assert numbers.title == "Table 9: nothing" and Picture(tmp_path / "table_9.png", TABLE.title) in numbers.blocks
    assert any("a \\| query" in block.markdown() for block in texts.blocks)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"table_9.{ending}" for ending in ("md", "csv", "json", "png")),
        *(f"texts.{ending}" for ending in ("md", "csv", "json")),
    }


def test_the_papers_tables_agree_where_it_prints_a_row_twice() -> None:
    retrieval = by_point("table_3")
    assert retrieval[ORIGINAL, None] == by_point("table_4")[ORIGINAL, None]
    assert set(by_point("table_6")) == {point for point in retrieval if point[0] != ORIGINAL}
    assert set(by_point("table_2")) == set(retrieval)
    for numbers in by_point("table_5").values():
        assert all(len(row) == len(PAPER_000["sets"]) for row in numbers)


def row(mean: float, reach: float, **more: object) -> PaperRow:
    return PaperRow(source="ours", epsilon="3", ours={"ndcg": Interval(mean, mean - reach, mean + reach)}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("better", "worse", "said"),
    [
        (row(0.6, 0.05), row(0.4, 0.05), "so here, 0.600 against 0.400, and the intervals do not overlap."),
        (row(0.4, 0.05), row(0.6, 0.05), "the other way round here, 0.400 against 0.600, and the intervals do not"),
        (row(0.5, 0.1), row(0.55, 0.1), "the other way round here, 0.500 against 0.550, and the intervals overlap"),
        (row(0.5, 0.1), row(0.5, 0.1), "equal here"),
    ],
)
def test_an_order_is_called_shown_only_where_the_intervals_are_apart(
    better: PaperRow, worse: PaperRow, said: str
) -> None:
    told = Order(better, worse).told("ndcg", "nDCG@10")
    assert told is not None and said in told and told.startswith("ours at ε = 3 above ours at ε = 3, in nDCG@10")


def test_the_papers_numbers_stand_beside_an_order_that_is_the_papers() -> None:
    better, worse = row(0.6, 0.1, paper={"ndcg": 0.2}), row(0.5, 0.1, paper={"ndcg": 0.1})
    assert "The paper: 0.2000 against 0.1000." in str(Order(better, worse).told("ndcg", "nDCG@10"))
    assert "The paper" not in str(Order(better, worse, paper=False).told("ndcg", "nDCG@10"))
    assert Order(better, PaperRow(source="T5-XL", epsilon="3")).told("ndcg", "nDCG@10") is None
