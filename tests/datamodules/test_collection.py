from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lit_dpret.datamodules.collection import Collection
from lit_dpret.datamodules.rows import Row
from lit_dpret.errors import ConfigurationError, DataError

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
        ({"qrels": {**GOOD.qrels, "dev": {"q3": {"p1": 0.5}}}}, "is 0.5, not a whole number"),
        ({"qrels": {**GOOD.qrels, "dev": {"q3": {"p1": True}}}}, "is True, not a whole number"),
        ({"qrels": {**GOOD.qrels, "tune": {"q3": {"p1": 1}}}}, "split 'tune' is not one of train, dev, test"),
        ({"qrels": {**GOOD.qrels, "train": {"q1": {"p1": 0}, "q2": {"p2": 1}}}}, "all its grades in train are below 1"),
        ({"qrels": {**GOOD.qrels, "dev": {"q1": {"p1": 1}}}}, "query 'q1' is in train and in dev"),
    ],
)
def test_each_contradiction_is_refused_in_one_line_without_a_text(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError) as error:
        replace(GOOD, **change).check()
    message = str(error.value)
    assert reason in message and "\n" not in message and "secret" not in message


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
