"""A start is charged to a data set once, however many runs begin with its weights, and never less than once."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from cards import rewrite_chain

from lit_dpret.errors import BudgetExceededError, ConfigurationError, LedgerError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease, Release
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.ledger.dataset_file import Charge, EarlierRun
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger

DELTA = 1e-5


def fit(noise: float = 20.0, count: int = 4, label: str = "training step") -> list[Release]:
    """One training; unsampled, so that a composition takes no time."""
    return [GaussianRelease(noise_multiplier=noise, law=FullBatch(), count=count, label=label)]


def cost(*fits: list[Release]) -> float:
    return epsilon([release for one in fits for release in one], delta=DELTA, neighbours="zero_out")


def ledger(folder: Path, total_eps: float | None, sweep: str | None = None) -> DatasetLedger:
    budget = PrivacyBudget(eps=3.0, delta=DELTA)
    return DatasetLedger(folder / "data.jsonl", total_eps=total_eps, budget=budget, sweep=sweep)


START = EarlierRun("run", "head", tuple(fit(8.0, 6, "earlier run")))


def child(own: list[Release] | None = None, *earlier: EarlierRun) -> Charge:
    return Charge.of(own or fit(), earlier or (START,))


def begin(folder: Path, run: str, planned: Charge, *, sweep: str | None = None, total_eps: float | None = 9.0) -> float:
    book = ledger(folder, total_eps, sweep)
    return book.reserve(run, spent=Charge.of([], planned.earlier), planned=planned, heads=["h"], name=run).epsilon


def settle(folder: Path, run: str, spent: Charge) -> float:
    return ledger(folder, None).settle(run, spent=spent, heads=["h"], name=run).epsilon


def test_a_sweep_of_one_start_holds_it_once_and_so_do_its_trials_in_any_order(tmp_path: Path) -> None:
    places = [child(fit(20.0)), child(fit(15.0)), child(fit(10.0))]
    whole = cost(fit(20.0), fit(15.0), fit(10.0), list(START.releases))
    for number, order in enumerate(permutations(places)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert ledger(folder, 9.0).hold("s", places, name="sweep").epsilon == pytest.approx(whole)
        for place in order:
            assert begin(folder, str(place.own), place, sweep="s") == pytest.approx(whole)
        for place in order:
            assert settle(folder, str(place.own), place) == pytest.approx(whole)


def test_a_limit_for_the_start_once_is_enough_and_the_next_smaller_one_holds_nothing(tmp_path: Path) -> None:
    whole = cost(*[fit()] * 4, list(START.releases))
    with pytest.raises(BudgetExceededError, match="total_eps"):
        ledger(tmp_path, whole * (1 - 1e-6)).hold("s", [child()] * 4, name="sweep")
    assert not (tmp_path / "data.jsonl").exists()
    ledger(tmp_path, whole * (1 + 1e-9)).hold("s", [child()] * 4, name="sweep")
    with pytest.raises(BudgetExceededError, match="total_eps"):
        begin(tmp_path, "stranger", child(), total_eps=None)


def test_no_order_of_settling_failing_and_giving_back_takes_away_a_start_that_a_run_began_with(tmp_path: Path) -> None:
    start = cost(list(START.releases))
    ledger(tmp_path, 9.0).hold("s", [child()] * 3, name="sweep")
    nothing = Charge.of([], (START,))
    begin(tmp_path, "failed", child(), sweep="s")
    settle(tmp_path, "failed", nothing)
    ledger(tmp_path, None).give_back("s")
    assert ledger(tmp_path, None).total().epsilon == pytest.approx(start)
    begin(tmp_path, "failed", child())  # resumed
    assert ledger(tmp_path, None).total().epsilon == pytest.approx(cost(fit(), list(START.releases)))
    assert begin(tmp_path, "later", child()) == pytest.approx(cost(fit(), fit(), list(START.releases)))


def test_a_refused_run_settles_to_what_it_spent_and_its_start(tmp_path: Path) -> None:
    limit = cost(fit(), list(START.releases)) * 1.01
    begin(tmp_path, "a", child(), total_eps=limit)
    with pytest.raises(BudgetExceededError, match="total_eps"):
        begin(tmp_path, "a", child(fit(2.0)), total_eps=None)
    assert ledger(tmp_path, None).total().epsilon == pytest.approx(cost(list(START.releases)))


@pytest.mark.parametrize(
    "other",
    [
        replace(START, run="another run"),
        replace(START, head="another state, as of a copy that went on by itself"),
        replace(START, releases=tuple(fit(8.0, 7))),
    ],
    ids=["run", "head", "releases"],
)
def test_what_is_not_the_same_start_in_every_part_is_counted_beside_it(other: EarlierRun, tmp_path: Path) -> None:
    begin(tmp_path, "a", child())
    found = begin(tmp_path, "b", child(fit(), other))
    assert found == pytest.approx(cost(fit(), fit(), list(START.releases), list(other.releases)))


def test_a_trial_takes_over_no_reservation_for_another_start_or_for_none(tmp_path: Path) -> None:
    other = replace(START, run="another run")
    ledger(tmp_path, 9.0).hold("s", [child(), Charge.of(fit())], name="sweep")
    with pytest.raises(ConfigurationError, match="holds no reservation"):
        begin(tmp_path, "b", child(fit(), other), sweep="s")
    before = ledger(tmp_path, None).total().epsilon
    begin(tmp_path, "plain", Charge.of(fit()), sweep="s")
    with pytest.raises(ConfigurationError, match="holds no reservation"):
        begin(tmp_path, "plain too", Charge.of(fit()), sweep="s")
    assert begin(tmp_path, "a", child(), sweep="s") == pytest.approx(before)


def without_its_releases(parts: dict[str, Any]) -> None:
    parts["earlier"][0]["releases"] = []


def without_its_start(parts: dict[str, Any]) -> None:
    parts["earlier"] = []


def with_less_of_its_own(parts: dict[str, Any]) -> None:
    parts["own"][0]["count"] -= 1


@pytest.mark.parametrize("cheaper", [without_its_releases, without_its_start, with_less_of_its_own])
def test_a_record_whose_parts_are_not_all_that_it_charges_is_no_record(cheaper: Any, tmp_path: Path) -> None:
    begin(tmp_path, "a", child())
    path = tmp_path / "data.jsonl"
    rewrite_chain(path, lambda record: cheaper(record["parts"]) if "parts" in record else None)
    with pytest.raises(LedgerError):
        ledger(tmp_path, None).total()
