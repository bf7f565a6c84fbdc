"""Membership scores from a matrix of shadow signals: by hand, and on models that leak by a known amount."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from lit_dpret.audit.attacks.membership import exceeded
from lit_dpret.audit.statistics.metrics import auc
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.audit.statistics.shadow import (
    ShadowMatrix,
    balanced_halves,
    counterfactual_memorisation,
    lira_offline,
    lira_online,
    logit,
    offline_slope,
    rmia,
    shadow_scores,
)
from lit_dpret.errors import ConfigurationError, DataError

SIGNALS = np.array([[1.0, 1.2, 0.8, 1.1, 0.0, 0.2, -0.1, 0.1]]).T
INCLUDED = np.array([[True] * 4 + [False] * 4]).T


def test_the_likelihood_ratio_is_that_worked_by_hand_and_each_side_has_its_own_deviation() -> None:
    """The members' signals are twice as wide here; a program that takes their deviation for both would differ."""
    assert lira_online([0.9], SIGNALS, INCLUDED)[0] == pytest.approx(28.105906, abs=1e-6)
    assert lira_offline([0.9], SIGNALS, INCLUDED)[0] == pytest.approx(7.602631, abs=1e-6)
    signals = np.array([[2.0, 6.0, 1.0, 0.0, -1.0, 1.0], [3.0, 5.0, 0.0, 2.0, 0.5, 1.5]]).T
    included = np.array([[True, True, False, False, False, False]] * 2).T
    sides = signals[included].reshape(2, 2), signals[~included].reshape(4, 2)
    deviations: dict[Any, Any] = {
        "example": [side.std(0) for side in sides], "pooled": [np.sqrt(side.var(axis=0).mean()) for side in sides],
    }  # fmt: skip
    for target in ([3.0, 1.0], [0.0, 4.0]):
        for spread, deviation in deviations.items():
            inside, outside = (norm.logpdf(target, np.median(s, 0), d) for s, d in zip(sides, deviation, strict=True))
            assert lira_online(target, signals, included, spread=spread) == pytest.approx(inside - outside)


def leaky(models: int, examples: int, leak: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signals whose level differs from example to example far more than membership moves them."""
    rng = np.random.default_rng(3)
    included = rng.random((models, examples)) < 0.5
    return rng.normal(0, 5, examples) + leak * included + rng.normal(size=(models, examples)), included, included[0]


@pytest.mark.parametrize("spread", ["example", "pooled"])
def test_shadow_models_find_what_a_common_threshold_hides_and_nothing_without_leakage(spread: Any) -> None:
    signals, included, members = leaky(41, 500, 2.0)
    target, shadow, known = signals[0], signals[1:], included[1:]
    best = norm.cdf(2 / np.sqrt(2))
    plain = auc(CanaryScores.of(target, members))
    online = auc(CanaryScores.of(lira_online(target, shadow, known, spread=spread), members))
    offline = auc(CanaryScores.of(lira_offline(target, shadow, known, spread=spread), members))
    assert plain < 0.65 < best - 0.06 < offline < best + 0.03
    assert best - 0.06 < online < best + 0.03
    assert np.isfinite(lira_offline(target, shadow, np.zeros_like(known), spread=spread)).all()
    signals, included, members = leaky(41, 800, 0.0)
    for score in (lira_online, lira_offline):
        found = auc(CanaryScores.of(score(signals[0], signals[1:], included[1:], spread=spread), members))
        assert found == pytest.approx(0.5, abs=3 * 0.0204)


def test_relative_membership_is_the_share_of_texts_that_an_example_outweighs() -> None:
    target, shadow = [0.5, 0.1], [[0.2, 0.1], [0.3, 0.3]]
    others, others_shadow = [0.2, 0.4, 0.01], [[0.2, 0.1, 0.3], [0.2, 0.3, 0.1]]
    a, gamma = 0.4, 1.2
    weight = [p / (0.5 * ((1 + a) * out + 1 - a)) for p, out in ((0.5, 0.25), (0.1, 0.2))]
    against = [p / (0.5 * ((1 + a) * out + 1 - a)) for p, out in ((0.2, 0.2), (0.4, 0.2), (0.01, 0.2))]
    expected = [np.mean([x / z >= gamma for z in against]) for x in weight]
    found = rmia(target, shadow, others, others_shadow, gamma=gamma, offline_slope=a)
    assert found == pytest.approx(expected)
    assert expected == [pytest.approx(2 / 3), pytest.approx(1 / 3)]


def test_memorisation_is_the_difference_of_two_means() -> None:
    assert counterfactual_memorisation(SIGNALS, INCLUDED) == pytest.approx([1.025 - 0.05])
    signals, included, _ = leaky(200, 30, 0.7)
    assert counterfactual_memorisation(signals, included).mean() == pytest.approx(0.7, abs=0.1)


def test_a_logit_keeps_what_is_near_certainty() -> None:
    assert logit([np.log(0.25), np.log(0.5)]) == pytest.approx([-np.log(3), 0.0])
    assert logit([-1e-18])[0] == pytest.approx(-np.log(1e-18))


@pytest.mark.parametrize(
    ("attempt", "error", "named"),
    [
        *((lambda a=arguments: lira_online(*a), DataError, named) for arguments, named in [
            (([0.9], [0.1, 0.2], [True, False]), r"\(models, examples\)"),
            (([0.9], SIGNALS, INCLUDED.astype(int)), "included"),
            (([0.9], SIGNALS, INCLUDED[1:]), "included"),
            (([0.9, 1.0], SIGNALS, INCLUDED), "target"),
            (([np.nan], SIGNALS, INCLUDED), "NaN"),
            (([0.9], np.where(SIGNALS == 1.0, np.inf, SIGNALS), INCLUDED), "infinite"),
            (([0.9], SIGNALS, np.ones_like(INCLUDED)), "1 of 1 examples lack models"),
            (([0.9], SIGNALS, np.zeros_like(INCLUDED)), "1 of 1 examples lack models"),
            (([0.9], np.ones_like(SIGNALS), INCLUDED), "spread='pooled'"),
        ]),
        (lambda: lira_online([0.9], SIGNALS, INCLUDED, spread="mode"), ConfigurationError, "spread='mode'"),  # type: ignore[arg-type]
        (lambda: rmia([0.5], [[0.5]], [0.5], [[0.5]], gamma=0), ConfigurationError, "gamma=0"),
        (lambda: rmia([0.5], [[0.5, 0.5]], [0.5], [[0.5]]), DataError, "shape"),
        (lambda: rmia([0.0], [[0.5]], [0.5], [[0.5]]), DataError, "Probabilities must be"),
        (lambda: logit([0.0, -1.0]), DataError, "1 of 2"),
        *((lambda m=models: balanced_halves(10, m, seed=0), ConfigurationError, "shadows") for models in (2, 5, True)),
    ],
)  # fmt: skip
def test_what_is_no_shadow_matrix_or_probability_is_refused(
    attempt: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        attempt()


# -- the shadow matrix, and the attacks that are read off it


TEXTS, MODELS = 300, 8


def simulated(leak: float, *, seed: int = 0, scale: float = 1.0) -> tuple[dict, ShadowMatrix, np.ndarray, np.ndarray]:
    """A target and shadow models whose members are ``leak`` likelier per token, each text as hard as it is."""
    rng = np.random.default_rng(seed)
    hardness = -2.0 - 3 * rng.random(TEXTS)
    included = balanced_halves(TEXTS, MODELS, seed=seed)
    member = rng.random(TEXTS) < 0.5

    def signals(inside: np.ndarray) -> dict[str, np.ndarray]:
        loss = hardness + leak * inside + 0.1 * scale * rng.standard_normal(inside.shape)
        return {"loss": loss, "logit": loss - np.log(-np.expm1(loss))}

    matrix = ShadowMatrix(signals(included), included)
    population = np.flatnonzero(~member)[:50]
    return signals(member), matrix, member, population


def chance(rates: list[float]) -> dict:
    """The ceilings of a release that tells nothing."""
    return {"tpr_at_fpr": {f"{rate:g}": rate for rate in rates}, "membership_accuracy": 0.5}


def test_every_text_is_in_half_of_the_models_and_its_signals_outside_are_those_of_the_others() -> None:
    found = balanced_halves(501, 8, seed=3)
    assert (found.sum(axis=0) == 4).all()
    assert found.sum(axis=1).min() > 200
    assert (found == balanced_halves(501, 8, seed=3)).all()
    assert (found != balanced_halves(501, 8, seed=4)).any()
    included = balanced_halves(20, 6, seed=1)
    matrix = ShadowMatrix({"loss": np.where(included, 1.0, -np.arange(1, 121).reshape(6, 20))}, included)
    outside = matrix.outside("loss")
    assert outside.shape == (3, 20)
    assert (outside < 0).all()
    assert all(len(set(column)) == 3 for column in outside.T)


def test_shadow_attacks_find_members_that_the_loss_alone_does_not() -> None:
    target, matrix, member, population = simulated(0.3)
    attacked = np.setdiff1d(np.arange(TEXTS), population)
    found = shadow_scores(target, matrix, population=population)
    assert set(found) == {"lira_online_logit", "lira_offline_logit", "rmia"}
    alone = auc(CanaryScores.of(target["loss"][attacked], member[attacked]))
    for scores in found.values():
        assert auc(CanaryScores.of(scores[attacked], member[attacked])) > max(0.9, alone + 0.2)
    assert 0 <= offline_slope(matrix, population) <= 1
    with pytest.raises(DataError, match="RMIA"):
        shadow_scores(target, matrix, population=np.array([], dtype=int))


@pytest.mark.costly
def test_without_a_leak_no_attack_is_told_from_chance_more_often_than_its_confidence_allows() -> None:
    """100 targets without a leak: bounds of all attacks together may be wrong about one in twenty of them."""
    wrong = 0
    for seed in range(100):
        target, matrix, member, population = simulated(0.0, seed=seed)
        attacked = np.setdiff1d(np.arange(TEXTS), population)
        found = shadow_scores(target, matrix, population=population)
        flagged = [
            exceeded(CanaryScores.of(scores[attacked], member[attacked]), chance, error=0.05 / len(found))
            for scores in found.values()
        ]
        wrong += any(flagged)
    assert wrong <= 5 + 3 * 100 * (0.05 * 0.95 / 100) ** 0.5
