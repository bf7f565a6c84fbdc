"""Shares of a gain: what they are, how sure they are, and where there are none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lit_dpret.errors import DataError
from reproduction.report.comparison import ModeRow, gain_shares, share_of_gain


def row(name: str, *runs: float) -> ModeRow:
    return ModeRow(name=name, per_run={"m": runs}, per_query={"m": [float(np.mean(runs))] * 4})


def test_the_start_keeps_nothing_and_the_bound_keeps_all() -> None:
    bound = [0.49, 0.50, 0.51]
    assert share_of_gain([0.4, 0.4], bound, 0.4).mean == pytest.approx(0.0)
    assert share_of_gain(bound, bound, 0.4).mean == pytest.approx(1.0)
    assert share_of_gain([0.38, 0.38], bound, 0.4).mean == pytest.approx(-0.2), "worse than the start is a loss"


def test_the_interval_holds_the_true_share_as_often_as_it_says() -> None:
    coins = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        system, bound = coins.normal(0.43, 0.004, 3), coins.normal(0.46, 0.004, 3)
        found = share_of_gain(system.tolist(), bound.tolist(), 0.40)
        held += found.low <= 0.5 <= found.high
    assert 0.93 <= held / 1000 <= 0.995


def test_with_one_run_there_is_no_interval() -> None:
    found = share_of_gain([0.45], [0.5, 0.51], 0.4)
    assert math.isnan(found.low) and math.isnan(found.high)


def test_a_bound_that_gains_nothing_is_no_bound() -> None:
    with pytest.raises(DataError, match="nothing to take a share of"):
        share_of_gain([0.45], [0.39, 0.4], 0.4)
    rows = [row("good", 0.45, 0.46), row("bad", 0.39, 0.38)]
    assert {share.bound for share in gain_shares(rows, rows, row("start", 0.4), "m")} == {"good"}
