"""Words, shares with intervals, diversity and overlap, each on cases small enough for a pencil."""

from __future__ import annotations

import pytest
from scipy.stats import beta

from lit_dpret.assets.overlap import without_punctuation
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.textsim.diversity import (
    distinct_n,
    length_histogram,
    lengths,
    question_type,
    question_types,
    total_variation,
)
from lit_dpret.synthesis.textsim.overlap import Share, overlap
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
    share = Share(k, n)
    assert share.low == pytest.approx(0.0 if k == 0 else beta.ppf(0.025, k, n - k + 1))
    assert share.high == pytest.approx(1.0 if k == n else beta.ppf(0.975, k + 1, n - k))


def test_a_share_of_nothing_has_the_widest_bounds_and_impossible_counts_and_levels_are_refused() -> None:
    nothing = Share(0, 0)
    assert (nothing.value, nothing.low, nothing.high) == (None, 0.0, 1.0)
    for wrong in ((2, 1), (-1, 1)):
        with pytest.raises(DataError, match="impossible"):
            Share(*wrong)
    with pytest.raises(ConfigurationError, match="level=1"):
        Share(0, 1, level=1.0)


# -- diversity -----------------------------------------------------------------------------------


def test_distinct_n_is_different_ngrams_over_all() -> None:
    texts = ["is it covered", "is it paid", "is it covered"]
    assert distinct_n(texts, 1) == 4 / 9  # is, it, covered, paid
    assert distinct_n(texts, 2) == 3 / 6  # is it, it covered, it paid
    assert distinct_n(texts, 3) == 2 / 3
    assert distinct_n(texts, 4) == 0.0


def test_lengths_are_counted_in_words() -> None:
    texts = ["", "one two three", "one two", " ".join(["long"] * 40)]
    shares = {name: share for name, share in length_histogram(texts).items() if share}
    assert shares == {"0": 0.25, "2": 0.25, "3": 0.25, "30+": 0.25}
    assert lengths(texts)["median"] == 2.5 and lengths(texts)["mean"] == pytest.approx(45 / 4)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("What is a rider?", "what"), ("what's a rider", "what"), ("  HOW much", "how"), ("Are they paid", "is"),
        ("does it", "do"), ("Can't I cancel?", "can"), ("whom to call", "who"), ("car insurance what", "other"),
        ("whatever", "other"), ("?", "other"),
    ],
)  # fmt: skip
def test_a_question_is_typed_by_its_first_word(text: str, kind: str) -> None:
    assert question_type(text) == kind


def test_total_variation_is_the_share_that_would_have_to_move() -> None:
    assert total_variation({"a": 0.5, "b": 0.5}, {"a": 0.25, "c": 0.75}) == 0.75
    assert total_variation({"a": 1.0}, {"a": 1.0}) == 0.0


@pytest.mark.parametrize("measure", [lengths, length_histogram, question_types, lambda texts: distinct_n(texts, 1)])
def test_nothing_has_no_diversity(measure) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="no texts"):
        measure([])


# -- overlap -------------------------------------------------------------------------------------

ORIGINAL = ["Does flood insurance pay for a wet basement or only for the walls?", "Is it covered?"]


def test_a_copy_in_other_case_and_punctuation_is_an_exact_one() -> None:
    found = overlap(["is it covered", "IS IT, COVERED", "is it not covered"], ORIGINAL)
    assert (found.exact.positives, found.exact.total) == (2, 3)
    assert overlap(["?", "..."], ["!", "a"]).exact.positives == 0, "without words nothing is a copy"
    found = overlap([ORIGINAL[0]], ORIGINAL * 5)  # which counts once, however often it is found
    assert (found.exact.positives, found.ngram.positives, found.references) == (1, 1, 10)


def test_eight_words_in_a_row_are_a_copy_and_seven_are_not() -> None:
    seven = "so does flood insurance pay for a wet dog"
    eight = "so does flood insurance pay for a wet basement"
    found = overlap([seven, eight, "is it covered"], ORIGINAL)
    assert (found.ngram.positives, found.ngram.total) == (1, 2)  # the third is too short to share eight words
    assert overlap([seven, eight], ORIGINAL, n=7).ngram.positives == 2


def test_an_empty_list_and_no_words_in_a_row_are_refused() -> None:
    with pytest.raises(DataError, match="no synthetic queries"):
        overlap([], ["a"])
    with pytest.raises(DataError, match="no original queries"):
        overlap(["a"], [])
    with pytest.raises(ConfigurationError, match="n=0"):
        overlap(["a"], ["a"], n=0)
