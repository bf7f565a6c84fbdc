"""Private evolution: what a unit's votes can move, who survives, and who comes next."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lit_dpret.errors import DataError
from lit_dpret.privacy.histogram import exact_counts, histogram_sensitivity
from lit_dpret.synthesis.evolution import Candidate, distinct, nearest, numbered, offspring, survivors, votes


def vectors(count: int, dim: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)


@pytest.mark.parametrize(("count", "most"), [(1, 1), (1, 3), (2, 2), (3, 4)])
def test_taking_one_unit_out_moves_the_votes_by_its_cap_at_most_and_nobody_elses(count: int, most: int) -> None:
    """Users with nought to nine queries, some of them twice; neighbours have one user less, or a blank one."""
    owned: list[list[int]] = []
    queries = vectors(60)
    queries[1::7] = queries[0]  # the same text of many people
    for size in (0, 1, 9, 2, 5, 1, 3):
        start = sum(map(len, owned))
        owned.append(list(range(start, start + size)))
    owned[4] = [owned[4][0]] * 5
    candidates = vectors(8, seed=1)

    def counted(units: list[list[int]]) -> np.ndarray:
        given = votes(units, queries, candidates, count)
        return exact_counts(given, bins=8, max_count=most, distinct=True).numpy()

    whole, moved = counted(owned), []
    for unit in range(len(owned)):
        without = counted(owned[:unit] + owned[unit + 1 :])
        assert np.array_equal(without, counted([*owned[:unit], [], *owned[unit + 1 :]]))
        change = whole - without
        assert set(np.unique(change)) <= {0.0, 1.0}
        moved.append(float(np.linalg.norm(change)))
    assert max(moved) <= histogram_sensitivity(most, "zero_out", distinct=True) + 1e-12
    assert max(moved) == pytest.approx(histogram_sensitivity(most, "zero_out", distinct=True)), "the bound is reached"


def test_a_query_votes_for_the_nearest_and_of_equal_ones_for_the_first() -> None:
    candidates = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=np.float32)
    assert nearest(np.array([1.0, 0.1], dtype=np.float32), candidates, 1) == [0]
    assert nearest(np.array([1.0, 0.1], dtype=np.float32), candidates, 2) == [0, 2]
    assert nearest(np.array([0.1, 1.0], dtype=np.float32), candidates, 9) == [1, 0, 2]
    queries = np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]], dtype=np.float32)
    given = list(votes([[0, 1], [1]], queries, np.eye(3, dtype=np.float32), 2))
    assert given == [[0, 2, 1, 1], [2, 1]], "first choices of all queries come before second ones"


def test_survivors_have_more_than_the_threshold_and_the_best_come_first() -> None:
    counts = np.array([3.0, 9.0, -4.0, 9.0, 3.5])
    assert survivors(counts, least=3.0) == [1, 3, 4]
    with pytest.raises(DataError, match=r"task\.threshold"):
        survivors(counts, least=9.0)


def test_offspring_adds_up_and_is_the_exact_share_rounded_down_or_up() -> None:
    for seed in range(20):
        counts = np.random.default_rng(seed).integers(1, 40, size=17).astype(float)
        numbers = offspring(counts, 100, seed=seed)
        assert sum(numbers) == 100
        assert (np.abs(numbers - 100 * counts / counts.sum()) < 1 + 1e-9).all()
        assert offspring(counts, 0, seed=seed) == [0] * 17


def test_names_are_never_given_twice_and_lead_back_to_their_passage() -> None:
    drawn = Counter[str]()
    names = [*numbered(["a#b", "c", "a#b"], drawn), *numbered(["a#b"], drawn)]
    assert names == ["a#b#0", "c#0", "a#b#1", "a#b#2"]
    record = {"passage_id": names[-1], "draw": 0, "text": "x", "log_prob": -1.0, "finished": True}
    found = Candidate.of_record(record)
    assert (found.passage_id, found.draw, found.name) == ("a#b", 2, names[-1])
    texts = ["a", "b", "a", " ", ""]
    once = distinct([Candidate(passage_id=f"p{i}", draw=0, text=text) for i, text in enumerate(texts)])
    assert [each.passage_id for each in once] == ["p0", "p1"], "each text once, and none without words"
