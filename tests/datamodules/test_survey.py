"""The numbers of a data check, each against a count made by hand."""

from __future__ import annotations

from dataclasses import replace

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.survey import (
    count_invisible,
    count_splits,
    count_users,
    count_words,
    find_duplicates,
    measure_lengths,
)

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
