"""A claim is contradicted by a mechanism that breaks it, and hardly ever by one that keeps it, whatever its curve."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from canary_samples import flipped
from scipy import stats

from lit_dpret.audit.statistics.one_run import Curve, both_ends, both_ends_audit, refute
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.errors import ConfigurationError, DataError

EXPERIMENTS = 400
ERROR = 0.05
MOST = ERROR + 3 * math.sqrt(ERROR * (1 - ERROR) / EXPERIMENTS)
ALARM = 1 - 1e-4


def gaussian_curve(mu: float) -> list[tuple[float, float]]:
    """The exact curve of a Gaussian mechanism whose neighbours are ``mu`` standard deviations apart."""
    phi = stats.norm.cdf
    return [(eps, float(phi(mu / 2 - eps / mu) - math.exp(eps) * phi(-mu / 2 - eps / mu)))
            for eps in np.linspace(0, 8, 17)]  # fmt: skip


def gaussian(mu: float, canaries: int, rng: np.random.Generator) -> CanaryScores:
    return flipped(rng, canaries, mu)


def randomised_response(eps: float, canaries: int, rng: np.random.Generator) -> CanaryScores:
    """Each coin is told, truly with the probability that (eps, 0)-DP allows; ties are broken at random."""
    members = rng.random(canaries) < 0.5
    lies = rng.random(canaries) >= 1 / (1 + math.exp(-eps))
    return CanaryScores.of((members ^ lies) + 1e-6 * rng.random(canaries), members)


@pytest.mark.parametrize(
    ("mechanism", "curve"),
    [
        (lambda rng: gaussian(0.0, 100, rng), [(0.0, 0.0)]),
        (lambda rng: gaussian(1.0, 100, rng), gaussian_curve(1.0)),
        (lambda rng: gaussian(2.0, 60, rng), gaussian_curve(2.0)),
        (lambda rng: randomised_response(1.0, 100, rng), [(1.0, 0.0), (0.5, (math.e - math.exp(0.5)) / (1 + math.e))]),
    ],
    ids=["nothing told", "mu 1", "mu 2", "randomised response"],
)
def test_a_true_curve_is_contradicted_in_five_percent_at_most_however_many_pairs_are_tried(
    mechanism: Callable[[np.random.Generator], CanaryScores], curve: Curve
) -> None:
    rng = np.random.default_rng(51)
    wrong = sum(refute(mechanism(rng), curve).contradicts(confidence=1 - ERROR) for _ in range(EXPERIMENTS))
    assert wrong / EXPERIMENTS <= MOST


def test_lower_bounds_at_several_deltas_hold_all_at_once() -> None:
    """The union of their errors is no larger than one of them: their events are nested."""
    rng, curve = np.random.default_rng(52), [pair for pair in gaussian_curve(1.5) if 1e-9 < pair[1] < 1e-2]
    wrong = 0
    for _ in range(EXPERIMENTS // 4):
        scores = gaussian(1.5, 60, rng)
        wrong += any(both_ends_audit(scores, delta=delta).eps_lower > eps for eps, delta in curve[::3])
    assert wrong / (EXPERIMENTS // 4) <= ERROR + 3 * math.sqrt(ERROR * (1 - ERROR) / (EXPERIMENTS // 4))


def test_a_broken_claim_is_contradicted_by_another_pair_of_its_curve_where_the_printed_one_cannot_show_it() -> None:
    """At delta = 1 / (2 n), 256 canaries of 1,000 cost more than the alarm allows, however good the guesses are."""
    perfect = gaussian(40.0, 256, np.random.default_rng(53))
    curve = gaussian_curve(0.5)
    printed = min(curve, key=lambda pair: abs(pair[1] - 5e-4))
    assert 1 < printed[0] <= 2
    assert not refute(perfect, [printed]).contradicts(confidence=ALARM)
    found = refute(perfect, curve)
    assert found.contradicts(confidence=ALARM) and found.eps > printed[0] and found.delta < printed[1]


def test_more_pairs_and_better_guesses_only_lower_the_p_value() -> None:
    curve = gaussian_curve(0.5)
    by_leakage = [refute(gaussian(mu, 200, np.random.default_rng(54)), curve).p_value for mu in (0.0, 1.0, 2.0, 4.0)]
    assert all(one >= other for one, other in pairwise(by_leakage)) and by_leakage[-1] < 1e-4
    scores = gaussian(2.0, 200, np.random.default_rng(55))
    by_pairs = [refute(scores, curve[: 1 + size]).p_value for size in (0, 4, 8, 16)]
    assert all(one >= other for one, other in pairwise(by_pairs))


def test_the_number_of_guesses_is_fixed_by_the_number_of_canaries() -> None:
    rng = np.random.default_rng(56)
    found = [[guesses for guesses, _ in both_ends(gaussian(mu, 101, rng))] for mu in (0.0, 3.0)]
    assert found[0] == found[1] == [80, 50, 20]


def test_scores_that_are_all_equal_prove_nothing() -> None:
    coins = np.arange(100) % 2 == 0
    scores = CanaryScores.of(np.zeros(100), coins)
    assert both_ends_audit(scores, delta=0.0).eps_lower == 0.0
    assert refute(scores, [(0.0, 0.0)]).p_value == 1.0


def test_settings_out_of_range_are_refused_by_name() -> None:
    scores = CanaryScores([1.0, 2.0], [0.0, 1.5])
    with pytest.raises(ConfigurationError, match="no pair"):
        refute(scores, [])
    with pytest.raises(ConfigurationError, match="delta=2"):
        refute(scores, [(1.0, 2.0)])
    with pytest.raises(ConfigurationError, match="eps=-1"):
        refute(scores, [(-1.0, 0.0)])
    with pytest.raises(ConfigurationError, match="too few"):
        both_ends(CanaryScores([1.0], [0.0]))
    with pytest.raises(DataError):
        CanaryScores([], [1.0])
