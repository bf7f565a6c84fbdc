"""What is composed and read off a distribution on arrays is what the library makes of it, value by value.

The library adds up its losses step by step, ours multiply, which differ by some 1e-10.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.privacy_accountant import NeighboringRelation

from lit_dpret.privacy.accounting.pld import compose_times, read_deltas, read_epsilon

DISTRIBUTIONS = {
    "sampled": library.from_gaussian_mechanism(0.8, sampling_prob=0.02, value_discretization_interval=1e-3),
    "composed": library.from_gaussian_mechanism(
        0.8, sampling_prob=0.02, value_discretization_interval=1e-3
    ).self_compose(200),
    "little noise": library.from_gaussian_mechanism(0.3, value_discretization_interval=1e-2).self_compose(30),
    "replaced": library.from_gaussian_mechanism(
        1.0,
        sampling_prob=0.1,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
        value_discretization_interval=1e-3,
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
    for delta in (1e-8, 1e-5, 0.1):
        expected = theirs.get_epsilon_for_delta(delta)
        assert ours.get_epsilon_for_delta(delta) == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_an_epsilon_beyond_floating_point_leaves_the_mass_at_infinity() -> None:
    distribution = DISTRIBUTIONS["with a leak"]
    assert read_deltas(distribution, [900.0]).tolist() == [pytest.approx(1e-3)]
