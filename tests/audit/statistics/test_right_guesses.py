"""What a one-run audit can certify: published values, an exact tail, and a mechanism that spends its claim."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lit_dpret.audit.statistics.one_run import audit_power, one_run_counts


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "expected"),
    [
        (10, 10, 10, 0.0, 1.051873),
        (100, 100, 100, 0.0, 3.492965),
        (1000, 1000, 1000, 0.0, 5.809068),
        (1000, 100, 90, 0.0, 1.630823),
        (1000, 100, 90, 1e-5, 1.626143),
        (1000, 100, 60, 0.0, 0.051915),
        (1000, 100, 50, 0.0, 0.0),
        (1000, 1000, 600, 0.0, 0.297468),
        (1000, 1000, 600, 1e-5, 0.297227),
        (5000, 1000, 800, 1e-5, 1.252583),
        (10_000, 10_000, 6000, 1e-6, 0.371682),
        (500, 500, 300, 9.4e-7, 0.251662),
        (1000, 0, 0, 1e-5, 0.0),
        (20_000, 763, 492, 1e-6, 0.46894),  # a disclosure audit: repeated rare queries, half of which were held out
        (100_000, 100_000, 88_080, 0.0, 1.98395),  # randomised response of epsilon 2
    ],
)
def test_a_certified_epsilon_is_that_of_the_public_implementations(
    canaries: int, guesses: int, correct: int, delta: float, expected: float
) -> None:
    found = one_run_counts(canaries=canaries, guesses=guesses, correct=correct, delta=delta).eps_lower
    assert found == pytest.approx(expected, abs=2e-6 if expected != round(expected, 5) else 6e-6)


@pytest.mark.parametrize(("eps", "delta"), [(0.5, 0.0), (2.0, 1e-5), (4.0, 1e-3)])
def test_half_of_the_audits_of_a_mechanism_that_spends_its_claim_reach_the_number(eps: float, delta: float) -> None:
    """Randomised response with a leak of probability delta: each coin is an (eps, delta)-DP release."""
    [row] = audit_power(eps, delta, canaries=(400,))
    assert row["accuracy"] == pytest.approx(delta + (1 - delta) * math.exp(eps) / (1 + math.exp(eps)))
    right = np.random.default_rng(0).binomial(400, row["accuracy"], size=400)
    bounds = {
        k: one_run_counts(canaries=400, guesses=400, correct=k, delta=delta).eps_lower
        for k in map(int, np.unique(right))
    }
    reached = np.mean([bounds[int(k)] >= row["as_claimed"] for k in right])
    assert reached > 0.43
    assert np.mean([bounds[int(k)] > eps for k in right]) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert 0 < row["as_claimed"] < eps


def test_delta_weakens_what_is_certified_and_a_right_guess_strengthens_it() -> None:
    def of(correct: int, delta: float) -> float:
        return one_run_counts(canaries=200, guesses=200, correct=correct, delta=delta).eps_lower

    assert of(150, 0.0) > of(150, 1e-4) > of(150, 1e-2)
    assert of(160, 1e-5) > of(150, 1e-5)
    tail = stats.binom.sf(149, 200, 1 / (1 + math.exp(-of(150, 0.0))))
    assert tail == pytest.approx(0.05, abs=1e-6)
