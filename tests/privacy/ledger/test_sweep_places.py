"""A sweep's cost is reserved before its first trial, and each trial takes over one reservation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.errors import BudgetExceededError, ConfigurationError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease, Release
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger

DELTA = 1e-5


def fit(noise: float = 20.0, count: int = 4) -> list[Release]:
    """One training; unsampled, so that a composition takes no time."""
    return [GaussianRelease(noise_multiplier=noise, law=FullBatch(), count=count)]


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
    with pytest.raises(BudgetExceededError, match=r"8 private runs.*The first 3 of them fit"):
        ledger(tmp_path, limit).hold("s", [fit()] * 8, name="sweep")
    assert not (tmp_path / "data.jsonl").exists()
    begin(ledger(tmp_path, limit), "other", fit(40.0))
    before = (tmp_path / "data.jsonl").read_bytes()
    with pytest.raises(BudgetExceededError, match="epsilon"):
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


RACER = """
import sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from test_sweep_places import begin, fit, ledger
begin(ledger(Path(sys.argv[1]), sweep="s"), sys.argv[2], fit())
"""


@pytest.mark.slow
def test_agents_that_begin_trials_at_once_never_take_one_reservation_twice(tmp_path: Path) -> None:
    ledger(tmp_path).hold("s", [fit()] * 2, name="sweep")
    here = str(Path(__file__).parent)
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), name, here], stderr=subprocess.PIPE)
        for name in ("a", "b", "c")
    ]
    said = [racer.communicate(timeout=120)[1].decode() for racer in racers]
    assert sorted(racer.returncode == 0 for racer in racers) == [False, True, True]
    assert sum("holds no reservation" in text for text in said) == 1
    assert ledger(tmp_path).total().epsilon == pytest.approx(cost(fit(), fit()))
