"""The cap of a truncated batch is the smallest that is next to free, to within an eighth of a deviation."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from laws import DELTA, gaussian

from lit_dpret.privacy.accounting import accountant as accounting
from lit_dpret.privacy.accounting.accountant import calibrate_noise, choose_cap
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.accounting.releases import Poisson, TruncatedPoisson
from lit_dpret.privacy.budget import Neighbours

N, RATE, STEPS = 5000, 0.02, 300
STRIDE = math.ceil(math.sqrt(N * RATE * (1 - RATE)) / 8)


def increase(cap: int, noise: float, neighbours: Neighbours) -> float:
    """How much larger epsilon is under the cap, relative."""
    capped, plain = (
        epsilon([gaussian(noise, law, STEPS)], delta=DELTA, neighbours=neighbours)
        for law in (TruncatedPoisson(sample_rate=RATE, cap=cap, n=N), RATE)
    )
    return capped / plain - 1


@pytest.mark.parametrize("neighbours", get_args(Neighbours))
def test_one_step_below_the_chosen_cap_costs_more_than_half_a_per_cent(neighbours: Neighbours) -> None:
    noise = calibrate_noise(eps=0.7, delta=DELTA, neighbours=neighbours, law=Poisson(sample_rate=RATE), steps=STEPS)
    cap = choose_cap(n=N, sample_rate=RATE, steps=STEPS, eps=0.7, delta=DELTA, neighbours=neighbours)
    around = [increase(size, noise, neighbours) for size in range(cap - STRIDE, cap + STRIDE + 1)]
    assert around == sorted(around, reverse=True)  # a larger cap never costs more, so there is one boundary
    assert around[STRIDE] <= 0.005 < around[0]
    assert all(cost <= 0.005 for cost in around[STRIDE:])


QUICKSTART: dict[str, float] = {"n": 12_889, "sample_rate": 256 / 12_889, "steps": 60, "delta": 1 / (2 * 12_889)}


def chosen(monkeypatch: pytest.MonkeyPatch, *, copies: tuple[int, ...], neighbours: Neighbours = "zero_out",
           noise: float = 0.6882, **law: float) -> int:  # fmt: skip
    monkeypatch.setattr(accounting, "COPIES", copies)
    settings = QUICKSTART | law
    return choose_cap(
        n=int(settings["n"]), sample_rate=settings["sample_rate"], steps=int(settings["steps"]), eps=3.0,
        delta=settings["delta"], neighbours=neighbours, noise_multiplier=noise,
    )  # fmt: skip


def of_copies(cap: int, copies: int, noise: float = 0.6882, **law: float) -> float:
    s = QUICKSTART | law
    drawn = TruncatedPoisson(sample_rate=s["sample_rate"], cap=cap, n=int(s["n"]))
    return group_epsilon([gaussian(noise, drawn, int(s["steps"]))], delta=s["delta"], units=copies)


@pytest.mark.slow
def test_a_hundredth_of_the_cap_gives_five_and_ten_copies_a_number_at_the_quickstarts_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare, wider = (chosen(monkeypatch, copies=copies) for copies in ((), accounting.COPIES))
    assert of_copies(bare, 5) == of_copies(bare, 10) == math.inf
    assert bare < wider <= 1.01 * bare
    assert of_copies(wider, 5) < 16 and of_copies(wider, 10) < 40


@pytest.mark.slow
def test_a_cap_that_cannot_help_ten_copies_for_a_hundredth_helps_as_many_as_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    law = {"sample_rate": 128 / 12_889, "steps": 120, "noise": 0.6237}
    bare, wider = (chosen(monkeypatch, copies=copies, **law) for copies in ((), accounting.COPIES))
    assert (of_copies(bare, 5, **law), of_copies(wider, 10, **law)) == (math.inf, math.inf)
    assert bare < wider <= 1.01 * bare and of_copies(wider, 5, **law) < 16


@pytest.mark.slow
def test_a_cap_stays_as_it_is_where_copies_would_cost_more_or_have_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"n": 1000, "sample_rate": 0.03, "steps": 60, "noise": 0.9}
    caps = [chosen(monkeypatch, copies=copies, **few) for copies in ((), (10, 5, 2))]
    assert caps[0] == caps[1] < 100  # a hundredth of it is not a unit
    caps = [chosen(monkeypatch, copies=copies, neighbours="replace_one", noise=1.4) for copies in ((), (10, 5, 2))]
    assert caps[0] == caps[1]
