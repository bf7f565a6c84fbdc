"""Planted secrets: exposure and rank, and four ways from ranks to epsilon."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm

from lit_dpret.audit.statistics.exposure import (
    exposure_of_rank,
    extrapolated_exposure,
    rank,
)
from lit_dpret.audit.statistics.rank_epsilon import (
    mean_rank_bound,
    mean_rank_point,
    top_rank_bound,
    top_rank_one_training,
)
from lit_dpret.errors import ConfigurationError, DataError


def test_exposure_is_that_of_tensorflow_privacy() -> None:
    references = np.arange(1, 17)
    found = [exposure_of_rank(rank(perplexity, references), 16) for perplexity in (0, 0.1, 3.5, 20)]
    assert found == pytest.approx([4.0, 4.0, 2.0, -0.087463], abs=1e-6)
    assert [rank(perplexity, references) for perplexity in (0, 1, 3.5, 20)] == [1, 2, 4, 17]


def test_an_extrapolated_exposure_is_that_of_the_distribution_the_references_came_from() -> None:
    references = norm.ppf((np.arange(4000) + 0.5) / 4000, loc=30, scale=4)
    for perplexity in (30, 22, 14):
        exact = -norm.logcdf(perplexity, 30, 4) / math.log(2)
        assert extrapolated_exposure(perplexity, references) == pytest.approx(exact, rel=0.03)
    # Beyond what floats can hold as a probability, it stays finite and in order.
    far = [extrapolated_exposure(perplexity, references) for perplexity in (0, -100, -300)]
    assert far == sorted(far)
    assert far[-1] > 1100


@pytest.mark.parametrize(
    ("mean", "copies", "chance", "delta", "expected"),
    [
        (43, 10, 50, 0.0, 0.015082),
        (32, 100, 50, 0.0, 0.004463),
        (43, 10, None, 9.4e-7, 0.016075),
        (60, 10, None, 0.0, 0.0),
    ],
)
def test_the_papers_number_is_found_and_has_no_confidence(
    mean: float, copies: int, chance: float | None, delta: float, expected: float
) -> None:
    found = mean_rank_point(mean, candidates=100, copies=copies, chance=chance, delta=delta)
    assert found.eps_lower == pytest.approx(expected, abs=6e-7)
    assert found.confidence is None


def test_the_chance_of_a_sum_of_ranks_is_counted_and_drawn() -> None:
    """At the bound, the p-value is the error: by counting all ranks of a tiny audit, and by draws of a larger one."""
    tiny = mean_rank_bound([1, 1, 2], candidates=5, confidence=0.9, copies=2)
    reached = np.minimum(1.0, math.exp(2 * tiny.eps_lower) * np.arange(1, 6) / 5)
    chances = np.diff(reached, prepend=0.0)
    low = sum(
        math.prod(chances[r - 1] for r in ranks)
        for ranks in itertools.product(range(1, 6), repeat=3)
        if sum(ranks) <= 4
    )
    assert low == pytest.approx(0.1, abs=1e-6)
    eps = mean_rank_bound(np.full(60, 43), candidates=100, copies=10).eps_lower
    reached = np.minimum(1.0, math.exp(10 * eps) * np.arange(1, 101) / 100)
    draws = np.random.default_rng(5).random((40_000, 60))
    ranks = 1 + np.searchsorted(reached, draws)
    assert (ranks.sum(axis=1) <= 43 * 60).mean() == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize(
    ("hits", "trials", "copies", "apart", "together"),
    [
        (67, 100, 10, 0.40682, 0.24683),
        (100, 100, 100, 0.04575, 0.0404404),
        (20, 300, 1, 1.4955, 0.76555),
        (0, 100, 1, 0.0, 0.0),
    ],
)
def test_hits_are_bounded_by_the_quoted_values(
    hits: int, trials: int, copies: int, apart: float, together: float
) -> None:
    found = top_rank_bound(hits, trials, candidates=100, copies=copies)
    assert found.eps_lower == pytest.approx(apart, abs=6e-6)
    found = top_rank_one_training(hits, trials, candidates=100, copies=copies)
    assert found.eps_lower == pytest.approx(together, abs=6e-6)


def test_delta_weakens_what_ranks_prove_and_two_candidates_are_the_one_run_audit_at_twice_the_epsilon() -> None:
    pure, loose = (mean_rank_bound(np.full(100, 20), candidates=100, delta=d).eps_lower for d in (0.0, 0.02))
    assert 0 < loose < pure
    pure, loose = (top_rank_bound(30, 100, candidates=100, delta=d, copies=2).eps_lower for d in (0.0, 0.02))
    assert 0 < loose < pure
    eps = top_rank_one_training(80, 100, candidates=2).eps_lower
    assert float(binom.sf(79, 100, 1 / (1 + math.exp(-2 * eps)))) == pytest.approx(0.05, abs=1e-6)
    swapped = top_rank_one_training(80, 100, candidates=2, neighbours="replace_one").eps_lower
    assert swapped == pytest.approx(2 * eps, rel=1e-6)


@pytest.mark.parametrize("together", [False, True], ids=["each by itself", "all at once"])
def test_a_mechanism_that_tells_secrets_with_probability_delta_keeps_to_the_bound_in_one_training(
    together: bool,
) -> None:
    """As good as (eps, delta)-DP for a replacement allows, told one by one or all at once: every number of hits."""
    eps, delta, canaries, candidates, error = 1.0, 0.02, 12, 10, 0.1
    rate = math.exp(eps) / (math.exp(eps) + candidates - 1)
    counts = np.arange(canaries + 1)
    chances = binom.pmf(counts, canaries, delta + (1 - delta) * rate)
    if together:
        chances = delta * (counts == canaries) + (1 - delta) * binom.pmf(counts, canaries, rate)
    wrong = 0.0
    for hits, chance in enumerate(chances):
        found = top_rank_one_training(
            hits, canaries, candidates=candidates, delta=delta, neighbours="replace_one", confidence=1 - error
        )
        wrong += float(chance) * (found.eps_lower > eps)
    assert wrong <= error
    assert top_rank_one_training(canaries, canaries, candidates=candidates, delta=1e-6).eps_lower > 0.5


@pytest.mark.parametrize("together", [False, True], ids=["each by itself", "all at once"])
def test_a_mechanism_at_the_edge_of_a_zero_out_claim_keeps_to_the_bound_in_one_training(together: bool) -> None:
    """A name is released, or none: the secret's own likelier by e^eps than without it, every other by e^-eps less
    likely. So two secrets differ by e^(2 eps), as far as zero_out allows, and with probability delta all is told.
    """
    eps, delta, canaries, candidates, error = 0.8, 0.01, 14, 10, 0.1
    own, other = math.exp(eps), math.exp(-eps)
    named = own + (candidates - 1) * other
    blank = (own - 1) / (own * candidates - named)  # of each name where nothing was planted: the largest possible
    silent, silent_blank = 1 - blank * named, 1 - candidates * blank
    assert own * (1 + 1e-9) >= silent / silent_blank >= other and min(silent, silent_blank) > 0
    hit = blank * own + silent / candidates  # where no name is told, one is guessed
    rng, runs = np.random.default_rng(11), 40_000
    hits = rng.binomial(canaries, hit, size=runs)
    if together:
        hits[rng.random(runs) < delta] = canaries
    else:
        told = rng.binomial(canaries, delta, size=runs)
        hits = told + rng.binomial(canaries - told, hit)
    bounds = [
        top_rank_one_training(h, canaries, candidates=candidates, delta=delta, confidence=1 - error).eps_lower
        for h in range(canaries + 1)
    ]
    wrong = float((np.array(bounds)[hits] > eps).mean())
    assert wrong <= error + 3 * math.sqrt(error * (1 - error) / runs)
    assert bounds[-1] > 0


def test_hits_in_one_training_are_no_likelier_than_the_bound_says() -> None:
    """A release of one of R secrets by the exponential mechanism: the true one by e^(2 eps), the others alike."""
    for candidates, top, eps in ((10, 1, 0.4), (20, 3, 1.0)):
        # The true one is named with probability q; otherwise any other. The top r are it and r - 1 by lot, so the
        # secret is among them with q + (1 - q) (r - 1) / (R - 1).
        named = math.exp(2 * eps) / (math.exp(2 * eps) + candidates - 1)
        hit = named + (1 - named) * (top - 1) / (candidates - 1)
        for hits in range(1, 31):
            found = top_rank_one_training(hits, 30, candidates=candidates, top=top).eps_lower
            if found > eps:
                assert float(binom.sf(hits - 1, 30, hit)) <= 0.05


@pytest.mark.parametrize(
    ("function", "settings", "named"),
    [
        (mean_rank_point, {"mean": 0.5, "candidates": 100}, "mean=0.5"),
        (mean_rank_point, {"mean": 2, "candidates": 1}, "candidates=1"),
        (mean_rank_point, {"mean": 2, "candidates": 10, "copies": 0}, "copies=0"),
        (mean_rank_point, {"mean": 2, "candidates": 10, "delta": 1.0}, "delta=1.0"),
        (mean_rank_bound, {"ranks": [1, 2], "candidates": 10, "confidence": 0.0}, "confidence=0.0"),
        (top_rank_bound, {"hits": 3, "trials": 2, "candidates": 10}, "hits=3"),
        (top_rank_bound, {"hits": 0, "trials": 0, "candidates": 10}, "trials=0"),
        (top_rank_bound, {"hits": 1, "trials": 2, "candidates": 10, "top": 10}, "top=10"),
        (top_rank_one_training, {"hits": 3, "canaries": 2, "candidates": 10}, "hits=3"),
        (top_rank_one_training, {"hits": 1, "canaries": 2, "candidates": 10, "neighbours": "user"}, "neighbours"),
        (exposure_of_rank, {"rank": 0, "candidates": 10}, "rank=0"),
        *((mean_rank_bound, {"ranks": bad, "candidates": 10}, None)
          for bad in ([], [0], [11], [1.5], [math.nan], [[1, 2]])),
        *((function, {"secret": 1.0, "references": bad}, None)
          for function in (rank, extrapolated_exposure) for bad in ([], [1.0, math.nan], [[1.0]])),
        (rank, {"secret": math.nan, "references": [1.0]}, "secret"),
        (extrapolated_exposure, {"secret": 1.0, "references": [2.0, 2.0]}, "references"),
    ],
)  # fmt: skip
def test_ranks_and_numbers_that_are_none_are_refused_by_name(
    function: Any, settings: dict[str, Any], named: str | None
) -> None:
    with pytest.raises((ConfigurationError, DataError), match=named):
        function(**settings)
