"""The best of a random number of runs costs what Papernot and Steinke proved, and no more is claimed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from laws import DELTA, gaussian
from scipy import optimize

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.accountant import truncation_delta
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease, Release, SamplingLaw, TruncatedPoisson
from lit_dpret.privacy.accounting.selection import RandomStopping, selection_epsilon
from lit_dpret.privacy.budget import Neighbours


def one(noise: float, law: SamplingLaw | float | None = None, count: int = 1) -> GaussianRelease:
    return gaussian(noise, law or FullBatch(), count)


def best_of(
    mean: float, law: str | float, *releases: Release, delta: float = DELTA, neighbours: Neighbours = "zero_out"
) -> float:
    return selection_epsilon(releases, RandomStopping(mean, law), delta=delta, neighbours=neighbours)


# -- recorded numbers and the paper's formulas -------------------------------------------------


def converted(orders: np.ndarray, rdp: np.ndarray, delta: float) -> float:
    """Canonne, Kamath and Steinke 2020, Proposition 12."""
    return float(np.min(rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)))


def gamma_of(eta: float, mean: float) -> float:
    """The parameter of the truncated negative binomial with that mean, from the formulas of the paper."""

    def mean_of(gamma: float) -> float:
        if eta == 0:
            return (1 / gamma - 1) / math.log(1 / gamma)
        return eta * (1 - gamma) / (gamma * (1 - gamma**eta))

    return float(optimize.brentq(lambda gamma: mean_of(gamma) - mean, 1e-9, 1 - 1e-6, xtol=1e-14))


@pytest.mark.parametrize("noise", [0.8, 2.0, 5.0])
@pytest.mark.parametrize(("eta", "mean"), [(0.0, 10), (0.5, 4), (1.0, 10), (1.0, 30), (3.0, 10)])
def test_a_truncated_negative_binomial_search_costs_what_theorem_2_says(eta: float, mean: float, noise: float) -> None:
    orders = np.linspace(1.01, 80, 40_000)
    rdp = orders / (2 * noise**2)
    gamma = gamma_of(eta, mean)
    constant = (1 + eta) * np.min((1 - 1 / orders) * rdp + math.log(1 / gamma) / orders)
    paper = converted(orders, rdp + constant + math.log(mean) / (orders - 1), DELTA)
    ours = best_of(mean, eta, one(noise))
    assert paper - 1e-9 <= ours <= 1.01 * paper  # our orders are some of those, so never better and hardly worse


@pytest.mark.parametrize("noise", [0.8, 2.0, 5.0])
@pytest.mark.parametrize("mean", [2, 10, 40])
def test_a_poisson_search_costs_what_theorem_6_says(mean: float, noise: float) -> None:
    orders = np.linspace(1.01, 80, 4000)
    rdp = orders / (2 * noise**2)
    spread = np.log1p(1 / (orders - 1))
    exponent = (orders[None, :] - 1) * (rdp[None, :] - spread[:, None] + np.log1p(-1 / orders)[None, :])
    small = np.exp(np.min(exponent - np.log(orders)[None, :], axis=1)).clip(max=1)  # (spread, small)-DP, by RDP
    tail = np.minimum(small, np.sqrt(-np.expm1(-rdp[0])))
    paper = converted(orders, rdp + mean * tail + math.log(mean) / (orders - 1), DELTA)
    assert paper - 1e-6 <= best_of(mean, "poisson", one(noise)) <= 1.02 * paper


# -- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["poisson", "geometric", "logarithmic", 2.5])
def test_selection_costs_more_than_one_run_and_more_the_more_runs(law: str | float) -> None:
    release = one(1.5, 0.02, 200)
    alone = epsilon([release], delta=DELTA, neighbours="zero_out", accountant="rdp")
    costs = [best_of(mean, law, release) for mean in (1, 3, 10, 30)]
    assert costs == sorted(costs) and alone <= costs[0] < costs[-1]


def test_a_run_of_several_kinds_of_releases_is_composed_first() -> None:
    releases = [one(1.5, 0.02, 200), one(9.0, FullBatch(), 3)]
    whole = best_of(10, "geometric", *releases)
    assert whole == best_of(10, "geometric", *reversed(releases)) > best_of(10, "geometric", releases[0])


# -- sampling laws -----------------------------------------------------------------------------


def test_truncation_in_any_run_is_paid_from_delta() -> None:
    law = TruncatedPoisson(sample_rate=0.02, cap=78, n=2000)
    lost = 10 * truncation_delta(law, 200)
    assert 0.01 * DELTA < lost < DELTA
    plain = one(1.5, 0.02, 200)
    assert best_of(10, "geometric", one(1.5, law, 200)) == best_of(10, "geometric", plain, delta=DELTA - lost)
    assert best_of(10, "geometric", one(1.5, law, 200), delta=0.9 * lost) == math.inf


@pytest.mark.parametrize("mean", [0, 0.5, math.inf, math.nan, True, "10", None])
def test_a_mean_that_is_none_is_refused(mean: Any) -> None:
    with pytest.raises(ConfigurationError, match="tuning_mean_runs"):
        RandomStopping(mean)


@pytest.mark.parametrize("law", ["uniform", -0.5, math.inf, math.nan, True, None])
def test_a_law_for_which_nothing_is_proved_is_refused(law: Any) -> None:
    with pytest.raises(ConfigurationError, match="tuning_runs_law"):
        RandomStopping(10, law)
