"""What a sweep and a start cost is reserved and charged once: before the first trial, and however many runs begin."""

from __future__ import annotations

import multiprocessing
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


def ledger(folder: Path, total_eps: float | None = 2.0, sweep: str | None = None) -> DatasetLedger:
    budget = PrivacyBudget(eps=3.0, delta=DELTA)
    return DatasetLedger(folder / "data.jsonl", total_eps=total_eps, budget=budget, sweep=sweep)


def begin(book: DatasetLedger, run: str, planned: list[Release]) -> Any:
    return book.reserve(run, spent=[], planned=planned, heads=["h0"], name=f"trials/{run}")


def test_the_sum_of_all_trials_is_known_before_the_first_and_does_not_change_as_they_begin(tmp_path: Path) -> None:
    places = [fit(20.0), fit(20.0), fit(10.0)]
    total = ledger(tmp_path).hold("s", places, name="sweep")
    assert total.epsilon == pytest.approx(cost(*places)) and total.runs == 3
    for number, place in enumerate(places):
        begun = begin(ledger(tmp_path, sweep="s"), f"run{number}", place)
        assert begun.epsilon == pytest.approx(total.epsilon) and begun.runs == 3
    ended = ledger(tmp_path).settle("run2", spent=fit(10.0, 1), heads=["h0"], name="trials/run2")
    assert ended.epsilon == pytest.approx(cost(fit(20.0), fit(20.0), fit(10.0, 1)))


def test_a_sweep_that_does_not_fit_is_refused_with_how_much_of_it_would_and_nothing_is_written(tmp_path: Path) -> None:
    limit = (cost(*[fit()] * 3) + cost(*[fit()] * 4)) / 2
    with pytest.raises(
        BudgetExceededError, match=r"^task\.total_eps=.*8 private runs.*The first 3 of them fit.*larger"
    ):
        ledger(tmp_path, limit).hold("s", [fit()] * 8, name="sweep")
    assert not (tmp_path / "data.jsonl").exists()
    begin(ledger(tmp_path, limit), "other", fit(40.0))
    before = (tmp_path / "data.jsonl").read_bytes()
    with pytest.raises(BudgetExceededError, match=r"noisier trials\.$"):  # another file would forget the other run
        ledger(tmp_path, limit).hold("s", [fit()] * 8, name="sweep")
    assert (tmp_path / "data.jsonl").read_bytes() == before


def test_holding_a_sweep_again_after_a_crash_reserves_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    places = [fit(), fit(), fit(30.0)]
    ledger(tmp_path).hold("s", places[:1], name="sweep")  # as far as it came
    total = ledger(tmp_path).hold("s", places, name="sweep")
    assert total.runs == 3 and total.epsilon == pytest.approx(cost(*places))
    begin(ledger(tmp_path, sweep="s"), "a", fit())
    assert ledger(tmp_path).hold("s", places, name="sweep").runs == 3, "a reservation that was taken is not made again"


def test_a_trial_that_was_not_planned_is_refused_and_so_is_one_more_of_a_kind(tmp_path: Path) -> None:
    ledger(tmp_path).hold("s", [fit()], name="sweep")
    trial = ledger(tmp_path, sweep="s")
    with pytest.raises(ConfigurationError, match="holds no reservation"):
        begin(trial, "louder", fit(19.0))
    begin(trial, "a", fit())
    with pytest.raises(ConfigurationError, match="0 are left"):
        begin(trial, "b", fit())
    begin(trial, "a", fit())  # the same run again, after a crash


def test_a_cheaper_trial_takes_the_cheapest_reservation_that_covers_it(tmp_path: Path) -> None:
    ledger(tmp_path).hold("s", [fit(10.0, 9), fit(20.0, 5), fit(20.0, 9)], name="sweep")
    begin(ledger(tmp_path, sweep="s"), "a", fit(25.0, 4))
    left = ledger(tmp_path).total().epsilon
    assert left == pytest.approx(cost(fit(10.0, 9), fit(20.0, 9), fit(25.0, 4)))


def test_what_a_sweep_gives_back_is_free_and_what_its_trials_spent_is_not(tmp_path: Path) -> None:
    ledger(tmp_path).hold("s", [fit()] * 4, name="sweep")
    begin(ledger(tmp_path, sweep="s"), "a", fit())
    assert ledger(tmp_path).give_back("s").epsilon == pytest.approx(cost(fit()))
    assert ledger(tmp_path).hold("s", [fit()] * 4, name="sweep").runs == 4, "it can be held again"


def test_other_runs_cannot_take_what_a_sweep_holds(tmp_path: Path) -> None:
    limit = (cost(*[fit()] * 4) + cost(*[fit()] * 5)) / 2
    ledger(tmp_path, limit).hold("s", [fit()] * 4, name="sweep")
    with pytest.raises(BudgetExceededError):
        begin(ledger(tmp_path, limit), "stranger", fit())
    assert begin(ledger(tmp_path, limit, sweep="s"), "trial", fit()).epsilon <= limit


def test_agents_that_begin_trials_at_once_never_take_one_reservation_twice(tmp_path: Path) -> None:
    ledger(tmp_path).hold("s", [fit()] * 2, name="sweep")
    fork = multiprocessing.get_context("fork")
    start, said = fork.Barrier(3), fork.SimpleQueue()

    def begins(name: str) -> None:
        start.wait(timeout=60)
        try:
            begin(ledger(tmp_path, sweep="s"), name, fit())
            said.put("")
        except ConfigurationError as refused:
            said.put(str(refused))

    racers = [fork.Process(target=begins, args=(name,)) for name in ("a", "b", "c")]
    for racer in racers:
        racer.start()
    answers = sorted(said.get() for _ in racers)
    for racer in racers:
        racer.join(timeout=60)
    assert answers[:2] == ["", ""] and "holds no reservation" in answers[2]
    assert ledger(tmp_path).total().epsilon == pytest.approx(cost(fit(), fit()))


# -- a start is charged once, and never less than once ----------------------------------------

START = EarlierRun("run", "head", tuple(fit(8.0, 6, "earlier run")))


def child(own: list[Release] | None = None, *earlier: EarlierRun) -> Charge:
    return Charge.of(own or fit(), earlier or (START,))


def start_run(
    folder: Path, run: str, planned: Charge, *, sweep: str | None = None, total_eps: float | None = 9.0
) -> float:
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
            assert start_run(folder, str(place.own), place, sweep="s") == pytest.approx(whole)
        for place in order:
            assert settle(folder, str(place.own), place) == pytest.approx(whole)


def test_a_limit_for_the_start_once_is_enough_and_the_next_smaller_one_holds_nothing(tmp_path: Path) -> None:
    whole = cost(*[fit()] * 4, list(START.releases))
    with pytest.raises(BudgetExceededError, match="total_eps"):
        ledger(tmp_path, whole * (1 - 1e-6)).hold("s", [child()] * 4, name="sweep")
    assert not (tmp_path / "data.jsonl").exists()
    ledger(tmp_path, whole * (1 + 1e-9)).hold("s", [child()] * 4, name="sweep")
    with pytest.raises(BudgetExceededError, match="total_eps"):
        start_run(tmp_path, "stranger", child(), total_eps=None)


def test_no_order_of_settling_failing_and_giving_back_takes_away_a_start_that_a_run_began_with(tmp_path: Path) -> None:
    start = cost(list(START.releases))
    ledger(tmp_path, 9.0).hold("s", [child()] * 3, name="sweep")
    nothing = Charge.of([], (START,))
    start_run(tmp_path, "failed", child(), sweep="s")
    settle(tmp_path, "failed", nothing)
    ledger(tmp_path, None).give_back("s")
    assert ledger(tmp_path, None).total().epsilon == pytest.approx(start)
    start_run(tmp_path, "failed", child())  # resumed
    assert ledger(tmp_path, None).total().epsilon == pytest.approx(cost(fit(), list(START.releases)))
    assert start_run(tmp_path, "later", child()) == pytest.approx(cost(fit(), fit(), list(START.releases)))


def test_a_refused_run_settles_to_what_it_spent_and_its_start(tmp_path: Path) -> None:
    limit = cost(fit(), list(START.releases)) * 1.01
    start_run(tmp_path, "a", child(), total_eps=limit)
    with pytest.raises(BudgetExceededError, match="total_eps"):
        start_run(tmp_path, "a", child(fit(2.0)), total_eps=None)
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
    start_run(tmp_path, "a", child())
    found = start_run(tmp_path, "b", child(fit(), other))
    assert found == pytest.approx(cost(fit(), fit(), list(START.releases), list(other.releases)))


def test_a_trial_takes_over_no_reservation_for_another_start_or_for_none(tmp_path: Path) -> None:
    other = replace(START, run="another run")
    ledger(tmp_path, 9.0).hold("s", [child(), Charge.of(fit())], name="sweep")
    with pytest.raises(ConfigurationError, match="holds no reservation"):
        start_run(tmp_path, "b", child(fit(), other), sweep="s")
    before = ledger(tmp_path, None).total().epsilon
    start_run(tmp_path, "plain", Charge.of(fit()), sweep="s")
    with pytest.raises(ConfigurationError, match="holds no reservation"):
        start_run(tmp_path, "plain too", Charge.of(fit()), sweep="s")
    assert start_run(tmp_path, "a", child(), sweep="s") == pytest.approx(before)


@pytest.mark.parametrize(
    "cheaper",
    [
        lambda parts: parts["earlier"][0].update(releases=[]),
        lambda parts: parts.update(earlier=[]),
        lambda parts: parts["own"][0].update(count=parts["own"][0]["count"] - 1),
    ],
    ids=["without its releases", "without its start", "with less of its own"],
)
def test_a_record_whose_parts_are_not_all_that_it_charges_is_no_record(cheaper: Any, tmp_path: Path) -> None:
    start_run(tmp_path, "a", child())
    path = tmp_path / "data.jsonl"
    rewrite_chain(path, lambda record: cheaper(record["parts"]) if "parts" in record else None)
    with pytest.raises(LedgerError):
        ledger(tmp_path, None).total()
