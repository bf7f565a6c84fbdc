from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from lit_dpret.errors import DataError, StorageError
from lit_dpret.report.table import RowResult, console_table, from_json, show, to_json, write_csv, write_json
from lit_dpret.retrieval.statistics import Interval

NAN = float("nan")
ROWS = [
    RowResult("BM25 [red]", {"MRR@10": Interval(0.3, 0.28, 0.32), "nDCG@10": Interval(0.25, 0.24, 0.26)}, "none used"),
    RowResult('ours, "e=3"', {"nDCG@10": Interval(0.4567, NAN, NAN), "MAP": Interval(NAN, NAN, NAN)},
              "epsilon = 3.000", "new\nline"),
]  # fmt: skip


def printed(rows: list[RowResult], width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(console_table(rows, title="Results"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_unmeasured_metric_is_a_dash_and_never_a_zero() -> None:
    assert show(None) == show(Interval(NAN, NAN, NAN)) == "–"
    assert show(Interval(0.5, NAN, NAN)) == "0.500"
    assert show(Interval(0.5, 0.4, 0.6)) == "0.500 [0.400, 0.600]"
    assert show(Interval(0.5, 0.5, 0.5)) == "0.500", "where all agree there is no interval, not one without width"


def test_the_console_shows_every_number_with_its_interval_and_its_privacy() -> None:
    text = printed(ROWS)
    for piece in ("BM25 [red]", "0.250", "[0.240, 0.260]", "0.457", "epsilon = 3.000", "95 % confidence"):
        assert piece in text
    assert "not stated" in printed([RowResult("x", {"MAP": Interval(0.1, 0.1, 0.1)})])


def test_a_spreadsheet_reads_every_number_in_full(tmp_path: Path) -> None:
    write_csv(ROWS, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [row["system"] for row in read] == [row.system for row in ROWS]
    assert float(read[1]["nDCG@10"]) == 0.4567
    assert read[0]["MRR@10 high"] == "0.32"
    assert read[1]["MRR@10"] == "" and read[1]["note"] == "new\nline"


def test_rows_survive_json(tmp_path: Path) -> None:
    write_json(ROWS, tmp_path / "table.json")
    read = from_json(json.loads((tmp_path / "table.json").read_text(encoding="utf-8")))
    assert read[0] == ROWS[0]
    assert math.isnan(read[1].metrics["MAP"].mean) and read[1].metrics["nDCG@10"].mean == 0.4567
    assert to_json(read) == to_json(ROWS)
    with pytest.raises(DataError):
        from_json([{"system": "x"}])


@pytest.mark.parametrize("write", [write_csv, write_json])
def test_a_folder_that_cannot_be_is_named_and_others_read_no_table(tmp_path: Path, write: object) -> None:
    assert callable(write)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/table"):
        write(ROWS, tmp_path / "file" / "table")
    write(ROWS, tmp_path / "table")
    assert (tmp_path / "table").stat().st_mode & 0o777 == 0o600
