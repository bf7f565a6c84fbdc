"""What is found in a corpus is what stands there, and nothing else."""

from __future__ import annotations

import random

import pytest

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.textsim import pretraining_overlap
from lit_dpret.synthesis.textsim.overlap import Share
from lit_dpret.synthesis.textsim.pretraining_overlap import bounds, find_in_corpus

PASSAGE = "a claim is paid within ninety days of the day on which the last paper was sent in by you or by your agent"


def test_thirteen_words_in_a_row_are_an_overlap_and_one_pass_serves_several_lists() -> None:
    tokens = PASSAGE.split()
    for length, expected in ((12, 0), (13, 1)):
        document = "before " + " ".join(tokens[4 : 4 + length]) + " behind"
        found = find_in_corpus({"passages": [PASSAGE]}, [document])[0]["passages"]
        assert (found.ngram.positives, found.exact.positives) == (expected, 0)
    lists = {"queries": ["is it covered", PASSAGE, "?"], "passages": [PASSAGE]}
    both, corpus = find_in_corpus(lists, iter(["is it covered? he asked", "so " + PASSAGE]))
    assert (both["queries"].exact.positives, both["queries"].exact.total) == (2, 2)  # the mark has no words
    assert (both["queries"].ngram.positives, both["queries"].ngram.total) == (1, 1)  # nor the first so many
    assert both["passages"].exact.positives == 1
    assert (corpus.documents, corpus.words) == (2, 5 + 1 + len(tokens))


def test_it_finds_what_a_slow_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining_overlap, "_CHUNK", 50)
    rng = random.Random(0)
    documents = [" ".join(rng.choices("abcde", k=rng.randrange(60))) for _ in range(40)]
    texts = [" ".join(rng.choices("abcdef", k=rng.randrange(1, 9))) for _ in range(400)]
    expected = tuple(any(f" {text} " in f" {each} " for each in documents) for text in texts)
    assert 20 < sum(expected) < 380
    assert find_in_corpus({"texts": texts}, documents[::-1])[0]["texts"].which == expected
    for n in (1, 3, 13):
        found = find_in_corpus({"texts": texts}, documents, n=n)[0]["texts"]
        assert found.which == expected
        runs = {tuple(run) for each in documents for run in zip(*(each.split()[i:] for i in range(n)), strict=False)}
        split = [text.split() for text in texts if len(text.split()) >= n]
        held = sum(any(tuple(each[i : i + n]) in runs for i in range(len(each) - n + 1)) for each in split)
        assert (found.ngram.positives, found.ngram.total) == (held, len(split))


def test_the_bounds_hold_the_truth_for_random_samples() -> None:
    rng = random.Random(0)
    documents = [f"word{i % 40} word{i}" for i in range(200)]
    texts = [f"word{i % 40} word{i}" for i in range(0, 400)]  # half of them stand in the corpus
    held = 0
    for _ in range(20):
        sample = [each for each in documents if rng.random() < 0.3]
        low, high = bounds(find_in_corpus({"texts": texts}, sample)[0]["texts"].exact, 0.3)
        held += low <= 0.5 <= high
    assert held >= 18
    found = Share(20, 1000)
    assert bounds(found, 1.0) == (found.low, found.high)
    tighter = [bounds(found, sampled)[1] for sampled in (0.001, 0.1, 0.5, 1.0)]
    assert tighter[0] == 1.0
    assert tighter == sorted(set(tighter), reverse=True)


def test_what_cannot_be_looked_for_is_refused() -> None:
    with pytest.raises(DataError, match="no queries to compare"):
        find_in_corpus({"queries": []}, ["a"])
    with pytest.raises(DataError, match="queries with any word"):
        find_in_corpus({"queries": ["?"]}, ["a"])
    with pytest.raises(ConfigurationError, match="n=0"):
        find_in_corpus({"queries": ["a"]}, ["a"], n=0)
    for sampled in (0.0, 1.5):
        with pytest.raises(ConfigurationError, match="impossible"):
            bounds(Share(1, 2), sampled)
