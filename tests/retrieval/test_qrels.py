from __future__ import annotations

from pathlib import Path

import pytest

from lit_dpret.errors import DataError
from lit_dpret.retrieval.runs import check_qrels, read_qrels


def test_judgements_read_alike_from_trec_and_from_beir(tmp_path: Path) -> None:
    (tmp_path / "trec").write_text("q1 0 a 2\nq1 0 b 0\n\nq2 0 a -1\n")
    (tmp_path / "beir").write_text("query-id\tcorpus-id\tscore\nq1\ta\t2\nq1\tb\t0\nq2\ta\t-1\n")
    wanted = {"q1": {"a": 2, "b": 0}, "q2": {"a": -1}}
    assert read_qrels(tmp_path / "trec") == read_qrels(tmp_path / "beir") == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q 0 a 1\nq 0 a 2\n", "line 2: query 'q' and passage 'a' are judged twice"),
        ("q 0 a 1.5\n", "line 1: the grade '1.5'"),
        ("query-id\tcorpus-id\tscore\nq a\n", "line 2: 2 fields"),
        ("query-id\tcorpus-id\tscore\n", "holds no judgements"),
    ],
)
def test_malformed_judgements_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "qrels").write_text(text)
    with pytest.raises(DataError, match=message):
        read_qrels(tmp_path / "qrels")


def test_missing_judgements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_qrels(tmp_path / "absent")


def test_judgements_of_unknown_ids_are_refused() -> None:
    check_qrels({"q": {"a": 1, "gone": 0}}, query_ids=["q"], passage_ids=["a"])
    with pytest.raises(DataError, match=r"unknown query 'other' \(1 such ids\)"):
        check_qrels({"q": {"a": 1}, "other": {"a": 1}}, query_ids=["q"], passage_ids=["a"])
    with pytest.raises(DataError, match=r"unknown passage 'b' as relevant \(2 such pairs\)"):
        check_qrels({"q": {"a": 1, "b": 1, "c": 2}}, query_ids=["q"], passage_ids=["a"])
