"""Attacks that see a synthetic data set alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lit_dpret.audit.attacks.release import BigramModel, bigram_scores, disclosures, nearest_scores, repeated
from lit_dpret.audit.statistics.one_run import one_run_counts
from lit_dpret.errors import ConfigurationError, DataError


def test_a_bigram_model_adds_one_to_every_count() -> None:
    model = BigramModel(["a b", "a c"])  # three words, the end and the unknown word: five choices
    expected = (math.log(3 / 7) + math.log(2 / 7) + math.log(2 / 6)) / 3  # start a, a b, b end
    np.testing.assert_allclose(model.mean_log_probs(["A, b!"]), [expected])
    np.testing.assert_allclose(model.mean_log_probs(["zzz"]), [(math.log(1 / 7) + math.log(1 / 5)) / 2])


def test_a_query_that_the_release_echoes_scores_higher_than_a_stranger_of_the_same_words() -> None:
    release = ["does flood insurance cover my house"] * 3 + ["how to file a claim"]
    queries = ["does flood insurance cover my house", "my house cover does insurance flood"]
    echoed, stranger = bigram_scores(queries, release, ["how to file a claim", "what is a policy"])
    assert echoed > stranger + 0.3
    with pytest.raises(DataError, match="needs texts"):
        bigram_scores(queries, [])


def test_nearest_scores_are_the_mean_of_the_highest_cosines() -> None:
    release = np.array([[3.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    np.testing.assert_allclose(nearest_scores(np.array([[2.0, 0.0], [1.0, 1.0]]), release, nearest=2), [0.5, 0.5**0.5])
    np.testing.assert_allclose(nearest_scores(np.array([[2.0, 0.0]]), release), [0.0], atol=1e-12)  # all three
    many = np.random.default_rng(0).standard_normal((600, 2))
    assert nearest_scores(many, release, nearest=1).shape == (600,)
    with pytest.raises(DataError, match="cannot be compared"):
        nearest_scores(np.ones((1, 2)), np.ones((1, 3)))


def test_repetition_is_exact_but_for_case_and_punctuation_or_by_a_share_of_ngrams() -> None:
    release = ["Does flood insurance cover my house?", "how to file a claim in the state of maine"]
    queries = ["does flood insurance cover my house", "how to file a claim in texas", "claim", "", "my house"]
    assert repeated(queries, release).tolist() == [True, False, False, False, False]
    # "how to file", "to file a", "file a claim", "a claim in" of five 3-grams; short queries have none
    assert repeated(queries, release, overlap=0.8).tolist() == [True, True, False, False, False]
    assert repeated(queries, release, overlap=0.9).tolist() == [True, False, False, False, False]
    parts = ["how to file it", "to file a letter", "file a claim"]  # n-grams of several queries do not add up
    assert repeated(["how to file a claim"], parts, overlap=0.6).tolist() == [False]
    with pytest.raises(ConfigurationError, match="overlap=0"):
        repeated(queries, release, overlap=0)


@pytest.mark.parametrize(("trained", "eps"), [(550, 0.0918), (600, 0.2950), (700, 0.7293), (900, 2.0152)])
def test_golden_bounds_of_disclosures(trained: int, eps: float) -> None:
    """The published formula takes the number of repeated queries for fixed; what holds for any number is below it."""
    planned = one_run_counts(canaries=10_000, guesses=1000, correct=trained, delta=1e-5).eps_lower
    assert planned == pytest.approx(eps, abs=1e-4)
    found = disclosures(queries=10_000, repeated=1000, trained=trained, delta=1e-5).evidence.eps_lower
    assert planned - 0.04 < found < planned
    nothing = disclosures(queries=100, repeated=0, trained=0, delta=0.0)
    assert (nothing.phantoms, nothing.excess, nothing.precision, nothing.evidence.eps_lower) == (0, 0, 0.5, 0.0)
