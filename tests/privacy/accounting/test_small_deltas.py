"""Where delta is no larger than what rounding does to a transform, epsilon is still an upper bound.

The lower bound is a test that an attacker can run: with the unit, the sum of all released outputs is a Gaussian plus a
binomial, without it the Gaussian alone. Whatever epsilon is claimed must hold for every threshold of that sum.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from laws import gaussian
from scipy import special, stats

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.comparisons import epsilon_if_shuffled
from lit_dpret.privacy.accounting.composition import epsilon, epsilon_curve
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.accounting.pld import compose_times, compose_with
from lit_dpret.privacy.accounting.releases import Shuffle


def proved_at_least(steps: int, rate: float, noise: float, delta: float, units: int = 1) -> float:
    deviation = noise * math.sqrt(steps)
    spread = math.sqrt(units * steps * rate * (1 - rate))
    low = max(0, int(units * (steps * rate) - 14 * spread) - 1)
    held = np.unique(
        np.linspace(low, min(units * steps, int(units * steps * rate + 14 * spread) + 1), 4001).astype(int)
    )
    # Counts between two of these are taken for the lower one, which only weakens the attack.
    chances = np.diff(np.append(stats.binom.cdf(held - 1, units * steps, rate), 1.0))
    best = 0.0
    for z in np.linspace(0, 14, 701):
        above = math.exp(special.logsumexp(stats.norm.logsf(z - held / deviation), b=np.maximum(chances, 0)))
        if above <= delta:
            break
        best = max(best, math.log(above - delta) - float(stats.norm.logsf(z)))
    return best


CASES = [
    (949_561, 0.999, 4_867.4, 7.7e-14),
    (2_300_000, 0.02, 41.1, 1.2e-11),
    (1_000_000, 0.1, 100.0, 1e-10),
    (500_000, 0.1, 114.5, 1e-12),
    (1_000_000, 0.02, 20.0, 1e-14),
]


@pytest.mark.parametrize(("steps", "rate", "noise", "delta"), CASES)
def test_many_steps_at_a_small_delta_are_not_understated(steps: int, rate: float, noise: float, delta: float) -> None:
    releases = [gaussian(noise, rate, steps)]
    claimed = epsilon(releases, delta=delta, neighbours="zero_out")
    lower = proved_at_least(steps, rate, noise, delta)
    assert lower <= claimed <= 1.05 * lower  # and it is not a wild number either


def test_releases_of_two_kinds_are_not_understated() -> None:
    steps, rate, noise, delta = CASES[2]
    releases = [gaussian(noise, rate, steps // 2), gaussian(noise * (1 + 1e-9), rate, steps // 2)]
    lower = proved_at_least(steps, rate, noise * (1 + 1e-9), delta)
    assert lower <= epsilon(releases, delta=delta, neighbours="zero_out") <= 1.05 * lower


def test_several_units_at_a_small_delta_are_not_understated() -> None:
    steps, rate, noise, delta = 100_000, 0.1, 100.0, 1e-12
    releases = [gaussian(noise, rate, steps)]
    claimed = group_epsilon(releases, delta=delta, neighbours="zero_out", units=2)
    lower = proved_at_least(steps, rate, noise, delta, units=2)
    assert lower <= claimed <= 1.05 * lower


@pytest.mark.slow
def test_prv_understates_nothing_or_refuses() -> None:
    steps, rate, noise = 100_000, 0.1, 52.7
    releases = [gaussian(noise, rate, steps)]
    with pytest.raises(ConfigurationError, match=r"privacy\.accountant=prv"):
        epsilon(releases, delta=1e-12, neighbours="zero_out", accountant="prv")
    for delta in (1e-8, 1e-6):
        claimed = epsilon(releases, delta=delta, neighbours="zero_out", accountant="prv")
        assert proved_at_least(steps, rate, noise, delta) <= claimed


@pytest.mark.slow
def test_the_curve_of_prv_ends_where_it_can_tell_no_delta_from_rounding() -> None:
    releases = [gaussian(52.7, 0.1, 120_000)]
    told = [delta for _, delta in epsilon_curve(releases, neighbours="zero_out", accountant="prv")]
    assert told and min(told) > 1e-10
    assert len(epsilon_curve(releases, neighbours="zero_out", deltas=(1e-10,))) == 1


@pytest.mark.parametrize("count", [2, 37, pytest.param(300, marks=pytest.mark.slow)])
def test_no_probability_of_a_composition_is_below_the_exact_one(count: int) -> None:
    probs = np.array([0.015625, 0.40625, 0.5, 0.0625, 2.0**-40, 2.0**-30])
    probs[2] += 1 - probs.sum()
    single = PrivacyLossDistribution(DensePLDPmf(0.5, -2, probs, 0.0, True))
    whole = [int(Fraction(p) * 2**60) for p in probs]
    assert [float(Fraction(w, 2**60)) for w in whole] == probs.tolist()
    # A polynomial to a power is a whole number to a power where every coefficient has room.
    room = 60 * count + 8
    power = sum(w << (room * i) for i, w in enumerate(whole)) ** count
    exact = [Fraction((power >> (room * i)) & ((1 << room) - 1), 2 ** (60 * count)) for i in range(5 * count + 1)]
    for found in (compose_times(single, count), *([compose_with(single, single)] if count == 2 else [])):
        pmf = found._pmf_remove
        first, last = pmf._lower_loss + 2 * count, pmf._lower_loss + 2 * count + len(pmf._probs)
        for value, least in zip(np.asarray(pmf._probs), exact[first:last], strict=True):
            assert Fraction(float(value)) >= least
        assert sum(exact[:first]) + sum(exact[last:]) <= Fraction(float(pmf._infinity_mass))


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 16, 17, 80, 81])
def test_without_amplification_the_epsilon_is_that_of_a_run_that_shuffles(steps: int) -> None:
    drawn = [gaussian(1.0, 1 / 8, steps)]
    shuffled = [gaussian(1.0, Shuffle(batch_size=8, n=64), steps)]
    assert epsilon_if_shuffled(drawn, delta=1e-5, neighbours="zero_out") == pytest.approx(
        epsilon(shuffled, delta=1e-5, neighbours="zero_out"), rel=1e-12
    )
