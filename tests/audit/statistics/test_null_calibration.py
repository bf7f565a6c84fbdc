"""Where nothing leaks, nothing is found more often than is allowed; and where something leaks, it is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
from canary_samples import flipped

from lit_dpret.audit.statistics import one_run
from lit_dpret.audit.statistics.error_rates import clopper_pearson_audit
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.one_run import (
    both_ends_audit,
    guess_extremes,
    one_run_audit,
    one_run_counts,
)
from lit_dpret.audit.statistics.rank_epsilon import mean_rank_bound, top_rank_bound, top_rank_one_training
from lit_dpret.audit.statistics.scores import CanaryScores
from lit_dpret.audit.statistics.thresholds import Bonferroni, Explicit, Split

EXPERIMENTS = 400
ERROR = 0.05
MOST = ERROR + 3 * math.sqrt(ERROR * (1 - ERROR) / EXPERIMENTS)
HULL, DELTA = Bonferroni(over="hull"), 1e-6


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


@pytest.fixture(autouse=True)
def computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many audits ask for the same few p-values."""
    monkeypatch.setattr(one_run, "one_run_p_value", P_VALUE)


P_VALUE = cache(one_run.one_run_p_value)


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
