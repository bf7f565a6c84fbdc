"""The shadow matrix, the attacks that are read off it, and what is measured of them."""

from __future__ import annotations

import numpy as np
import pytest

from lit_dpret.audit.attacks.membership import exceeded
from lit_dpret.audit.statistics.metrics import auc
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.audit.statistics.shadow import ShadowMatrix, balanced_halves, offline_slope, shadow_scores
from lit_dpret.errors import ConfigurationError, DataError

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


def test_every_text_is_in_half_of_the_models_and_halves_are_repeatable() -> None:
    found = balanced_halves(501, 8, seed=3)
    assert (found.sum(axis=0) == 4).all() and found.sum(axis=1).min() > 200
    assert (found == balanced_halves(501, 8, seed=3)).all() and (found != balanced_halves(501, 8, seed=4)).any()


@pytest.mark.parametrize("models", [2, 5, True])
def test_an_odd_number_of_models_or_too_few_are_refused(models: int) -> None:
    with pytest.raises(ConfigurationError, match="even number from 4"):
        balanced_halves(10, models, seed=0)


def test_signals_outside_are_those_of_models_without_the_text() -> None:
    included = balanced_halves(20, 6, seed=1)
    matrix = ShadowMatrix({"loss": np.where(included, 1.0, -np.arange(1, 121).reshape(6, 20))}, included)
    outside = matrix.outside("loss")
    assert outside.shape == (3, 20) and (outside < 0).all()
    assert all(len(set(column)) == 3 for column in outside.T)


def test_shadow_attacks_find_members_that_the_loss_alone_does_not() -> None:
    target, matrix, member, population = simulated(0.3)
    attacked = np.setdiff1d(np.arange(TEXTS), population)
    found = shadow_scores(target, matrix, population=population)
    assert set(found) == {"lira_online_logit", "lira_offline_logit", "rmia"}
    alone = auc(CanaryScores.of(target["loss"][attacked], member[attacked]))
    for scores in found.values():
        assert auc(CanaryScores.of(scores[attacked], member[attacked])) > max(0.9, alone + 0.2)


def test_the_slope_is_the_one_with_which_a_known_model_is_attacked_best() -> None:
    _, matrix, _, population = simulated(0.3)
    assert 0 <= offline_slope(matrix, population) <= 1
    with pytest.raises(DataError, match="RMIA needs texts that the target was not trained on"):
        shadow_scores(simulated(0.3)[0], matrix, population=np.array([], dtype=int))


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
