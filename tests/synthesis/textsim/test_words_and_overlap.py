"""Words, shares with intervals, diversity and overlap, each on cases small enough for a pencil."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from scipy.stats import beta

from lit_dpret.assets.overlap import without_punctuation
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.textsim import pretraining_overlap
from lit_dpret.synthesis.textsim.bleu import corpus_bleu, references_by_passage
from lit_dpret.synthesis.textsim.diversity import (
    distinct_n,
    length_histogram,
    lengths,
    question_type,
    question_types,
    total_variation,
)
from lit_dpret.synthesis.textsim.overlap import Share, overlap
from lit_dpret.synthesis.textsim.pretraining_overlap import bounds, find_in_corpus
from lit_dpret.synthesis.textsim.words import ngrams, words

# -- words ---------------------------------------------------------------------------------------


def test_the_words_joined_are_the_normalised_text() -> None:
    text = "What’s  GEICO's co-pay_rate, ＦＩＮＥ?"
    assert words(text) == ["whats", "geicos", "co", "pay", "rate", "fine"]
    assert "".join(words(text)) == without_punctuation(text)
    assert list(ngrams(["a", "b", "c"], 2)) == [("a", "b"), ("b", "c")] and list(ngrams(["a"], 2)) == []


# -- shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 10), (10, 10), (3, 1000)])
def test_the_interval_is_clopper_and_pearsons(k: int, n: int) -> None:
    share, nothing = Share(k, n), Share(0, 0)
    assert share.low == pytest.approx(0.0 if k == 0 else beta.ppf(0.025, k, n - k + 1))
    assert share.high == pytest.approx(1.0 if k == n else beta.ppf(0.975, k + 1, n - k))
    assert (nothing.value, nothing.low, nothing.high) == (None, 0.0, 1.0)


# -- diversity -----------------------------------------------------------------------------------


def test_distinct_n_is_different_ngrams_over_all_and_total_variation_what_would_have_to_move() -> None:
    texts = ["is it covered", "is it paid", "is it covered"]
    assert distinct_n(texts, 1) == 4 / 9  # is, it, covered, paid
    assert distinct_n(texts, 2) == 3 / 6  # is it, it covered, it paid
    assert distinct_n(texts, 3) == 2 / 3
    assert distinct_n(texts, 4) == 0.0
    assert total_variation({"a": 0.5, "b": 0.5}, {"a": 0.25, "c": 0.75}) == 0.75
    assert total_variation({"a": 1.0}, {"a": 1.0}) == 0.0


def test_lengths_are_counted_in_words() -> None:
    texts = ["", "one two three", "one two", " ".join(["long"] * 40)]
    shares = {name: share for name, share in length_histogram(texts).items() if share}
    assert shares == {"0": 0.25, "2": 0.25, "3": 0.25, "30+": 0.25}
    assert lengths(texts)["median"] == 2.5 and lengths(texts)["mean"] == pytest.approx(45 / 4)


def test_a_question_is_typed_by_its_first_word() -> None:
    kinds = {
        "What is a rider?": "what", "what's a rider": "what", "  HOW much": "how", "Are they paid": "is",
        "does it": "do", "Can't I cancel?": "can", "whom to call": "who", "car insurance what": "other",
        "whatever": "other", "?": "other",
    }  # fmt: skip
    assert {text: question_type(text) for text in kinds} == kinds


# -- overlap -------------------------------------------------------------------------------------

ORIGINAL = ["Does flood insurance pay for a wet basement or only for the walls?", "Is it covered?"]


def test_a_copy_in_other_case_and_punctuation_is_an_exact_one_and_so_are_eight_words_in_a_row() -> None:
    found = overlap(["is it covered", "IS IT, COVERED", "is it not covered"], ORIGINAL)
    assert (found.exact.positives, found.exact.total) == (2, 3)
    assert overlap(["?", "..."], ["!", "a"]).exact.positives == 0, "without words nothing is a copy"
    found = overlap([ORIGINAL[0]], ORIGINAL * 5)  # which counts once, however often it is found
    assert (found.exact.positives, found.ngram.positives, found.references) == (1, 1, 10)
    seven = "so does flood insurance pay for a wet dog"
    eight = "so does flood insurance pay for a wet basement"
    found = overlap([seven, eight, "is it covered"], ORIGINAL)
    assert (found.ngram.positives, found.ngram.total) == (1, 2)  # the third is too short to share eight words
    assert overlap([seven, eight], ORIGINAL, n=7).ngram.positives == 2


# -- BLEU ------------------------------------------------------------------------------------------

SYNTHETIC = ["does flood insurance pay for a wet basement", "what is whole life insurance worth", "is it covered"]
KNOWN = [
    ["does flood insurance pay for my wet basement", "will flood insurance cover a basement"],
    ["what is the worth of whole life insurance"],
    ["is a hail dent covered", "is it covered at all", "who covers it"],
]


def test_bleu_is_what_sacrebleu_computes_and_the_definition_by_hand() -> None:
    sacrebleu = pytest.importorskip("sacrebleu", reason='BLEU is by sacrebleu: pip install "lit-dpret[quality]"')
    two = [known[:2] if len(known) > 1 else known * 2 for known in KNOWN]
    expected = sacrebleu.corpus_bleu(SYNTHETIC, [[known[0] for known in two], [known[1] for known in two]])
    assert corpus_bleu(SYNTHETIC, two).score == pytest.approx(expected.score)
    found = corpus_bleu(["a b c d e"], [["a b c d f"]])
    assert found.precisions == pytest.approx((80.0, 75.0, 200 / 3, 50.0))
    assert found.score == pytest.approx(100 * math.exp(sum(map(math.log, (4 / 5, 3 / 4, 2 / 3, 1 / 2))) / 4))
    short = corpus_bleu(["a b c d"], [["a b c d e f g h"]])
    assert short.brevity_penalty == pytest.approx(math.exp(1 - 8 / 4))
    found = corpus_bleu([*SYNTHETIC, "anything"], [*KNOWN, []])  # whose passage nobody asked for
    assert found.score == corpus_bleu(SYNTHETIC, KNOWN).score
    assert (found.scored, found.without_reference) == (3, 1)
    originals = {"p1": ["a", "b"], "p2": ["c"], "p9": ["never asked about"]}
    assert references_by_passage(["p2", "p1", "p3"], originals) == [["c"], ["a", "b"], []]


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        (lambda: Share(2, 1), DataError, "2 positives of 1"),
        (lambda: Share(-1, 1), DataError, "-1 positives of 1"),
        (lambda: Share(0, 1, level=1.0), ConfigurationError, "level=1"),
        (lambda: lengths([]), DataError, "no texts"),
        (lambda: length_histogram([]), DataError, "no texts"),
        (lambda: question_types([]), DataError, "no texts"),
        (lambda: distinct_n([], 1), DataError, "no texts"),
        (lambda: overlap([], ["a"]), DataError, "no synthetic queries"),
        (lambda: overlap(["a"], []), DataError, "no original queries"),
        (lambda: overlap(["a"], ["a"], n=0), ConfigurationError, "n=0"),
        (lambda: corpus_bleu(["a"], [["a"], ["b"]]), DataError, "1 texts came with 2 lists"),
        (lambda: corpus_bleu([], []), DataError, "nothing to score"),
        (lambda: corpus_bleu(["a"], [[]]), DataError, "nothing to score"),
    ],
)
def test_what_cannot_be_counted_or_scored_is_refused(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()


# -- overlap with a pre-training corpus ------------------------------------------------------------


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
