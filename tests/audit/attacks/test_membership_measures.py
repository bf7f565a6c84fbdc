"""How good an attack was, and when that is more than a claim allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

from lit_dpret.audit.attacks.membership import RATES, Promise, exceeded, half_accuracy, measure
from lit_dpret.audit.statistics.metrics import auc, bootstrap, tpr_at_fpr
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.privacy.accounting.ceilings import attack_ceilings
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease

SHIFT = 0.8
RELEASE = GaussianRelease(noise_multiplier=1 / SHIFT, law=FullBatch(), label="one Gaussian sum")


def told(accuracy: float, rates: list[float]) -> dict:
    """The ceilings of a release that tells nothing (one half), or everything."""
    return {
        "tpr_at_fpr": {f"{rate:g}": rate if accuracy < 1 else 1.0 for rate in rates}, "membership_accuracy": accuracy,
    }  # fmt: skip


def test_a_perfect_attack_exceeds_every_ceiling_but_certainty() -> None:
    scores = CanaryScores(np.arange(2000) + 5000.0, np.arange(2000))
    assert len(exceeded(scores, partial(told, 0.5), error=0.01)) == len(RATES) + 1
    assert exceeded(scores, partial(told, 1.0), error=0.01) == ()
    assert exceeded(CanaryScores([1.0], [0.0]), partial(told, 0.5), error=0.05) == ()  # of a few texts
    for inside, outside, share in (([3, 4], [1, 2], 1.0), ([1, 2], [3, 4], 0.0), ([1, 1], [1, 1], 0.5)):
        assert half_accuracy(CanaryScores(inside, outside)) == share, "the higher half, without knowing a member"


def test_evidence_is_asked_for_where_coins_were_tossed_and_divided_among_the_attacks() -> None:
    scores = CanaryScores(np.arange(200) + 1000.0, np.arange(200))
    alone, one_of_ten = (measure("x", scores, Promise(delta=1e-6), attacks=count, resamples=10) for count in (1, 10))
    assert alone.evidence is not None
    assert one_of_ten.evidence is not None
    assert alone.evidence.eps_lower > one_of_ten.evidence.eps_lower > 0
    assert one_of_ten.evidence.confidence == pytest.approx(0.995)
    assert measure("x", scores, resamples=10).evidence is None
    assert set(measure("x", scores, resamples=10).to_dict()["tpr_at_fpr"]) == {"0.1", "0.01", "0.001"}
    found = measure("x", scores, Promise(delta=1e-9, epsilon=1.0), resamples=10)
    assert [one.what for one in found.exceeded] == ["epsilon at delta=1e-09"]
    assert measure("x", scores, Promise(delta=1e-9, epsilon=8.0), resamples=10).exceeded == ()
    statistics = {"a": auc, "b": partial(tpr_at_fpr, fpr=0.1)}  # several intervals are those of each alone
    both = bootstrap(statistics, scores, resamples=50)
    assert both == {name: bootstrap({"": one}, scores, resamples=50)[""] for name, one in statistics.items()}


# -- against the accountant ------------------------------------------------------------------------


@lru_cache
def ceilings_of_a_gaussian(rates: tuple[float, ...]) -> Mapping[str, Any]:
    return attack_ceilings([RELEASE], neighbours="zero_out", false_positive_rates=rates)


def by_the_accountant(rates: Sequence[float]) -> Mapping[str, Any]:
    return ceilings_of_a_gaussian(tuple(rates))


def test_the_best_attack_on_a_gaussian_is_rarely_called_above_its_ceiling_and_on_half_the_noise_it_is() -> None:
    """The likelihood ratio is the best that the claim allows: at error 0.2, in 100 audits of 1,000 scores a side."""
    wrong = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        scores = CanaryScores(rng.normal(SHIFT, 1, 1000), rng.normal(0, 1, 1000))
        wrong += bool(exceeded(scores, by_the_accountant, error=0.2))
    assert wrong <= 20 + 3 * 4
    scores = CanaryScores(rng.normal(2 * SHIFT, 1, 1000), rng.normal(0, 1, 1000))
    found = measure("x", scores, Promise(ceilings=by_the_accountant), alarm=0.9999, attacks=10, resamples=10)
    assert "the balanced accuracy" in {one.what for one in found.exceeded}
    known = by_the_accountant([0.01, 0.02, 0.1])["tpr_at_fpr"]
    assert known["0.01"] < known["0.02"] < known["0.1"]
    usual = attack_ceilings([RELEASE], neighbours="zero_out")["tpr_at_fpr"]
    assert (known["0.01"], known["0.1"]) == (usual["0.01"], usual["0.1"])
