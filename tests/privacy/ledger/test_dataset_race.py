"""Two processes that share a data set's ledger never overspend it, whoever comes first."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.errors import BudgetExceededError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import GaussianRelease, Poisson, Release, release_from_dict
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger

DELTA = 1e-5


def run_of(count: int) -> list[Release]:
    return [GaussianRelease(noise_multiplier=2.0, law=Poisson(sample_rate=0.02), count=count)]


def ledger(path: Path, limit: float) -> DatasetLedger:
    return DatasetLedger(path, total_eps=limit, budget=PrivacyBudget(eps=3.0, delta=DELTA), accountant="rdp")


def race(name: str, folder: Path, limit: float, rounds: int, attempts: int, start: Any, answers: Any) -> None:
    """In each round, when all are ready, reserve ``attempts`` runs on the round's file; end every second one early."""
    for number in range(rounds):
        start.wait(timeout=60)
        book = ledger(folder / f"round{number}.jsonl", limit)
        for attempt in range(attempts):
            run = f"{name}{attempt}"
            try:
                book.reserve(run, spent=[], planned=run_of(100), heads=["h"], name=run)
            except BudgetExceededError:
                answers.put((number, run, "refused"))
                continue
            answers.put((number, run, "granted"))
            if attempt % 2:
                book.settle(run, spent=run_of(40), heads=["h"], name=run)


def cost(releases: list[Release]) -> float:
    return epsilon(releases, delta=DELTA, neighbours="zero_out", accountant="rdp")


def compete(
    folder: Path, limit: float, *, rounds: int, attempts: int, processes: int = 2
) -> list[tuple[int, str, str]]:
    """What processes were answered that began every round at the same moment."""
    fork = multiprocessing.get_context("fork")
    start, answers = fork.Barrier(processes), fork.Queue()
    runners = [
        fork.Process(target=race, args=(name, folder, limit, rounds, attempts, start, answers))
        for name in "abcd"[:processes]
    ]
    for runner in runners:
        runner.start()
    found = [answers.get(timeout=120) for _ in range(processes * rounds * attempts)]
    for runner in runners:
        runner.join(timeout=60)
    assert [runner.exitcode for runner in runners] == [0] * processes
    return found


def totals(path: Path) -> list[float]:
    """The epsilon of everything held, after each record of the file, composed here and not by the ledger."""
    held: dict[str, list[Release]] = {}
    after = []
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if record["kind"] in ("reserve", "settle"):
            held[record["run_id"]] = [release_from_dict(release) for release in record["releases"]]
            after.append(cost([release for releases in held.values() for release in releases]))
    return after


@pytest.mark.slow
def test_of_two_runs_that_fit_only_alone_exactly_one_begins_every_time(tmp_path: Path) -> None:
    limit, rounds = 1.001 * cost(run_of(100)), 15
    answers = compete(tmp_path, limit, rounds=rounds, attempts=1)
    for number in range(rounds):
        assert sorted(answer for at, _, answer in answers if at == number) == ["granted", "refused"]
        (held,) = totals(tmp_path / f"round{number}.jsonl")
        assert held <= limit
        assert ledger(tmp_path / f"round{number}.jsonl", limit).total().runs == 1


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_limit_holds_after_every_single_record_while_runs_begin_and_end(tmp_path: Path, processes: int) -> None:
    limit, rounds = 1.001 * cost(run_of(300)), 4
    answers = compete(tmp_path, limit, rounds=rounds, attempts=6, processes=processes)
    for number in range(rounds):
        path = tmp_path / f"round{number}.jsonl"
        granted = [run for at, run, answer in answers if at == number and answer == "granted"]
        assert max(totals(path)) <= limit
        book = ledger(path, limit).total()
        assert book.runs == len(set(granted)) == len(granted) >= 3
        assert book.epsilon == pytest.approx(totals(path)[-1])
