"""A secret with k copies is k units, and its ceiling that of the k together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from lit_dpret.errors import UnsupportedAccountingError
from lit_dpret.privacy.accounting.ceilings import SecretCeiling, attack_ceilings
from lit_dpret.privacy.accounting.groups import group_delta_at, group_epsilon
from lit_dpret.privacy.accounting.releases import (
    FullBatch,
    GaussianRelease,
    NonPrivateRelease,
    Poisson,
    Release,
    TruncatedPoisson,
)

SAMPLED: list[Release] = [GaussianRelease(noise_multiplier=2.0, law=Poisson(sample_rate=0.05))] * 40


def test_for_one_copy_it_is_the_ceiling_of_the_card() -> None:
    ceiling = SecretCeiling(SAMPLED, copies=1, neighbours="zero_out")
    stated = attack_ceilings(SAMPLED, neighbours="zero_out")["secret_guess"]
    for prior in (0.01, 1e-4):
        assert ceiling.success(prior) == pytest.approx(stated[f"{prior:g}"], rel=0.01)


def test_without_sampling_k_copies_are_a_gaussian_k_times_as_far() -> None:
    """Exact: the best attack on a Gaussian mechanism with mu = k / sigma guesses with Phi(Phi^-1(p) + mu)."""
    for k in (1, 3):
        ceiling = SecretCeiling(
            [GaussianRelease(noise_multiplier=4.0, law=FullBatch())], copies=k, neighbours="zero_out"
        )
        for prior in (0.01, 0.3):
            exact = float(norm.cdf(norm.ppf(prior) + k / 4.0))
            assert exact <= ceiling.success(prior) * (1 + 1e-9) and ceiling.success(prior) <= exact * 1.6


def test_more_copies_are_easier_to_name_and_rank_lower() -> None:
    several = [SecretCeiling(SAMPLED, copies=k, neighbours="zero_out") for k in (1, 2, 5)]
    success = [ceiling.success(0.01) for ceiling in several]
    ranks = [ceiling.mean_rank(100) for ceiling in several]
    assert success == sorted(success) and success[0] < success[-1]
    assert ranks == sorted(ranks, reverse=True) and 1 <= ranks[-1] < ranks[0] <= 50.5


def test_the_curve_read_one_way_agrees_with_the_other() -> None:
    for law in (Poisson(sample_rate=0.05), TruncatedPoisson(n=1000, sample_rate=0.05, cap=110)):
        releases: list[Release] = [GaussianRelease(noise_multiplier=2.0, law=law)] * 40
        eps = group_epsilon(releases, delta=1e-5, units=3)
        assert group_delta_at([eps], releases, units=3)[0] == pytest.approx(1e-5, rel=0.02)


def test_nothing_private_leaves_nothing_to_guess_against() -> None:
    for releases in ([NonPrivateRelease(label="x")], [GaussianRelease(noise_multiplier=0.1, law=FullBatch())] * 100):
        ceiling = SecretCeiling(releases, copies=3, neighbours="zero_out")
        assert ceiling.success(1e-6) == 1.0 and ceiling.mean_rank(100) == 1.0
    nothing = SecretCeiling([], copies=2, neighbours="zero_out")
    assert nothing.success(0.01) == pytest.approx(0.01) and nothing.mean_rank(100) == pytest.approx(50.5)


def test_where_several_units_have_no_bound_there_is_no_ceiling() -> None:
    with pytest.raises(UnsupportedAccountingError):
        SecretCeiling(SAMPLED, copies=2, neighbours="replace_one")


def test_a_simulated_attack_stays_below() -> None:
    """The likelihood attack on the very mechanism: name which of 20 directions k copies pushed."""
    rng, k, sigma, rate, steps, candidates = np.random.default_rng(0), 3, 2.0, 0.1, 10, 20
    releases: list[Release] = [GaussianRelease(noise_multiplier=sigma, law=Poisson(sample_rate=rate))] * steps
    trials = 4000
    pushed = rng.binomial(k, rate, size=(trials, steps)).sum(axis=1)
    sums = rng.normal(scale=sigma * math.sqrt(steps), size=(trials, candidates))
    sums[:, 0] += pushed
    named = float((sums.argmax(axis=1) == 0).mean())
    ceiling = SecretCeiling(releases, copies=k, neighbours="zero_out").success(1 / candidates)
    assert 1 / candidates < named <= ceiling + 3 * math.sqrt(ceiling / trials)
