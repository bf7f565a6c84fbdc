"""Losses that are inverted, composed and read on arrays are the library's, value by value.

Connecting the dots takes second differences of the deltas, which lifts rounding to some 1e-8 of epsilon. The library
adds up its losses step by step, ours multiply, which differ by some 1e-10.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.privacy_accountant import NeighboringRelation
from laws import gaussian
from scipy import special, stats

from lit_dpret.errors import AccountingMemoryError, ConfigurationError
from lit_dpret.privacy.accounting.composition import epsilon, epsilon_curve
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.accounting.pld import (
    GaussianLoss,
    compose_times,
    compose_with,
    gaussian_pld,
    read_deltas,
    read_epsilon,
    truncated_pld,
)

RELATIONS = list(NeighboringRelation)
RATES = (1e-6, 0.002, 0.3, 0.999, 1.0)


@pytest.mark.parametrize("kind", list(AdjacencyType))
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("noise", [0.15, 0.7, 30.0])
def test_deltas_of_many_values_are_the_librarys(kind: AdjacencyType, rate: float, noise: float) -> None:
    ours = GaussianLoss(noise, sampling_prob=rate, adjacency_type=kind)
    theirs = GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=kind)
    bounds = theirs.connect_dots_bounds()
    edge = [-math.log1p(-rate), math.log1p(-rate)] if rate < 1 else []
    values = np.array([*np.linspace(bounds.epsilon_lower - 1, bounds.epsilon_upper + 1, 501), 0.0, *edge])
    np.testing.assert_allclose(ours.get_delta_for_epsilon(values), theirs.get_delta_for_epsilon(values), atol=1e-14)
    assert ours.get_delta_for_epsilon(0.1) == theirs.get_delta_for_epsilon(0.1)


@pytest.mark.like(3)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("rate", RATES)
def test_composed_epsilons_of_poisson_sampling_are_the_librarys(relation: NeighboringRelation, rate: float) -> None:
    ours = gaussian_pld(0.8, rate, relation, 1e-3).self_compose(40)
    theirs = library.from_gaussian_mechanism(
        0.8, sampling_prob=rate, neighboring_relation=relation, value_discretization_interval=1e-3
    ).self_compose(40)
    for delta in (1e-8, 1e-5, 1e-2):
        assert ours.get_epsilon_for_delta(delta) == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=1e-7)


@pytest.mark.like(3)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("cap", [100, 120, 10_000])
def test_composed_epsilons_of_truncated_sampling_are_the_librarys(relation: NeighboringRelation, cap: int) -> None:
    ours = truncated_pld(0.7, 0.01, cap, 10_000, relation, 1e-3).self_compose(20)
    theirs = library.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=10_000,
        sampling_probability=0.01,
        truncated_batch_size=cap,
        noise_multiplier=0.7,
        neighboring_relation=relation,
        value_discretization_interval=1e-3,
    ).self_compose(20)
    for delta in (1e-6, 1e-3):
        assert ours.get_epsilon_for_delta(delta) == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=1e-7)


DISTRIBUTIONS = {
    "sampled": library.from_gaussian_mechanism(0.8, sampling_prob=0.02, value_discretization_interval=1e-3),
    "composed": library.from_gaussian_mechanism(
        0.8, sampling_prob=0.02, value_discretization_interval=1e-3
    ).self_compose(200),
    "little noise": library.from_gaussian_mechanism(0.3, value_discretization_interval=1e-2).self_compose(30),
    "replaced": library.from_gaussian_mechanism(
        1.0, sampling_prob=0.1, neighboring_relation=NeighboringRelation.REPLACE_ONE, value_discretization_interval=1e-3
    ),
    "few values": library.from_randomized_response(0.1, 10),
    "with a leak": library.from_privacy_parameters(
        library.common.DifferentialPrivacyParameters(1.0, 1e-3), value_discretization_interval=1e-3
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-3, 0.01, 0.3, 0.999])
def test_epsilon_is_the_librarys(name: str, delta: float) -> None:
    distribution = DISTRIBUTIONS[name]
    expected = distribution.get_epsilon_for_delta(delta)
    assert read_epsilon(distribution, delta) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_deltas_are_the_librarys(name: str) -> None:
    distribution = DISTRIBUTIONS[name]
    epsilons = [-2.0, -0.001, 0.0, 0.0005, 0.5, 1.0, 3.0, 30.0, 600.0, math.inf]
    expected = distribution.get_delta_for_epsilon(epsilons)
    np.testing.assert_allclose(read_deltas(distribution, epsilons), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("count", [1, 2, 50, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_composition_is_the_librarys(name: str, count: int) -> None:
    if name == "little noise" and count == 3000:
        pytest.skip("its epsilon is beyond all bounds and takes gigabytes")
    ours, theirs = compose_times(DISTRIBUTIONS[name], count), DISTRIBUTIONS[name].self_compose(count)
    masses = [(pmf._probs, pmf._infinity_mass) for pmf in (ours._pmf_remove, ours._pmf_add)]
    # For rounding, and spread evenly: in the middle it counts, in the tail there is none of it.
    added = max(0.0, *(float(np.sum(probs)) + infinite - 1 for probs, infinite in masses))
    assert added < 1e-7 * count
    for delta in (1e-8, 1e-5, 0.1):
        found, least = ours.get_epsilon_for_delta(delta), theirs.get_epsilon_for_delta(delta)
        off = 8 * count * 2.0**-53  # by which the library's own tail may be too small
        most = theirs.get_epsilon_for_delta(delta - off - (added if added < delta / 2 else 0.0))
        assert least * (1 - 1e-7) - 1e-9 <= found <= most * (1 + 1e-7) + 1e-9


def test_an_epsilon_beyond_floating_point_leaves_the_mass_at_infinity() -> None:
    distribution = DISTRIBUTIONS["with a leak"]
    assert read_deltas(distribution, [900.0]).tolist() == [pytest.approx(1e-3)]


LONG = gaussian(0.5, 0.15, 60)


def _with_little_memory(sent: Any, spare: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + spare, mapped + spare))
    try:
        sent.send(epsilon([LONG], delta=1e-5, neighbours="zero_out"))
    except Exception as error:
        sent.send((isinstance(error, AccountingMemoryError), str(error)))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads how much memory is mapped as Linux tells it")
@pytest.mark.parametrize("spare", [8, 60])
def test_too_little_memory_for_the_accounting_names_what_takes_less(spare: int) -> None:
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_with_little_memory, args=(theirs, spare * 2**20))
    child.start()
    assert ours.poll(60), "it ended without a word"
    refused, text = ours.recv()
    child.join()
    assert refused, text
    for knob in ("privacy.eps", "trainer.max_steps", "privacy.accountant=rdp"):
        assert knob in text


def test_a_composition_takes_no_more_than_a_dozen_arrays_of_its_length() -> None:
    single = gaussian_pld(0.5, 0.15, NeighboringRelation.REPLACE_SPECIAL, 1e-4)
    tracemalloc.start()
    length = compose_times(single, 60)._pmf_remove.size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length > 1e5 and peak < 12 * 8 * length


# -- where delta is no larger than what rounding does to a transform, epsilon is still an upper bound ----------


def proved_at_least(steps: int, rate: float, noise: float, delta: float, units: int = 1) -> float:
    """Return an epsilon below which no claim holds, by a threshold on the sum of all released outputs.

    With the unit this is a Gaussian plus a binomial, without it the Gaussian alone.
    """
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
