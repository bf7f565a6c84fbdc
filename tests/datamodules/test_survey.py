"""What a data check counts, a log without its refused records, and which data a result is about."""

from __future__ import annotations

import csv
import io
import json
import random
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tasks import write_log

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.cleaning import check_clean, refused_records, write_clean
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.identity import content_sha256, data_facts
from lit_dpret.datamodules.pair_file import PairColumns, read_pairs
from lit_dpret.datamodules.records import Problems
from lit_dpret.datamodules.survey import (
    count_invisible,
    count_splits,
    count_users,
    count_words,
    find_duplicates,
    measure_lengths,
)
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.report.table import RowResult, from_json, write_csv, write_json

DATA = Collection(
    passages={"p1": "low  water", "p2": "high water", "p3": "low water", "p4": "low\nwater"},
    queries={"a": "When?", "b": " when? ", "c": "Where?", "d": "WHERE?", "e": "Who?", "f": "Why?"},
    qrels={
        "train": {"a": {"p1": 2, "p2": 1}, "b": {"p1": 1, "p3": 0}, "c": {"p2": 1}, "f": {"p2": 1}},
        "test": {"d": {"p2": 1}, "e": {"p3": 1}},
    },
    users={"a": "ann", "b": "ann", "c": "ben", "d": "ben"},
)


def test_splits_are_counted() -> None:
    assert count_splits(DATA) == {
        "train": {"queries": 4, "judgements": 6, "positives": 5, "positive_passages": 2},
        "test": {"queries": 2, "judgements": 2, "positives": 2, "positive_passages": 2},
    }


def test_equal_texts_and_what_crosses_the_splits_are_found() -> None:
    found = find_duplicates(DATA, examples=5)
    assert (found["queries"]["texts"], found["queries"]["ids"]) == (2, 4)
    assert sorted(found["queries"]["examples"]) == [["a", "b"], ["c", "d"]]
    assert found["passages"] == {"texts": 1, "ids": 3, "examples": [["p1", "p3", "p4"]]}
    assert found["shared_with_train"] == {"test": {"queries": 1, "positive_passages": 1}}
    found = find_duplicates(DATA, examples=1)
    assert [len(found[side]["examples"]) for side in ("queries", "passages")] == [1, 1]
    assert found["queries"]["texts"] == 2 and find_duplicates(DATA, examples=0)["queries"]["examples"] == []


def test_lengths_are_quantiles_of_what_was_measured_and_the_share_that_is_cut() -> None:
    texts = {str(i): "word " * i for i in range(1, 101)}.values()
    assert measure_lengths(texts, count=count_words, limit=90, at_most=1000) == {
        "texts": 100, "measured": 100, "p50": 51, "p90": 91, "p95": 96, "p99": 100, "max": 100, "mean": 50.5,
        "limit": 90, "share_cut": 0.1,
    }  # fmt: skip
    sampled = measure_lengths(texts, count=count_words, limit=None, at_most=30)
    assert sampled["measured"] == 25 and sampled["texts"] == 100 and sampled["share_cut"] is None
    nothing = measure_lengths([], count=count_words, limit=3, at_most=5)
    assert nothing["measured"] == 0 and nothing["share_cut"] is None


def test_what_a_cap_keeps_is_what_training_keeps() -> None:
    assert count_users(replace(DATA, users={})) is None
    assert count_users(replace(DATA, qrels={"test": DATA.qrels["test"]})) is None
    found = count_users(DATA)
    assert found is not None
    assert (found["users"], found["rows"], len(found["queries_without_user"])) == (2, 4, 1)
    assert found["rows_per_user"] == {"p50": 3, "p90": 3, "p99": 3, "max": 3}
    assert found["caps"][:2] == [
        {"cap": 1, "rows_kept": 2, "share_kept": 0.5, "users_cut": 1},
        {"cap": 2, "rows_kept": 3, "share_kept": 0.75, "users_cut": 1},
    ]
    assert found["recommended_cap"] is None, "training by user refuses a query without one"
    from lit_dpret.datamodules.unit_dataset import GroupedUnitDataset

    known = replace(DATA, qrels={"train": {q: j for q, j in DATA.qrels["train"].items() if q in DATA.users}})
    assert count_users(known)["recommended_cap"] == 5  # type: ignore[index]
    unequal = {f"q{i}": {"p1": 1} for i in range(300)}
    most = replace(
        DATA, queries=dict.fromkeys(unequal, "?"), qrels={"train": unequal}, users=dict.fromkeys(unequal, "u")
    )
    assert count_users(most)["recommended_cap"] is None  # type: ignore[index]
    for cap in found["caps"]:
        units = GroupedUnitDataset(known, unit="user", max_rows_per_unit=cap["cap"])
        assert sum(len(units.rows(unit)) for unit in range(len(units))) == cap["rows_kept"]


def test_texts_with_characters_that_nobody_sees_are_counted() -> None:
    seen = ["plain", "two\nlines", "tab\there", "می\u200cخواهم"]
    texts = [*seen, "a\x00b", "zero\u200bwidth", "\u202eturned", "\ufeffmark"]
    assert count_invisible(texts, of_one_line=False) == 4
    assert count_invisible(texts, of_one_line=True) == 5


# -- a copy without the records that are refused -------------------------------------------------

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


# -- which data a result is about ----------------------------------------------------------------


def test_the_hash_is_that_of_the_entries_in_any_order_and_of_nothing_else() -> None:
    texts = {"a": "one", "b": "two"}
    same = content_sha256(texts, {"q": {"a": 1, "b": 0}})
    assert same == content_sha256(dict(reversed(texts.items())), {"q": {"b": 0, "a": 1}})
    others: list[tuple[Any, ...]] = [
        ({"a": "one"}, {"q": {"a": 1, "b": 0}}), ({"a": "two", "b": "one"}, {"q": {"a": 1, "b": 0}}),
        (texts, {"q": {"a": 1, "b": 1}}), ({"q": {"a": 1, "b": 0}}, texts), (texts,), ({**texts, "c": ""}, {}),
    ]  # fmt: skip
    assert len({same, *(content_sha256(*other) for other in others)}) == 1 + len(others)


def test_a_data_set_is_named_without_its_place_before_and_after_it_is_read(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "somewhere" / "my log")
    data = PairsDataModule(folder=folder)
    assert data_facts(data) == {"data": "my log"} == data_facts(folder)
    data.setup("fit")
    named = data_facts(data, data.public_passages())
    assert named["data"] == "my log" and len(named["data_sha256"]) == 64
    assert "somewhere" not in json.dumps(named)


def test_the_rows_of_a_pipeline_name_their_data(tmp_path: Path) -> None:
    rows, about = [RowResult(system="BM25")], {"data": "log", "data_sha256": "ab"}
    write_json(rows, tmp_path / "r.json", about)
    write_csv(rows, tmp_path / "r.csv", about)
    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert found[0].items() >= about.items() and from_json(found) == rows
    header, line = (tmp_path / "r.csv").read_text(encoding="utf-8").splitlines()
    assert header.endswith("data,data_sha256") and line.endswith("log,ab")
