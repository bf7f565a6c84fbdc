"""What ranks and leaks of several trainings prove, and that nothing passes a ceiling unseen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from lit_dpret.audit.canaries.findings import ALARM, POOLED, Limits, Outcome, cells_of, share
from lit_dpret.audit.statistics.rank_epsilon import mean_rank_bound, top_rank_bound, top_rank_one_training
from lit_dpret.errors import DataError

KINDS = ("digits", "own_passage", "random_passage")


def outcomes(ranks: dict[int, list[int]], *, copies: int = 10, found: int = 0, side: str = "query") -> list[Outcome]:
    """Ranks by training, one for each kind in turn."""
    return [
        Outcome(training=training, kind=KINDS[place % 3], side=side, copies=copies, rank=rank, exposure=1.0, draws=20,
                found=found, chance=0.25)
        for training, row in ranks.items() for place, rank in enumerate(row)
    ]  # fmt: skip


def test_canaries_that_share_a_training_are_bounded_as_such_and_single_ones_as_independent() -> None:
    extra = Outcome(
        training=0, kind="echo", side="query", copies=10, rank=1, exposure=6.6, draws=20, found=20, chance=1.0
    )
    ranks = outcomes({0: [1, 1, 1], 1: [1, 1, 7], 2: [1, 1, 1]})
    cells = cells_of([*ranks, extra], candidates=100, limits={}, delta=1e-6)
    kinds = {POOLED: 9, "digits": 3, "own_passage": 3, "random_passage": 3, "echo": 1}
    assert {cell.kind: cell.canaries for cell in cells} == kinds, "other kinds are not pooled with the papers'"
    pooled = cells[0]
    digits = next(cell for cell in cells if cell.kind == "digits")
    assert pooled.top.mean == pytest.approx(8 / 9)
    assert pooled.bounds[0] == top_rank_one_training(8, 9, candidates=100, copies=10)
    assert pooled.bounds[0].delta == 0
    assert digits.bounds[0] == top_rank_bound(3, 3, candidates=100, copies=10, delta=1e-6)
    assert digits.bounds[1] == mean_rank_bound([1, 1, 1], candidates=100, copies=10, delta=1e-6)
    assert pooled.bounds[-1].confidence is None  # the papers' number has none, and is not the first


def test_the_interval_of_a_share_counts_trainings_and_covers_the_truth_where_canaries_rise_and_fall_together() -> None:
    """100 canaries in two trainings are no better than two coins."""
    two = cells_of(outcomes({0: [1] * 50, 1: [1] * 50}), candidates=100, limits={})[0].top
    assert (two.mean, two.low, two.high) == (1.0, pytest.approx(0.025**0.5), 1.0)
    assert share([0.5, 0.5, 0.0]).low <= share([1.0, 0.0, 0.0]).low
    rng, missed = np.random.default_rng(0), 0
    for _ in range(400):
        found = share((rng.random(8) < 0.3).astype(float).tolist())
        missed += not found.low <= 0.3 <= found.high
    assert missed <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05 * 0.95)


def test_what_is_measured_above_its_ceiling_is_a_contradiction_and_nothing_else_is() -> None:
    limits = {10: Limits(top=0.3, mean_rank=10.0, leak=1e-3, eps=0.05, delta=1e-5)}
    broken = cells_of(outcomes({i: [1, 1, 1] for i in range(40)}, found=3), candidates=100, limits=limits, delta=1e-5)
    for cell in broken:
        assert {"the share of rank 1", "the leaked share"} <= {excess.what for excess in cell.excesses}
    assert any(excess.evidence is not None for cell in broken for excess in cell.excesses)
    honest = cells_of(outcomes({i: [50, 30, 70] for i in range(40)}), candidates=100, limits=limits, delta=1e-5)
    assert not any(cell.excesses for cell in honest)
    few = cells_of(outcomes({0: [1, 1, 1]}, found=1), candidates=100, limits={10: Limits(top=0.3, eps=16.0)})
    assert not any(cell.excesses for cell in few)  # three hits in one training prove nothing at 1 - 1e-4


def test_a_mechanism_at_its_ceiling_is_contradicted_with_no_more_than_the_allowed_probability() -> None:
    """Rank 1 exactly as often as the claim allows, in ten trainings: every outcome, by its probability."""
    limits, chance = {1: Limits(top=0.3, mean_rank=1.0, leak=1.0, eps=math.log(30), delta=0.0)}, 0.0
    for hits in range(11):
        ranks = {i: [1 if i < hits else 50] for i in range(10)}
        digits = next(cell for cell in cells_of(outcomes(ranks, copies=1), candidates=100, limits=limits, cells=4)
                      if cell.kind == "digits")  # fmt: skip
        chance += float(binom.pmf(hits, 10, 0.3)) * bool(digits.contradictions)
    assert 0 < chance <= ALARM / 4


def test_every_statement_of_a_cell_and_every_table_shares_the_error_of_a_contradiction() -> None:
    """Shares of rank 1 and of leaks, two bounds: four chances to be wrong about a cell, and eight in two tables."""
    ranks, limits = {i: [1, 1, 1] for i in range(4)}, {10: Limits(top=0.3, leak=1e-3, eps=0.05, delta=1e-5)}
    for tables in (1, 2):
        cells = cells_of(outcomes(ranks), candidates=100, limits=limits, tables=tables)
        errors = [1 - one.confidence for cell in cells for one in cell.alarms if one.confidence is not None]
        assert errors == pytest.approx([ALARM / (4 * 4 * tables)] * len(errors), rel=1e-6)


def test_a_mechanism_that_tells_all_secrets_with_probability_delta_is_not_contradicted_for_it() -> None:
    """It is (0, delta)-DP, and delta is more than the allowed error: all ranks in one training are 1 that often."""
    limits = {1: Limits(top=0.5, leak=1.0, eps=0.5, delta=1e-3)}
    told = cells_of(outcomes({0: [1] * 9}, copies=1), candidates=100, limits=limits, delta=1e-3)
    assert not any(cell.contradictions for cell in told)
    pure = cells_of(outcomes({0: [1] * 9}, copies=1), candidates=100, limits={1: Limits(top=0.5, eps=0.5)}, delta=0.0)
    assert pure[0].contradictions  # where nothing may be told with any probability, the same ranks are one
    small = {1: Limits(top=0.5, leak=1.0, eps=0.5, delta=1e-7)}
    told = cells_of(outcomes({0: [1] * 9}, copies=1), candidates=100, limits=small, delta=1e-7)
    assert "at delta=1e-07" in told[0].contradictions[0]


def test_secrets_that_were_never_planted_are_evidence_with_no_more_than_the_allowed_probability() -> None:
    """Uniform ranks of 15 canaries in five trainings: every number of them in first place, by its probability."""
    chance = 0.0
    for hits in range(16):
        ranks = [1] * hits + [50] * (15 - hits)
        cell = cells_of(outcomes({i: ranks[3 * i : 3 * i + 3] for i in range(5)}, copies=1), candidates=100, limits={})[
            0
        ]
        chance += float(binom.pmf(hits, 15, 0.01)) * (cell.bounds[0].eps_lower > 0)
    assert 0 < chance <= 0.05


def test_an_outcome_is_read_from_what_was_stored_and_mixed_files_are_refused() -> None:
    score: dict[str, Any] = {
        "name": "a", "kind": "digits", "side": "query", "copies": 1, "rank": 3, "exposure": 5.0,
        "log_probability": None, "never_drawn": True,
    }  # fmt: skip
    leak = {"name": "a", "draws": 5, "found": 0}
    assert Outcome.of(2, score, leak).chance == 0.0
    assert Outcome.of(2, {**score, "never_drawn": False}, leak).chance is None
    assert Outcome.of(2, {**score, "never_drawn": False, "log_probability": math.log(0.5)}, leak).chance == 0.5
    with pytest.raises(DataError, match="canary a"):
        Outcome.of(0, score, {**leak, "name": "b"})
    with pytest.raises(DataError):
        cells_of([], candidates=100, limits={})
