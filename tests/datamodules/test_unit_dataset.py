"""Units of privacy, and the collection whose rows they group."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.layouts import folder_parts, read_parts
from lit_dpret.datamodules.pair_file import read_pairs
from lit_dpret.datamodules.rows import Row, TextUnit
from lit_dpret.datamodules.unit_dataset import GroupedUnitDataset
from lit_dpret.errors import ConfigurationError, DataError


@pytest.fixture
def data(harbour: Path) -> Collection:
    return read_parts(**folder_parts(harbour)).check()


def grouped(units: GroupedUnitDataset) -> list[list[tuple[str, str]]]:
    return [[(row.query_id, row.passage_id) for row in units.rows(unit)] for unit in range(len(units))]


def without(data: Collection, query_id: str) -> Collection:
    """The neighbour that lacks one query's record."""
    train = {query: judged for query, judged in data.qrels["train"].items() if query != query_id}
    return replace(data, qrels={**data.qrels, "train": train})


def test_all_rows_of_a_query_or_of_a_user_are_one_unit(data: Collection) -> None:
    rows = {"t1": ["p1", "p2"], "t2": ["p4", "p3"], "t3": ["p1"], "t4": ["p5", "p6"], "t5": ["p3"]}
    for unit, owned in (("query", list(rows)), ("user", ["t1 t4", "t2 t3", "t5"])):
        expected = [[(query, passage) for query in queries.split() for passage in rows[query]] for queries in owned]
        assert grouped(GroupedUnitDataset(data, unit=unit)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["query", "pair", "user"])
def test_every_positive_pair_is_in_exactly_one_unit(data: Collection, unit: TextUnit) -> None:
    units = GroupedUnitDataset(data, unit=unit)
    rows = list(itertools.chain(*grouped(units)))
    expected = [(query, passage) for query in data.qrels["train"] for passage in data.positives("train", query)]
    assert sorted(rows) == sorted(expected) and ("t2", "p8") not in rows
    if unit == "pair":  # a row knows no positive but its own
        assert all(row.positives == {row.passage_id} for each in range(len(units)) for row in units.rows(each))
    for outside in (-1, len(units)):
        with pytest.raises(IndexError):
            units.rows(outside)


def test_a_row_carries_its_texts_and_its_own_positives(data: Collection) -> None:
    rows = GroupedUnitDataset(data, unit="query").rows(1)
    assert rows[1] == Row(
        query_id="t2",
        query="how to dry a rope",
        passage_id="p3",
        passage="Ropes A wet rope shrinks, so leave some slack overnight.",
        positives=frozenset({"p3", "p4"}),
    )


@pytest.mark.parametrize("unit", ["query", "pair", "user"])
@pytest.mark.parametrize("limit", [None, 1])
def test_removing_one_record_changes_its_owner_s_units_only(
    data: Collection, unit: TextUnit, limit: int | None
) -> None:
    def by_owner(found: Collection) -> dict[str, list[Sequence[Row]]]:
        units = GroupedUnitDataset(found, unit=unit, max_rows_per_unit=limit)
        owned: dict[str, list[Sequence[Row]]] = {}
        for number in range(len(units)):
            query_id = units.rows(number)[0].query_id
            owned.setdefault(data.users[query_id] if unit == "user" else query_id, []).append(units.rows(number))
        return owned

    before = by_owner(data)
    for query_id in data.qrels["train"]:
        owner = data.users[query_id] if unit == "user" else query_id
        after = by_owner(without(data, query_id))
        assert {o: rows for o, rows in after.items() if o != owner} == {o: r for o, r in before.items() if o != owner}
        assert unit == "user" or owner not in after


def test_units_by_user_need_user_ids_and_say_where_to_put_them(data: Collection) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.unit=user.*'t4' has none.*user_id"):
        GroupedUnitDataset(replace(data, users={k: v for k, v in data.users.items() if k != "t4"}), unit="user")


def test_equal_texts_stay_apart_by_default_and_join_when_merged(data: Collection) -> None:
    kept, merged = (GroupedUnitDataset(data, unit="query", duplicates=policy) for policy in ("keep", "merge"))
    assert len(kept) == 5 and len(merged) == 4
    assert grouped(merged)[0] == [("t1", "p1"), ("t1", "p2"), ("t3", "p1")]
    assert [row.positives for row in merged.rows(0)] == [frozenset({"p1", "p2"})] * 3
    assert kept.rows(2)[0].positives == {"p1"}
    pairs = GroupedUnitDataset(data, unit="pair", duplicates="merge")
    assert [("t1", "p1"), ("t3", "p1")] in grouped(pairs) and len(pairs) == 7
    erased = GroupedUnitDataset(without(data, "t3"), unit="query", duplicates="merge")
    # Erasing one of two copies changes a unit instead of removing it: why merging is not the default.
    assert len(merged) == len(erased) and merged.rows(0) != erased.rows(0)


def test_the_most_units_of_a_user_are_counted_where_users_are_known(data: Collection) -> None:
    for unit in ("query", "pair"):
        units = GroupedUnitDataset(data, unit=unit)  # type: ignore[arg-type]
        owned: dict[str, int] = {}
        for number in range(len(units)):
            (user,) = {data.users[row.query_id] for row in units.rows(number)}
            owned[user] = owned.get(user, 0) + 1
        assert units.most_units_of_a_user() == max(owned.values()) > 1
    assert GroupedUnitDataset(data, unit="user").most_units_of_a_user() == 1
    assert GroupedUnitDataset(replace(data, users={}), unit="query").most_units_of_a_user() is None


def test_the_cap_keeps_the_same_rows_whatever_the_file_order(data: Collection) -> None:
    backwards = {query: dict(reversed([*judged.items()])) for query, judged in reversed([*data.qrels["train"].items()])}
    shuffled = replace(data, qrels={**data.qrels, "train": backwards})
    for limit in (1, 2, 3):
        ours = grouped(GroupedUnitDataset(data, unit="user", max_rows_per_unit=limit))
        theirs = grouped(GroupedUnitDataset(shuffled, unit="user", max_rows_per_unit=limit))
        assert {frozenset(rows) for rows in ours} == {frozenset(rows) for rows in theirs}
        assert max(map(len, ours)) == limit
    uncapped = grouped(GroupedUnitDataset(data, unit="user", max_rows_per_unit=99))
    assert uncapped == grouped(GroupedUnitDataset(data, unit="user"))
    capped = GroupedUnitDataset(data, unit="query", max_rows_per_unit=1)
    assert capped.rows(1)[0].positives == {"p3", "p4"}, "a capped query still knows all its positives"


def test_unknown_choices_and_splits_are_refused(data: Collection) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.unit='document' is not one of query, pair, user"):
        GroupedUnitDataset(data, unit="document")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"datamodule\.duplicates='drop' is not one of keep, merge"):
        GroupedUnitDataset(data, unit="query", duplicates="drop")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"datamodule\.duplicates=merge.*privacy\.unit=user"):
        GroupedUnitDataset(data, unit="user", duplicates="merge")
    with pytest.raises(DataError, match="no split 'train'"):
        GroupedUnitDataset(replace(data, qrels={"test": data.qrels["test"]}), unit="query")


def test_the_cap_keeps_the_same_rows_of_a_user_when_a_record_before_them_is_taken_out(tmp_path: Path) -> None:
    """A log without ids numbers its lines, so that every query behind the one that is gone has another id."""
    records = [{"query": f"text {i}", "passage": f"passage {i % 5}", "user_id": f"u{i % 3}"} for i in range(30)]

    def kept(first: int) -> list[list[tuple[str, str]]]:
        log = tmp_path / f"{first}.jsonl"
        log.write_text("".join(f"{json.dumps(record)}\n" for record in records[first:]), encoding="utf-8")
        units = GroupedUnitDataset(read_pairs(log), unit="user", max_rows_per_unit=3)
        rows = [[(row.query, row.passage) for row in units.rows(unit)] for unit in range(len(units))]
        return sorted(unit for unit in rows if unit[0][0] not in {f"text {i}" for i in range(0, 30, 3)})

    assert len(kept(0)) == 2 and kept(0) == kept(1)


# -- the collection ------------------------------------------------------------------------------

KEY = bytes(range(32))
GOOD = Collection(
    passages={"p1": "one", "p2": "two"},
    queries={"q1": "secret first", "q2": "secret second", "q3": "secret third"},
    qrels={"train": {"q1": {"p1": 1}, "q2": {"p2": 1, "p1": 0}}, "test": {"q3": {"p1": 0}}},
    source="toy",
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"passages": {}}, "toy holds no passages"),
        ({"queries": {}}, "toy holds no queries"),
        ({"qrels": {}}, "toy holds no qrels"),
        ({"qrels": {"train": {}}}, "toy holds no qrels"),
        ({"passages": {"p1": "one", "p2": "  "}}, "passage 'p2' has an empty text"),
        ({"queries": {**GOOD.queries, "q2": ""}}, "query 'q2' has an empty text"),
        ({"queries": {**GOOD.queries, "q4": "secret"}}, "query 'q4' has no passage in the qrels"),
        ({"qrels": {**GOOD.qrels, "dev": {"q9": {"p1": 1}}}}, "qrels of dev name an unknown query 'q9'"),
        ({"qrels": {**GOOD.qrels, "dev": {"q3": {"p9": 1}}}}, "pair query 'q3' with an unknown passage 'p9'"),
        ({"qrels": {**GOOD.qrels, "dev": {"q3": {"p1": 0.5}}}}, "grade 0.5, which is not an integer"),
        ({"qrels": {**GOOD.qrels, "dev": {"q3": {"p1": True}}}}, "grade True, which is not an integer"),
        ({"qrels": {**GOOD.qrels, "tune": {"q3": {"p1": 1}}}}, "split 'tune' is not one of train, dev, test"),
        ({"qrels": {**GOOD.qrels, "train": {"q1": {"p1": 0}, "q2": {"p2": 1}}}}, "all its grades in train are below 1"),
        ({"qrels": {**GOOD.qrels, "dev": {"q1": {"p1": 1}}}}, "query 'q1' is in train and in dev"),
        ({"passages": {"p1": "one", "p2": "secret \ud800"}}, "'p2'.*surrogate"),
        ({"queries": {**GOOD.queries, "q2": "secret \ud800"}}, "'q2'.*surrogate"),
        ({"users": {"q2": "secret \ud800"}}, "'q2'.*surrogate"),
        ({"domains": {"q2": "secret \ud800"}}, "'q2'.*surrogate"),
    ],
)
def test_each_contradiction_is_refused_in_one_line_without_a_text(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason) as error:
        replace(GOOD, **change).check()
    assert "\n" not in str(error.value) and "secret" not in str(error.value)


def test_no_repr_shows_a_query_an_id_or_a_count_of_queries() -> None:
    assert repr(GOOD) == "Collection(toy: 2 passages; splits train, test)"
    row = Row(query_id="q1", query="secret", passage_id="p1", passage="text", positives=frozenset({"p1"}))
    assert repr(row) == "Row(query_id='q1')"


@pytest.mark.parametrize(
    "change",
    [
        {"queries": {**GOOD.queries, "q1": "secret firsT"}},
        {"passages": {"p1": "one", "p2": "two "}},
        {"passages": {"p2": "two", "p1": "one"}},
        {"passages": {**GOOD.passages, "p3": "three"}},
        {"users": {"q1": "ann"}},
        {"qrels": {**GOOD.qrels, "train": {"q1": {"p2": 1}, "q2": {"p2": 1, "p1": 0}}}},
        {"qrels": {**GOOD.qrels, "train": {"q1": {"p1": 2}, "q2": {"p2": 1, "p1": 0}}}},
        {"qrels": {**GOOD.qrels, "train": {"q2": {"p2": 1, "p1": 0}, "q1": {"p1": 1}}}},
        {"qrels": {**GOOD.qrels, "train": {"q1": {"p1": 1}}}},
    ],
)
def test_any_change_to_what_is_trained_on_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert replace(GOOD, **change).fingerprint(KEY) != GOOD.fingerprint(KEY)


def test_a_fingerprint_is_of_the_training_data_alone_and_worthless_without_its_key() -> None:
    moved = replace(GOOD, queries={**GOOD.queries, "q3": "other"}, source="elsewhere", domains={"q1": "d"})
    assert moved.fingerprint(KEY) == GOOD.fingerprint(KEY) != GOOD.fingerprint(KEY[::-1])
    with pytest.raises(ConfigurationError, match="15 bytes; at least 16"):
        GOOD.fingerprint(KEY[:15])
