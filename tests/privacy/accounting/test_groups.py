"""Several units of one person: an upper bound on what the mechanism shows of them together, and a tight one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from laws import DELTA, Q, gaussian
from scipy import optimize, stats

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting import groups
from lit_dpret.privacy.accounting.accountant import truncation_delta
from lit_dpret.privacy.accounting.ceilings import SecretCeiling, attack_ceilings
from lit_dpret.privacy.accounting.composition import delta_at, epsilon
from lit_dpret.privacy.accounting.groups import group_delta_at, group_epsilon
from lit_dpret.privacy.accounting.releases import (
    FullBatch,
    GaussianRelease,
    NonPrivateRelease,
    Poisson,
    Release,
    SamplingLaw,
    Shuffle,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import Neighbours


def drawn(noise: float = 1.5, law: SamplingLaw | float = Q, count: int = 100) -> GaussianRelease:
    return gaussian(noise, law, count)


def group(*releases: Release, units: int, delta: float = DELTA, neighbours: Neighbours = "zero_out") -> float:
    return group_epsilon(releases, delta=delta, units=units, neighbours=neighbours)


# -- the libraries and brute force -------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize(("noise", "rate", "units"), [(1.5, 0.02, 2), (0.8, 0.3, 3), (5.0, 0.001, 40), (0.5, 0.9, 2)])
def test_the_distribution_is_the_librarys_own(
    noise: float, rate: float, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one discretisation, theirs by bisection in Python, ours by Newton's method on all values at once."""
    width = 5e-3
    monkeypatch.setattr(groups, "FINE", width)
    groups._composed.cache_clear()
    chances = stats.binom.pmf(np.arange(units + 1), units, rate)
    single = library.from_mixture_gaussian_mechanism(
        noise, list(range(units + 1)), list(chances), value_discretization_interval=width
    )
    for steps in (1, 20):
        theirs = single.self_compose(steps).get_epsilon_for_delta(DELTA)
        assert group(drawn(noise, rate, steps), units=units) == pytest.approx(theirs, rel=1e-6)
    groups._composed.cache_clear()


def mixture(units: int, noise: float, rate: float, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The densities with and without a user's units where everybody else contributes nothing."""
    counts = np.arange(units + 1)[:, None]
    chances = stats.binom.pmf(counts, units, rate)
    return (chances * stats.norm.pdf(x, counts, noise)).sum(axis=0), stats.norm.pdf(x, 0, noise)


def hockey_stick(upper: np.ndarray, lower: np.ndarray, eps: float, cell: float) -> float:
    return float(np.maximum(upper - math.exp(eps) * lower, 0).sum() * cell)


@pytest.mark.parametrize(("noise", "rate", "units"), [(1.5, 0.1, 2), (3.0, 0.3, 5), (0.9, 0.02, 3)])
def test_one_release_is_bounded_by_brute_force_from_below_and_tightly(noise: float, rate: float, units: int) -> None:
    x = np.linspace(-12 * noise, units + 12 * noise, 400_001)
    with_them, without = mixture(units, noise, rate, x)

    def exact(eps: float) -> float:
        cell = float(x[1] - x[0])
        return max(hockey_stick(with_them, without, eps, cell), hockey_stick(without, with_them, eps, cell))

    for delta in (1e-2, 1e-4, 1e-6):
        ours = group(drawn(noise, rate, 1), units=units, delta=delta)
        true = optimize.brentq(lambda eps, d=delta: exact(eps) - d, 0, 60, xtol=1e-9) if exact(0) > delta else 0.0
        assert true - 1e-6 <= ours <= true + 2e-4


def test_two_releases_are_bounded_by_brute_force_from_below_and_tightly() -> None:
    noise, rate, units = 1.5, 0.1, 3
    x = np.linspace(-8 * noise, units + 8 * noise, 2501)
    with_them, without = mixture(units, noise, rate, x)
    upper, lower = np.outer(with_them, with_them), np.outer(without, without)
    cell = float(x[1] - x[0]) ** 2
    for delta in (1e-2, 1e-4):
        ours = group(drawn(noise, rate, 2), units=units, delta=delta)
        for pair in ((upper, lower), (lower, upper)):
            assert hockey_stick(*pair, ours, cell) <= delta * (1 + 1e-6)
        assert hockey_stick(upper, lower, ours - 2e-3, cell) > delta


# -- bounds and order --------------------------------------------------------------------------


@pytest.mark.parametrize("units", [2, 3, 5])
def test_never_above_group_privacy_of_one_units_curve(units: int) -> None:
    """(eps, delta) for one unit is (k eps, delta (e^(k eps) - 1) / (e^eps - 1)) for k."""
    release = drawn(1.5, count=200)
    ours = group(release, units=units)
    grid = np.linspace(0.05, 8, 400)
    deltas = np.array(delta_at([float(eps) for eps in grid], [release], neighbours="zero_out"))
    promised = deltas * np.expm1(units * grid) / np.expm1(grid)
    bound = units * grid[np.argmax(promised <= DELTA)]
    assert epsilon([release], delta=DELTA, neighbours="zero_out") < ours < bound


@pytest.mark.slow
def test_one_unit_is_the_ordinary_epsilon_and_every_further_one_costs() -> None:
    for law in (Poisson(sample_rate=Q), TruncatedPoisson(sample_rate=Q, cap=90, n=2000), FullBatch()):
        release = drawn(4.0, law)
        values = [group(release, units=units) for units in (1, 2, 3, 5, 8)]
        assert values[0] == epsilon([release], delta=DELTA, neighbours="zero_out")
        assert values == sorted(values) and len(set(values)) == len(values)
    assert group(drawn(4.0), units=40) < group(drawn(4.0), units=41) < group(drawn(4.0), units=1000)


def test_without_sampling_k_units_are_one_of_k_times_the_size() -> None:
    for units, steps in itertools.product((2, 7), (1, 10)):
        ten = epsilon([drawn(9.0 / units, FullBatch(), steps)], delta=DELTA, neighbours="zero_out")
        assert group(drawn(9.0, FullBatch(), steps), units=units) == pytest.approx(ten, rel=1e-9)
        shuffled = drawn(9.0, Shuffle(batch_size=40, n=2000), 50 * steps)
        assert group(shuffled, units=units) == pytest.approx(ten, rel=1e-9)
        replaced = epsilon([drawn(9.0 / units, FullBatch(), steps)], delta=DELTA, neighbours="replace_one")
        assert group(shuffled, units=units, neighbours="replace_one") == pytest.approx(replaced, rel=1e-9)
        everyone = group(drawn(9.0, FullBatch(), steps), drawn(1e5, count=1), units=units)
        assert everyone == pytest.approx(ten, rel=1e-3)


# -- truncation --------------------------------------------------------------------------------


def truncated_pair(
    law: TruncatedPoisson, units: int, noise: float, others: float, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The exact densities of one truncated step in which each other unit contributes ``others``."""
    with_them, without = np.zeros_like(x), np.zeros_like(x)
    rest = law.n - units
    for mine, theirs in itertools.product(range(units + 1), range(rest + 1)):
        chance = stats.binom.pmf(mine, units, law.sample_rate) * stats.binom.pmf(theirs, rest, law.sample_rate)
        kept = min(law.cap, mine + theirs)
        for j in range(max(0, kept - theirs), min(mine, kept) + 1):
            weight = chance * (stats.hypergeom.pmf(j, mine + theirs, mine, kept) if kept else 1.0)
            rest_sum = others * (kept - j)
            with_them += weight * stats.norm.pdf(x, j + rest_sum, noise)
            without += weight * stats.norm.pdf(x, rest_sum, noise)
    return with_them, without


@pytest.mark.like(3)
@pytest.mark.parametrize("others", [0.0, 1.0, -1.0, 7.0])
@pytest.mark.parametrize(("cap", "units"), [(4, 2), (6, 3), (12, 3)])
def test_a_truncated_step_shows_no_more_than_is_stated(cap: int, units: int, others: float) -> None:
    law, noise = TruncatedPoisson(sample_rate=0.15, cap=cap, n=12), 0.5
    x = np.linspace(-100, 100, 100_001)
    pair = truncated_pair(law, units, noise, others, x)
    assert sum(pair[0]) * (x[1] - x[0]) == pytest.approx(1)
    for delta in (0.12, 0.06, 0.03):
        ours = group(drawn(noise, law, 1), units=units, delta=delta)
        assert 0 < ours < math.inf
        for upper, lower in (pair, pair[::-1]):
            assert hockey_stick(upper, lower, ours, float(x[1] - x[0])) <= delta


def test_truncation_takes_its_share_of_delta_once_for_each_unit() -> None:
    law = TruncatedPoisson(sample_rate=Q, cap=76, n=2000)
    lost = 3 * truncation_delta(law, 100)
    assert 0.01 * DELTA < lost < DELTA
    assert group(drawn(4.0, law), units=3) == group(drawn(4.0), units=3, delta=DELTA - lost)
    assert group(drawn(4.0, law), units=3, delta=0.9 * lost) == math.inf
    generous = TruncatedPoisson(sample_rate=Q, cap=200, n=2000)
    assert group(drawn(4.0, generous), units=3) == pytest.approx(group(drawn(4.0), units=3), rel=1e-9)


@pytest.mark.parametrize("units", [0, -1, 1001, 2.0, True, None])
def test_a_number_of_units_that_is_none_is_refused(units: object) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.max_units_per_user"):
        group(drawn(), units=units)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.65, 1.25, 2.5, 5.7, 10.0])
@pytest.mark.parametrize("units", [10, 40])
def test_units_of_a_full_batch_beside_sampled_ones_have_an_epsilon(noise: float, units: int) -> None:
    whole = drawn(noise, FullBatch(), 1)
    both, alone = group(whole, drawn(60.0, 0.01, 3), units=units), group(whole, units=units)
    assert alone <= both <= 1.02 * alone + 0.01


# -- a secret with k copies is k units, and its ceiling that of the k together ---------------------

SAMPLED: list[Release] = [gaussian(2.0, 0.05)] * 40


def test_for_one_copy_it_is_the_ceiling_of_the_card() -> None:
    ceiling = SecretCeiling(SAMPLED, copies=1, neighbours="zero_out")
    stated = attack_ceilings(SAMPLED, neighbours="zero_out")["secret_guess"]
    for prior in (0.01, 1e-4):
        assert ceiling.success(prior) == pytest.approx(stated[f"{prior:g}"], rel=0.01)


def test_without_sampling_k_copies_are_a_gaussian_k_times_as_far() -> None:
    """Exact: the best attack on a Gaussian mechanism with mu = k / sigma guesses with Phi(Phi^-1(p) + mu)."""
    for k in (1, 3):
        ceiling = SecretCeiling([gaussian(4.0, FullBatch())], copies=k, neighbours="zero_out")
        for prior in (0.01, 0.3):
            exact = float(stats.norm.cdf(stats.norm.ppf(prior) + k / 4.0))
            assert exact <= ceiling.success(prior) * (1 + 1e-9) and ceiling.success(prior) <= exact * 1.6


def test_the_curve_read_one_way_agrees_with_the_other() -> None:
    for law in (0.05, TruncatedPoisson(n=1000, sample_rate=0.05, cap=110)):
        releases: list[Release] = [gaussian(2.0, law)] * 40
        eps = group_epsilon(releases, delta=1e-5, units=3)
        assert group_delta_at([eps], releases, units=3)[0] == pytest.approx(1e-5, rel=0.02)


def test_nothing_private_leaves_nothing_to_guess_against() -> None:
    for releases in ([NonPrivateRelease(label="x")], [gaussian(0.1, FullBatch())] * 100):
        ceiling = SecretCeiling(releases, copies=3, neighbours="zero_out")
        assert ceiling.success(1e-6) == 1.0 and ceiling.mean_rank(100) == 1.0
    nothing = SecretCeiling([], copies=2, neighbours="zero_out")
    assert nothing.success(0.01) == pytest.approx(0.01) and nothing.mean_rank(100) == pytest.approx(50.5)


def test_a_simulated_attack_stays_below() -> None:
    """The likelihood attack on the very mechanism: name which of 20 directions k copies pushed."""
    rng, k, sigma, rate, steps, candidates = np.random.default_rng(0), 3, 2.0, 0.1, 10, 20
    releases: list[Release] = [gaussian(sigma, rate)] * steps
    trials = 4000
    pushed = rng.binomial(k, rate, size=(trials, steps)).sum(axis=1)
    sums = rng.normal(scale=sigma * math.sqrt(steps), size=(trials, candidates))
    sums[:, 0] += pushed
    ranks = 1 + (sums > sums[:, :1]).sum(axis=1)
    ceiling = SecretCeiling(releases, copies=k, neighbours="zero_out")
    success = ceiling.success(1 / candidates)
    assert 1 / candidates < (ranks == 1).mean() <= success + 3 * math.sqrt(success / trials)
    assert (candidates + 1) / 2 > ranks.mean() >= ceiling.mean_rank(candidates) - 0.3
