"""Round-trip recall and its control, on rankings small enough to check by eye."""

from __future__ import annotations

import pytest

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.round_trip import RoundTrip, hits, round_trip, wrong_sources

SOURCES = {f"q{n}": f"p{n % 7}" for n in range(21)}


def test_a_perfect_retriever_has_recall_one_and_control_zero() -> None:
    ranked = {query: [passage] for query, passage in SOURCES.items()}
    assert round_trip(SOURCES, ranked, 10) == RoundTrip(recall=1.0, control=0.0, k=10, queries=21)


def test_a_retriever_that_returns_everything_is_exposed_by_the_control() -> None:
    ranked = {query: sorted(set(SOURCES.values())) for query in SOURCES}
    result = round_trip(SOURCES, ranked, 7)
    assert result.recall == result.control == 1.0


def test_only_the_first_k_count() -> None:
    ranked = {"a": ["x", "y", "s"], "b": ["t"]}
    assert hits({"a": "s", "b": "t"}, ranked, 2) == {"a": False, "b": True}
    assert round_trip({"a": "s", "b": "t"}, ranked, 3).recall == 1.0


def test_a_query_without_a_ranking_is_a_miss_and_not_left_out() -> None:
    assert round_trip({"a": "s", "b": "t"}, {"a": ["s"]}).recall == 0.5


@pytest.mark.parametrize("seed", range(20))
def test_no_query_keeps_its_passage_and_passages_move_together(seed: int) -> None:
    wrong = wrong_sources(SOURCES, seed)
    assert all(wrong[query] != passage for query, passage in SOURCES.items())
    moved = {(SOURCES[query], wrong[query]) for query in SOURCES}
    assert len(moved) == 7 and {after for _, after in moved} == set(SOURCES.values())


def test_the_control_is_a_function_of_the_seed() -> None:
    assert wrong_sources(SOURCES, 1) == wrong_sources(dict(reversed(SOURCES.items())), 1)
    assert len({tuple(wrong_sources(SOURCES, seed).values()) for seed in range(10)}) > 5


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(DataError, match="two passages"):
        round_trip({"a": "s", "b": "s"}, {})
    with pytest.raises(DataError, match="two passages"):
        round_trip({}, {})
    with pytest.raises(ConfigurationError, match="k=0"):
        hits({"a": "s"}, {}, 0)
