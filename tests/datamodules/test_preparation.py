from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import folder_parts, read_parts
from lit_dpret.datamodules.preparation import (
    Overlap,
    drop_overlap,
    drop_queries_without_passage,
    report_overlap,
    sample,
)
from lit_dpret.errors import DataError

NO_LIMITS: dict[str, Any] = {"max_passages": None, "max_train_queries": None, "max_eval_queries": None, "seed": 0}


@pytest.fixture
def data(harbour: Path) -> Collection:
    return read_parts(**folder_parts(harbour)).check()


@pytest.fixture
def large() -> Collection:
    """300 passages; 200 train queries with one to three positives, 60 test queries."""
    passages = {f"p{i}": f"passage {i}" for i in range(300)}
    train = {f"t{i}": {f"p{(7 * i + 31 * j) % 300}": 1 for j in range(1 + i % 3)} for i in range(200)}
    test = {f"e{i}": {f"p{(11 * i) % 300}": 1, f"p{(11 * i + 5) % 300}": 0} for i in range(60)}
    queries = {query: f"question {query}" for query in (*train, *test)}
    return Collection(passages=passages, queries=queries, qrels={"train": train, "test": test}).check()


def records(data: Collection, split: str = "train") -> dict[str, tuple[str, dict[str, int]]]:
    return {query: (data.queries[query], dict(judged)) for query, judged in data.qrels[split].items()}


def test_queries_without_a_passage_are_left_out_when_asked(data: Collection) -> None:
    qrels = {**data.qrels, "train": {**data.qrels["train"], "t5": {"p3": 0}}}
    spoilt = replace(data, queries={**data.queries, "x": "lost"}, qrels=qrels)
    with pytest.raises(DataError, match=r"datamodule\.drop_queries_without_passage"):
        spoilt.check()
    mended = drop_queries_without_passage(spoilt).check()
    assert mended.queries.keys() == data.queries.keys() - {"t5"}
    zero = replace(data, qrels={**data.qrels, "test": {"e2": {"p1": 0}}})
    assert "e2" in drop_queries_without_passage(zero).qrels["test"], "a test query stays for the evaluator"


def test_which_train_queries_have_a_passage_moves_no_other_query(harbour_copy: Path) -> None:
    """Neither the published number of units nor a sample tells."""
    train = harbour_copy / "qrels" / "train.tsv"
    lines, found = train.read_text().splitlines(), []
    for place in range(1, len(lines)):
        judged = lines[place].split("\t")
        train.write_text("\n".join([*lines[:place], "\t".join([*judged[:-1], "0"]), *lines[place + 1 :]]) + "\n")
        for most in (None, 2):
            data = PairsDataModule(folder=harbour_copy, drop_queries_without_passage=True, max_train_queries=most)
            data.use_unit("query", "zero_out")
            found.append((most, data.n_units, tuple(sorted(data.collection.qrels["train"]))))
    assert len(set(found)) == 2


def test_the_overlap_is_counted_and_dropping_it_removes_train_queries_only(data: Collection) -> None:
    assert report_overlap(data) == {"dev": Overlap(queries=0, passages=1), "test": Overlap(queries=1, passages=1)}
    cleaned = drop_overlap(data)
    assert [query for query, judged in cleaned.qrels["train"].items() if judged] == ["t1", "t2", "t3", "t5"]
    assert list(cleaned.qrels["train"]) == list(data.qrels["train"]), "as units they all stay"
    assert cleaned.qrels["dev"] == data.qrels["dev"] and cleaned.qrels["test"] == data.qrels["test"]
    assert report_overlap(cleaned) == {"dev": Overlap(queries=0, passages=0), "test": Overlap(queries=0, passages=0)}


def test_a_sample_holds_so_many_passages_and_only_queries_they_answer(large: Collection) -> None:
    small = sample(large, **{**NO_LIMITS, "max_passages": 100})
    assert len(small.passages) == 100
    assert len(sample(large, **{**NO_LIMITS, "max_passages": 150, "max_eval_queries": 7}).qrels["test"]) == 7
    whole = sample(large, **NO_LIMITS)
    assert (whole.passages, whole.queries, whole.qrels) == (large.passages, large.queries, large.qrels)
    for split, qrels in small.qrels.items():
        assert 0 < sum(map(bool, qrels.values())) < len(large.qrels[split])
        for query, judged in large.qrels[split].items():
            kept = {passage: grade for passage, grade in judged.items() if passage in small.passages}
            gone = {} if split == "train" else None
            assert qrels.get(query) == (kept if any(grade > 0 for grade in kept.values()) else gone)


def test_the_number_of_train_units_does_not_tell_what_queries_are_about(large: Collection) -> None:
    limits = {**NO_LIMITS, "max_passages": 100}
    kept, gone = (
        next(p for p in large.passages if (p in sample(large, **limits).passages) is wanted) for wanted in (True, False)
    )
    query = next(iter(large.qrels["train"]))
    sizes = set()
    for passage in (kept, gone):
        train = {**large.qrels["train"], query: {passage: 1}}
        sizes.add(len(sample(replace(large, qrels={**large.qrels, "train": train}), **limits).qrels["train"]))
    assert len(sizes) == 1


def test_the_retained_passages_depend_on_no_query(large: Collection) -> None:
    other = replace(
        large,
        queries={query: "something else" for query in large.queries},
        qrels={"train": {"t0": {"p1": 1}}, "test": large.qrels["test"]},
    )
    limits = {**NO_LIMITS, "max_passages": 150, "max_train_queries": 50}
    assert sample(large, **limits).passages == sample(other, **limits).passages


def test_the_sample_is_the_same_in_any_file_order_and_another_for_another_seed(large: Collection) -> None:
    backwards = replace(
        large,
        passages=dict(reversed([*large.passages.items()])),
        qrels={split: dict(reversed([*qrels.items()])) for split, qrels in large.qrels.items()},
    )
    limits = {**NO_LIMITS, "max_passages": 120, "max_train_queries": 80, "max_eval_queries": 9}
    ours, theirs = sample(large, **limits), sample(backwards, **limits)
    assert ours.passages == theirs.passages and ours.qrels == theirs.qrels
    assert ours.passages != sample(large, **{**limits, "seed": 1}).passages


@pytest.mark.parametrize("limit", [None, 40])
def test_changing_one_train_query_changes_no_other(large: Collection, limit: int | None) -> None:
    limits = {**NO_LIMITS, "max_passages": 150, "max_train_queries": limit}
    before = records(sample(large, **limits))
    for query in list(large.qrels["train"])[::9]:
        for judged in ({"p299": 1}, {"p1": 1, "p2": 1, "p3": 1}):
            changed = replace(
                large,
                queries={**large.queries, query: "changed"},
                qrels={**large.qrels, "train": {**large.qrels["train"], query: judged}},
            )
            after = records(sample(changed, **limits))
            assert {q: r for q, r in after.items() if q != query} == {q: r for q, r in before.items() if q != query}


def test_without_a_query_limit_removing_one_train_query_changes_no_other(large: Collection) -> None:
    limits = {**NO_LIMITS, "max_passages": 150}
    before = records(sample(large, **limits))
    for query in list(large.qrels["train"])[::9]:
        train = {q: judged for q, judged in large.qrels["train"].items() if q != query}
        after = records(sample(replace(large, qrels={**large.qrels, "train": train}), **limits))
        assert after == {q: r for q, r in before.items() if q != query}


def test_with_a_query_limit_removing_one_lets_another_in(large: Collection) -> None:
    """Why max_train_queries is refused under add_or_remove."""
    limits = {**NO_LIMITS, "max_train_queries": 40}
    before = records(sample(large, **limits))
    train = {q: judged for q, judged in large.qrels["train"].items() if q != next(iter(before))}
    after = records(sample(replace(large, qrels={**large.qrels, "train": train}), **limits))
    assert len(before) == len(after) == 40 and len(after.keys() - before.keys()) == 1


def test_a_sample_that_leaves_no_query_is_refused_by_its_knob(data: Collection) -> None:
    with pytest.raises(DataError, match=r"no query of .* remains; change datamodule\.max_passages"):
        sample(data, **{**NO_LIMITS, "max_passages": 1})
