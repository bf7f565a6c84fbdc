"""One-run audits: published values, brute force, and mechanisms whose epsilon is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from canary_samples import PUBLISHED, flipped, quantiles
from scipy import stats
from scipy.stats import binom

from lit_dpret.audit.statistics import one_run
from lit_dpret.audit.statistics.error_rates import clopper_pearson_audit, clopper_pearson_counts
from lit_dpret.audit.statistics.evidence import Evidence, group_delta
from lit_dpret.audit.statistics.metrics import tpr_at_fpr
from lit_dpret.audit.statistics.one_run import (
    Curve,
    audit_power,
    both_ends,
    both_ends_audit,
    guess_extremes,
    one_run_audit,
    one_run_counts,
    one_run_p_value,
    perfect_scores,
    refute,
    unplanned_p_value,
)
from lit_dpret.audit.statistics.rank_epsilon import mean_rank_bound, top_rank_bound, top_rank_one_training
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.audit.statistics.thresholds import Bonferroni, Explicit, Split, Strategy
from lit_dpret.errors import ConfigurationError

HULL = Bonferroni(over="hull")


P_VALUE = cache(one_run_p_value)


@pytest.fixture(autouse=True)
def computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many audits ask for the same few p-values."""
    monkeypatch.setattr(one_run, "one_run_p_value", P_VALUE)


def direct_p_value(eps: float, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """The paper's sums term by term, without shortcuts."""
    rate = 1 / (1 + math.exp(-eps))
    mass = [math.comb(guesses, k) * rate**k * (1 - rate) ** (guesses - k) for k in range(guesses + 1)]
    beta = sum(mass[correct:])
    alpha = max((sum(mass[correct - i : correct]) / i for i in range(1, correct + 1)), default=0.0)
    return min(1.0, beta + 2 * canaries * delta * alpha)


@pytest.mark.parametrize("delta", [0.0, 1e-4, 0.02, 0.2])
def test_the_p_value_is_the_papers_sum_and_rises_with_epsilon_where_it_can_refute(delta: float) -> None:
    grid = np.linspace(0, 6, 61)
    for guesses in (1, 2, 5, 9):
        for correct in range(1, guesses + 1):
            counts = {"canaries": 10, "guesses": guesses, "correct": correct, "delta": delta}
            found = np.array([one_run_p_value(eps, **counts) for eps in grid])  # type: ignore[arg-type]
            direct = [direct_p_value(eps, 10, guesses, correct, delta) for eps in grid]
            assert found == pytest.approx(np.array(direct), abs=1e-12)
            # Proved where 2 m delta <= 1; beyond, it is seen to rise up to levels at which anybody tests.
            low = found[:-1] < 0.5
            assert (np.diff(found)[low] >= -1e-12).all() or 2 * 10 * delta > 1
            refuted = grid[found < 0.05]
            bound = one_run_counts(**counts).eps_lower  # type: ignore[arg-type]
            assert bound >= (refuted.max() if refuted.size else 0.0) - 1e-6


@pytest.mark.parametrize("eps", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.05])
def test_no_outcome_of_a_mechanism_that_spends_its_claim_is_likelier_than_its_p_value(eps: float, delta: float) -> None:
    """Randomised response that tells all coins with probability delta: (eps, delta)-DP for each coin."""
    rate = 1 / (1 + math.exp(-eps))
    for canaries in range(1, 13):
        for correct in range(1, canaries + 1):
            chance = delta + (1 - delta) * float(binom.sf(correct - 1, canaries, rate))
            bound = one_run_p_value(eps, canaries=canaries, guesses=canaries, correct=correct, delta=delta)
            assert chance <= bound + 1e-12


@pytest.mark.parametrize("strategy", [Bonferroni(), Bonferroni(over="doubling"), HULL])
@pytest.mark.parametrize("eps", [0.0, 1.0])
def test_choosing_among_thresholds_keeps_the_error_in_every_small_audit(strategy: Strategy, eps: float) -> None:
    """All label sequences of nine canaries in the order of scores, each in with probability e^eps / (1 + e^eps)."""
    rate, wrong = 1 / (1 + math.exp(-eps)), 0.0
    for labels in itertools.product([True, False], repeat=9):
        if 0 < sum(labels) < 9:
            scores = CanaryScores.of(np.arange(9.0), labels)
            if one_run_audit(scores, delta=0.0, confidence=0.8, strategy=strategy).eps_lower > eps:
                wrong += rate ** sum(labels) * (1 - rate) ** (9 - sum(labels))
    assert wrong <= 0.2


@pytest.mark.parametrize("copies", [2, 10])
def test_copies_of_a_canary_are_a_group_of_units(copies: int) -> None:
    single = one_run_counts(canaries=100, guesses=100, correct=90, delta=0.0).eps_lower
    assert one_run_counts(canaries=100, guesses=100, correct=90, delta=0.0, copies=copies).eps_lower == pytest.approx(
        single / copies, rel=1e-6
    )
    eps = one_run_counts(canaries=100, guesses=100, correct=90, delta=1e-5, copies=copies).eps_lower
    reached = one_run_p_value(copies * eps, canaries=100, guesses=100, correct=90, delta=group_delta(eps, 1e-5, copies))
    assert reached == pytest.approx(0.05, abs=1e-6)
    assert group_delta(eps, 1e-5, copies) == pytest.approx(1e-5 * math.expm1(copies * eps) / math.expm1(eps))


@pytest.mark.parametrize("shift", PUBLISHED)
def test_scores_over_the_hull_give_the_values_of_jax_privacy(shift: float) -> None:
    scores = quantiles(10_000, shift)
    found = {
        "one run": one_run_audit(scores, delta=1e-6, strategy=HULL).eps_lower,
        "error rates": clopper_pearson_audit(scores, delta=1e-6, strategy=HULL).eps_lower,
        "TPR at 0.1 %": tpr_at_fpr(scores, 0.001),
    }
    assert found == pytest.approx(PUBLISHED[shift], abs=2e-6)


@pytest.mark.parametrize(
    ("canaries", "eps", "delta", "error"), [(40, 0.0, 1e-3, 0.05), (40, 1.0, 0.01, 0.05), (20, 2.0, 0.05, 0.1)]
)
def test_a_delta_that_decides_how_many_are_guessed_is_paid_for(
    canaries: int, eps: float, delta: float, error: float
) -> None:
    """Every coin is told with probability delta, else noised as eps allows; then the best number is guessed."""
    rate = 1 / (1 + math.exp(-eps))
    enough: dict[int, int] = {}
    for guesses in range(1, canaries + 1):
        counts: dict[str, Any] = {"canaries": canaries, "guesses": guesses, "delta": delta, "error": error}
        rejected = (v for v in range(guesses + 1) if unplanned_p_value(eps, correct=v, **counts) < error)
        if (right := next(rejected, None)) is not None:
            enough[guesses] = right
    wrong = 0.0
    for told in range(canaries + 1):
        chances = [float(binom.sf(v - told - 1, r - told, rate)) for r, v in enough.items() if r >= told]
        wrong += float(binom.pmf(told, canaries, delta)) * max(chances, default=0.0)
    assert wrong <= error
    free, planned = (one_run_counts(**COUNTS, delta=0.0, planned=p).eps_lower for p in (False, True))
    assert free == planned
    dear, planned = (one_run_counts(**COUNTS, delta=1e-5, planned=p).eps_lower for p in (False, True))
    assert 0 < dear < planned
    found = [one_run_counts(**COUNTS, delta=1e-5, copies=k, planned=False).eps_lower for k in (1, 2, 5)]
    assert found == sorted(found, reverse=True)


def test_as_many_are_guessed_as_the_number_of_canaries_says_and_ties_never_help() -> None:
    scores = CanaryScores.of([3.0, 2.0, 2.0, 2.0, 1.0, 0.0], [True, True, False, True, False, True])
    found = {count: (scores.highest(count).guesses, scores.highest(count).tp) for count in (1, 2, 3, 4, 5)}
    assert found == {1: (1, 1), 2: (2, 1), 3: (3, 2), 4: (4, 3), 5: (5, 3)}
    plain = CanaryScores([3.0, 4.0, 5.0, 0.5], [0.0, 1.0, 2.0, 4.5])
    assert guess_extremes(plain, highest=3, lowest=2) == (5, 3)
    assert guess_extremes(plain, highest=0, lowest=0) == (0, 0)
    scores = CanaryScores([1.0, 1.0, 2.0], [1.0, 1.0, 0.0])
    # Of the four ties one is to be guessed in: an other. One is to be guessed out: a member.
    for (highest, lowest), told in {(1, 1): (2, 2), (2, 0): (2, 1), (0, 2): (2, 1), (4, 0): (4, 2)}.items():
        assert guess_extremes(scores, highest=highest, lowest=lowest) == told
    equal = CanaryScores(np.zeros(50), np.zeros(50))
    assert guess_extremes(equal, highest=30, lowest=20) == (50, 0)
    assert one_run_audit(equal, delta=0.0).eps_lower == 0.0
    for shift in (0.0, 3.0):
        assert [guesses for guesses, _ in both_ends(flipped(np.random.default_rng(56), 101, shift))] == [80, 50, 20]


PAIR = CanaryScores([1.0, 2.0], [0.0, 1.5])


@pytest.mark.parametrize(
    ("attempt", "named"),
    [
        *((lambda c=change: one_run_counts(**{"canaries": 10, "guesses": 5, "correct": 3, "delta": 1e-5} | c), name)
          for change, name in [
              ({"correct": 6}, "correct=6"), ({"guesses": 11}, "guesses=11"), ({"guesses": 0}, "correct=3"),
              ({"canaries": 0}, "canaries=0"), ({"correct": -1}, "correct=-1"), ({"correct": True}, "correct=True"),
              ({"correct": 2.0}, "correct=2.0"), ({"delta": 1.0}, "delta=1.0"), ({"delta": math.nan}, "delta=nan"),
              ({"confidence": 1.0}, "confidence=1.0"), ({"confidence": 0.0}, "confidence=0.0"),
              ({"copies": 0}, "copies=0"), ({"copies": 1.5}, "copies=1.5"),
          ]),
        (lambda: guess_extremes(PAIR, highest=3, lowest=2), "more than 4 canaries"),
        (lambda: refute(PAIR, []), "no pair"),
        (lambda: refute(PAIR, [(1.0, 2.0)]), "delta=2"),
        (lambda: refute(PAIR, [(-1.0, 0.0)]), "eps=-1"),
        (lambda: both_ends(CanaryScores([1.0], [0.0])), "too few"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_numbers_that_are_none_are_refused_by_name(attempt: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        attempt()


def test_the_best_of_several_thresholds_is_the_best_of_their_bounds_at_a_divided_error() -> None:
    for scores in (quantiles(40, 1.5), CanaryScores(np.arange(30) // 3 + 4.0, np.arange(25) // 2)):
        settings = {"delta": 1e-6, "confidence": 1 - 0.05 / len(scores)}
        every = [clopper_pearson_counts(scores.counts(t), **settings).eps_lower for t in scores.pooled]
        assert clopper_pearson_audit(scores, delta=1e-6).eps_lower == pytest.approx(max(every))
        sizes = [2**power for power in range(len(scores).bit_length())]
        bounds = [
            one_run_counts(
                canaries=len(scores), guesses=size, correct=scores.highest(size).tp, delta=1e-6,
                confidence=1 - 0.05 / len(sizes),
            ).eps_lower
            for size in sizes
        ]  # fmt: skip
        assert one_run_audit(scores, delta=1e-6).eps_lower == pytest.approx(max(bounds), rel=3e-7)


# -- published values and what an audit of a given size can prove --------------------------------


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "expected"),
    [
        (10, 10, 10, 0.0, 1.051873),
        (1000, 1000, 1000, 0.0, 5.809068),
        (1000, 100, 90, 0.0, 1.630823),
        (1000, 100, 90, 1e-5, 1.626143),
        (1000, 100, 60, 0.0, 0.051915),
        (1000, 100, 50, 0.0, 0.0),
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
    if guesses == correct == canaries:  # the plan of a run says the same
        [row] = audit_power(8.0, delta, canaries=(canaries,))
        assert row["at_best"] == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("canaries", [32, 65])
def test_no_scores_show_more_than_perfect_ones(canaries: int) -> None:
    best = perfect_scores(canaries)
    assert all(right == guesses for guesses, right in both_ends(best))
    claim = [(0.5, 1e-5), (1.0, 1e-7)]
    coins = np.random.default_rng(canaries)
    for _ in range(20):
        told = coins.random(canaries) < 0.5
        scores = CanaryScores.of(list(told + coins.normal(0, 0.3, canaries)), [bool(coin) for coin in told])
        for delta in (0.0, 1e-5):
            assert both_ends_audit(scores, delta=delta).eps_lower <= both_ends_audit(best, delta=delta).eps_lower
        assert refute(scores, claim).p_value >= refute(best, claim).p_value


# -- a claim is contradicted by a mechanism that breaks it, and hardly ever by one that keeps it, whatever its curve


EXPERIMENTS = 400
ERROR = 0.05
MOST = ERROR + 3 * math.sqrt(ERROR * (1 - ERROR) / EXPERIMENTS)
ALARM = 1 - 1e-4
COUNTS: dict[str, Any] = {"canaries": 1000, "guesses": 100, "correct": 90}


def gaussian_curve(mu: float) -> list[tuple[float, float]]:
    """The exact curve of a Gaussian mechanism whose neighbours are ``mu`` standard deviations apart."""
    phi = stats.norm.cdf
    return [(eps, float(phi(mu / 2 - eps / mu) - math.exp(eps) * phi(-mu / 2 - eps / mu)))
            for eps in np.linspace(0, 8, 17)]  # fmt: skip


def randomised_response(eps: float, canaries: int, rng: np.random.Generator) -> CanaryScores:
    """Each coin is told, truly with the probability that (eps, 0)-DP allows; ties are broken at random."""
    members = rng.random(canaries) < 0.5
    lies = rng.random(canaries) >= 1 / (1 + math.exp(-eps))
    return CanaryScores.of((members ^ lies) + 1e-6 * rng.random(canaries), members)


@pytest.mark.parametrize(
    ("mechanism", "curve"),
    [
        (lambda rng: flipped(rng, 100), [(0.0, 0.0)]),
        (lambda rng: flipped(rng, 100, 1.0), gaussian_curve(1.0)),
        (lambda rng: flipped(rng, 60, 2.0), gaussian_curve(2.0)),
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


def test_a_broken_claim_is_contradicted_by_another_pair_of_its_curve_where_the_printed_one_cannot_show_it() -> None:
    """At delta = 1 / (2 n), 256 canaries of 1,000 cost more than the alarm allows, however good the guesses are."""
    perfect = flipped(np.random.default_rng(53), 256, 40.0)
    curve = gaussian_curve(0.5)
    printed = min(curve, key=lambda pair: abs(pair[1] - 5e-4))
    assert 1 < printed[0] <= 2
    assert not refute(perfect, [printed]).contradicts(confidence=ALARM)
    found = refute(perfect, curve)
    assert found.contradicts(confidence=ALARM)
    assert found.eps > printed[0]
    assert found.delta < printed[1]


# -- without leakage nothing is found more often than allowed; with it, something is ---------------


DELTA = 1e-6


def extremes(scores: CanaryScores) -> Evidence:
    guesses, correct = guess_extremes(scores, highest=60, lowest=60)
    return one_run_counts(canaries=len(scores), guesses=guesses, correct=correct, delta=DELTA)


ON_SCORES: dict[str, Callable[[CanaryScores], Evidence]] = {
    "one run": partial(one_run_audit, delta=DELTA),
    "one run, explicit": partial(one_run_audit, delta=DELTA, strategy=Explicit(threshold=0.5)),
    "one run, split": partial(one_run_audit, delta=DELTA, strategy=Split()),
    "one run, both ways": extremes,
    "one run, both ends": partial(both_ends_audit, delta=DELTA),
    "error rates": partial(clopper_pearson_audit, delta=DELTA),
    "error rates, hull": partial(clopper_pearson_audit, delta=DELTA, strategy=HULL),
    "error rates, explicit": partial(clopper_pearson_audit, delta=DELTA, strategy=Explicit(threshold=0.5)),
    "error rates, split": partial(clopper_pearson_audit, delta=DELTA, strategy=Split()),
}


@cache
def without_leakage() -> tuple[CanaryScores, ...]:
    rng = np.random.default_rng(2305)
    return tuple(flipped(rng, 400) for _ in range(EXPERIMENTS))


@pytest.mark.like(3)
@pytest.mark.parametrize("name", ON_SCORES)
def test_scores_without_leakage_are_rarely_evidence(name: str) -> None:
    found = [ON_SCORES[name](scores).eps_lower > 0 for scores in without_leakage()]
    assert np.mean(found) <= MOST


@pytest.mark.parametrize("name", ON_SCORES)
def test_scores_with_leakage_are_evidence(name: str) -> None:
    rng = np.random.default_rng(9)
    assert np.mean([ON_SCORES[name](flipped(rng, 400, shift=1.5)).eps_lower > 0 for _ in range(20)]) >= 0.8


ON_RANKS: dict[str, Callable[[np.ndarray], Evidence]] = {
    "mean": lambda ranks: mean_rank_bound(ranks, candidates=100, copies=10),
    "top 5": lambda ranks: top_rank_bound(int((ranks <= 5).sum()), len(ranks), candidates=100, top=5),
    "top 5, one training": lambda ranks: top_rank_one_training(
        int((ranks <= 5).sum()), len(ranks), candidates=100, top=5
    ),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_without_leakage_are_rarely_evidence_and_low_ones_are(name: str) -> None:
    rng = np.random.default_rng(7)
    found = [ON_RANKS[name](rng.integers(1, 101, 100)).eps_lower > 0 for _ in range(EXPERIMENTS)]
    assert np.mean(found) <= MOST
    assert ON_RANKS[name](np.minimum(rng.integers(1, 101, 100), rng.integers(1, 101, 100)) // 2 + 1).eps_lower > 0
