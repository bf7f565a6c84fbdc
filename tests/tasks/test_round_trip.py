"""Round-trip recall and its control, on rankings small enough to check by eye."""

from __future__ import annotations

import pytest

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.tasks.round_trip import hits, wrong_sources

SOURCES = {f"q{n}": f"p{n % 7}" for n in range(21)}


def test_only_the_first_k_count_and_a_query_without_a_ranking_is_a_miss() -> None:
    ranked = {"a": ["x", "y", "s"], "b": ["t"]}
    assert hits({"a": "s", "b": "t", "c": "s"}, ranked, 2) == {"a": False, "b": True, "c": False}
    assert hits({"a": "s", "b": "t"}, ranked, 3) == {"a": True, "b": True}


def test_no_query_keeps_its_passage_and_passages_move_together() -> None:
    for seed in range(20):
        wrong = wrong_sources(SOURCES, seed)
        assert all(wrong[query] != passage for query, passage in SOURCES.items())
        moved = {(SOURCES[query], wrong[query]) for query in SOURCES}
        assert len(moved) == 7 and {after for _, after in moved} == set(SOURCES.values())


def test_the_control_is_a_function_of_the_seed() -> None:
    assert wrong_sources(SOURCES, 1) == wrong_sources(dict(reversed(SOURCES.items())), 1)
    assert len({tuple(wrong_sources(SOURCES, seed).values()) for seed in range(10)}) > 5


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(DataError, match="two passages"):
        wrong_sources({"a": "s", "b": "s"})
    with pytest.raises(DataError, match="two passages"):
        wrong_sources({})
    with pytest.raises(ConfigurationError, match="k=0"):
        hits({"a": "s"}, {}, 0)
