from __future__ import annotations

import doctest

import pytest

from lit_dpret.datamodules import complaints
from lit_dpret.datamodules.complaints import Problems, refuse
from lit_dpret.datamodules.readers import RecordFile
from lit_dpret.errors import DataError


def test_the_first_problem_is_raised_where_problems_are_refused() -> None:
    with pytest.raises(DataError, match="one"):
        refuse(DataError("one"))


def test_problems_are_counted_by_kind_and_a_few_are_shown() -> None:
    problems = Problems(examples=2)
    for number in range(5):
        problems(DataError(f"number {number}", kind="many"))
    problems(DataError("alone"))
    assert problems.counts == {"many": 5, "malformed data": 1} and problems.total == 6
    assert problems.shown == {"many": ["number 0", "number 1"], "malformed data": ["alone"]}
    assert doctest.testmod(complaints).failed == 0


def test_a_file_is_not_read_again_for_every_repeated_id(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.jsonl"
    path.write_text('{"_id": "a"}\n' * 100, encoding="utf-8")
    file = RecordFile(path, complain=Problems())
    found = [file.find(number, (("_id",), "a")) for number in range(2, 60)]
    assert found[:20] == [1] * 20 and set(found[20:]) == {0}
    assert file.place(0) == "an earlier one"
