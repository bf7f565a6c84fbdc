"""A log is copied without the records that training refuses, and with all others as they were."""

from __future__ import annotations

import csv
import io
import json
import random
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lit_dpret.datamodules.cleaning import check_clean, refused_records, write_clean
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.pair_file import PairColumns, read_pairs
from lit_dpret.datamodules.readers import Problems
from lit_dpret.errors import ConfigurationError, DataError

Row = dict[str, str | None]


def rows(count: int, *, named: bool) -> list[Row]:
    return [
        {"query": f"how, is {i}\n", "passage": f'thing "{i}"\nis'}
        | ({"query_id": f"q{i // 2}x{i % 2}"} if named else {})
        for i in range(count)
    ]


def as_jsonl(given: Sequence[Row]) -> list[str]:
    return [json.dumps(row) + "\n" for row in given]


def as_csv(given: Sequence[Row]) -> list[str]:
    def line(values: Sequence[str | None]) -> str:
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerow(values)
        return written.getvalue()

    return [line(list(given[0])), *(line(list(row.values())) for row in given)]


WRITERS: dict[str, Callable[[Sequence[Row]], list[str]]] = {".jsonl": as_jsonl, ".csv": as_csv}
BAD = {
    ".jsonl": ["{'query': 1}\n", "[1]\n", '{"query": "a"}\n', '{"query": "", "passage": "b", "query_id": "e"}\n'],
    ".csv": ['a,"b\nc",d,e,f\n', '"","b\n\nb",e\n', "x\n"],
}


def clean(log: Path, out: Path) -> dict[str, object]:
    problems, columns = Problems(examples=10**6), PairColumns()
    file = check_clean(log, out)
    readable = read_pairs(log, complain=problems)
    refused = refused_records(problems.found, log)
    assert refused is not None
    return write_clean(
        file, out, refused=refused, readable=readable, columns=columns,
        read=lambda path, complain: read_pairs(path, complain=complain),
    )  # fmt: skip


def texts(found: Collection) -> set[tuple[str, str]]:
    return {
        (found.queries[query], found.passages[passage])
        for query, judged in found.qrels["train"].items()
        for passage in judged
    }


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_is_the_log_without_the_bad_records_and_its_queries_keep_their_ids(
    tmp_path: Path, ending: str, named: bool, seed: int
) -> None:
    draw = random.Random(seed)
    good = WRITERS[ending](rows(12, named=named))
    (tmp_path / f"good{ending}").write_text("".join(good), encoding="utf-8")
    head, body = (good[:1], good[1:]) if ending == ".csv" else ([], good)
    damaged = body + draw.choices(BAD[ending], k=5)
    draw.shuffle(damaged)
    log, out = tmp_path / f"log{ending}", tmp_path / f"out{ending}"
    log.write_text("".join(head + damaged), encoding="utf-8")
    facts, found = clean(log, out), read_pairs(out)
    assert texts(found) == texts(read_pairs(tmp_path / f"good{ending}"))
    assert facts["records"] == 5 and facts["of"] == 17
    assert found.queries == read_pairs(log, complain=lambda problem: None).queries, "ids, by line where there are none"
    kept = [line for line in damaged if line in body]
    assert out.read_text(encoding="utf-8").replace("\n", "") == "".join(head + kept).replace("\n", "")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_what_leaving_out_does_to_queries_and_users_is_counted(tmp_path: Path) -> None:
    given: list[Row] = [
        {"query_id": "a", "query": "one", "passage": "x", "user_id": "u"},
        {"query_id": "a", "query": "other", "passage": "y", "user_id": "u"},
        {"query_id": "b", "query": "", "passage": "x", "user_id": "v"},
        {"query_id": "c", "query": "two", "passage": "x", "user_id": "u"},
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(as_jsonl([*given, {"query": "", "passage": "z"}])))
    facts = clean(log, tmp_path / "out.jsonl")
    assert facts["kinds"] == {"query with two texts": 1, "empty query": 2}
    assert (facts["queries_with_fewer_records"], facts["users_without_records"]) == (1, 1)
    assert facts["compared"] and facts["query_ids"] == ["some", "all"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b'query,passage\na,b\n"c,d\n'),  # a quote that does not end
        ("a.csv", b'query,passage\n"a \xff\nc",b\nd,e\n'),  # without its first line the record is another one
        ("a.jsonl", b'{"query": "", "passage": "b"}\n'),  # nothing is left
    ],
)
def test_what_no_record_less_mends_is_not_written(tmp_path: Path, name: str, content: bytes) -> None:
    log, problems = tmp_path / name, Problems(examples=9)
    log.write_bytes(content)
    try:
        read_pairs(log, complain=problems)
    except DataError as error:
        problems(error)
    assert refused_records(problems.found, log) is None


def test_a_copy_that_reads_differently_is_not_left_behind(tmp_path: Path) -> None:
    log, problems = tmp_path / "log.jsonl", Problems(examples=9)
    log.write_text("".join(as_jsonl(rows(3, named=False))) + "x\n")
    readable = read_pairs(log, complain=problems)
    refused = {**(refused_records(problems.found, log) or {}), 2: "a reader that forgets a record"}
    with pytest.raises(DataError, match=r"task\.write_clean="):
        write_clean(
            check_clean(log, tmp_path / "out.jsonl"), tmp_path / "out.jsonl", refused=refused, readable=readable,
            read=lambda path, complain: read_pairs(path, complain=complain), columns=PairColumns(),
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("name", ["log.jsonl", "out.csv"])
def test_another_format_and_a_file_that_exists_are_refused(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("{}\n")
    with pytest.raises(ConfigurationError, match=r"task\.write_clean="):
        check_clean(log, tmp_path / name)
