from __future__ import annotations

import math
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
    index = BM25(PASSAGES, stemmer=None)
    top = index.search(["water insurance"], k=5)
    tokens = [  # "in" is a stop word
        ["flood", "insurance", "covers", "water", "damage"],
        ["water", "water", "everywhere"],
        ["life", "insurance", "after", "retirement"],
        ["nothing", "common"],
        ["flood", "insurance", "covers", "water", "damage"],
    ]
    lengths = [len(words) for words in tokens]
    average = sum(lengths) / 5

    def score(row: int) -> float:
        total = 0.0
        for word in ("water", "insurance"):
            frequency = tokens[row].count(word)
            containing = sum(word in words for words in tokens)
            idf = math.log(1 + (5 - containing + 0.5) / (containing + 0.5))
            total += idf * frequency / (frequency + 0.9 * (1 - 0.4 + 0.4 * lengths[row] / average))
        return total

    for value, row in zip(top.scores[0].tolist(), top.indices[0].tolist(), strict=True):
        if row != MISSING:
            assert value == pytest.approx(score(row), rel=1e-5)
    assert sorted(top.indices[0].tolist()) == [MISSING, 0, 1, 2, 4]


def test_equal_passages_tie_and_the_larger_id_comes_first() -> None:
    assert BM25(PASSAGES, ["a", "b", "c", "d", "e"]).search(["flood damage"], k=2).indices.tolist() == [[4, 0]]
    assert BM25(PASSAGES, ["e", "b", "c", "d", "a"]).search(["flood damage"], k=2).indices.tolist() == [[0, 4]]
    assert BM25(PASSAGES).search(["flood damage"], k=1).indices.tolist() == [[0]]


def test_a_passage_that_shares_no_word_is_not_returned() -> None:
    top = BM25(PASSAGES).search(["retirement", "unheard-of", "", "the of and"], k=3)
    assert top.indices.tolist() == [[2, MISSING, MISSING]] + [[MISSING] * 3] * 3
    assert torch.isneginf(top.scores[1:]).all()


def test_settings_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="k=0"):
        BM25(PASSAGES).search(["x"], k=0)
    with pytest.raises(DataError, match="None of 2 passages"):
        BM25(["", "the"])
    with pytest.raises(DataError, match="5 passages have 1 ids"):
        BM25(PASSAGES, ["a"])


def test_scores_that_are_asked_for_are_those_of_the_ranking_whatever_its_depth() -> None:
    index = BM25(PASSAGES)
    deep = index.search(["water insurance"], k=5)
    by_place = dict(zip(deep.indices[0].tolist(), deep.scores[0].tolist(), strict=True))
    top, scored = index.search_and_score(["water insurance", "zzz", "life"], k=1, wanted=[[4, 1, 3], [0], []])
    assert torch.equal(top.indices, index.search(["water insurance", "zzz", "life"], k=1).indices)
    assert scored[0].tolist() == [by_place[4], by_place[1], 0.0]
    assert scored[1].tolist() == [0.0] and scored[2].tolist() == []


def test_stop_words_and_stems_are_settings_and_unknown_ones_are_refused_by_name() -> None:
    def hits(query: str, **settings: Any) -> int:
        return int((BM25(PASSAGES, **settings).search([query], k=5).indices != MISSING).sum())

    assert (hits("in"), hits("in", stopwords=None)) == (0, 1)
    assert (hits("floods"), hits("floods", stemmer=None)) == (2, 0)
    for setting in ({"stopwords": "xx"}, {"stemmer": "klingon"}, {"b": 2.0}):
        with pytest.raises(ConfigurationError, match=rf"bm25\.{next(iter(setting))}"):
            BM25Settings(**setting)  # type: ignore[arg-type]
