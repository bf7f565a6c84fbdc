from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.bm25 import BM25, BM25Settings
from lit_dpret.retrieval.search import MISSING

PASSAGES = [
    "flood insurance covers water damage",
    "water water everywhere",
    "life insurance after retirement",
    "nothing in common",
    "flood insurance covers water damage",
]


def test_scores_are_those_of_the_formula() -> None:
    """Lucene's BM25, by hand: idf = ln(1 + (N - df + 0.5) / (df + 0.5)), no (k1 + 1) factor."""
    top = BM25(PASSAGES, stemmer=None).search(["water insurance"], k=5)
    tokens = [[word for word in text.split() if word != "in"] for text in PASSAGES]  # "in" is a stop word
    average = sum(map(len, tokens)) / 5

    def score(row: int) -> float:
        total = 0.0
        for word in ("water", "insurance"):
            frequency = tokens[row].count(word)
            containing = sum(word in words for words in tokens)
            idf = math.log(1 + (5 - containing + 0.5) / (containing + 0.5))
            total += idf * frequency / (frequency + 0.9 * (1 - 0.4 + 0.4 * len(tokens[row]) / average))
        return total

    for value, row in zip(top.scores[0].tolist(), top.indices[0].tolist(), strict=True):
        if row != MISSING:
            assert value == pytest.approx(score(row), rel=1e-5)
    assert sorted(top.indices[0].tolist()) == [MISSING, 0, 1, 2, 4]


def test_equal_passages_tie_by_id_and_one_that_shares_no_word_is_not_returned() -> None:
    assert BM25(PASSAGES, ["a", "b", "c", "d", "e"]).search(["flood damage"], k=2).indices.tolist() == [[4, 0]]
    assert BM25(PASSAGES, ["e", "b", "c", "d", "a"]).search(["flood damage"], k=2).indices.tolist() == [[0, 4]]
    assert BM25(PASSAGES).search(["flood damage"], k=1).indices.tolist() == [[0]]
    top = BM25(PASSAGES).search(["retirement", "unheard-of", "", "the of and"], k=3)
    assert top.indices.tolist() == [[2, MISSING, MISSING]] + [[MISSING] * 3] * 3
    assert torch.isneginf(top.scores[1:]).all()


def test_scores_that_are_asked_for_are_those_of_the_ranking_whatever_its_depth() -> None:
    index = BM25(PASSAGES)
    deep = index.search(["water insurance"], k=5)
    by_place = dict(zip(deep.indices[0].tolist(), deep.scores[0].tolist(), strict=True))
    top, scored = index.search_and_score(["water insurance", "zzz", "life"], k=1, wanted=[[4, 1, 3], [0], []])
    assert torch.equal(top.indices, index.search(["water insurance", "zzz", "life"], k=1).indices)
    assert scored[0].tolist() == [by_place[4], by_place[1], 0.0]
    assert scored[1].tolist() == [0.0] and scored[2].tolist() == []


def test_stop_words_and_stems_are_settings() -> None:
    def hits(query: str, **settings: Any) -> int:
        return int((BM25(PASSAGES, **settings).search([query], k=5).indices != MISSING).sum())

    assert (hits("in"), hits("in", stopwords=None)) == (0, 1)
    assert (hits("floods"), hits("floods", stemmer=None)) == (2, 0)


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: BM25Settings(stopwords="xx"), ConfigurationError, r"bm25\.stopwords"),
        (lambda: BM25Settings(stemmer="klingon"), ConfigurationError, r"bm25\.stemmer"),
        (lambda: BM25Settings(b=2.0), ConfigurationError, r"bm25\.b"),
        (lambda: BM25(PASSAGES).search(["x"], k=0), ConfigurationError, "k=0"),
        (lambda: BM25(["", "the"]), DataError, "None of 2 passages"),
        (lambda: BM25(PASSAGES, ["a"]), DataError, "5 passages have 1 ids"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()
