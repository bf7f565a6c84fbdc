"""What a process does that races others for one data set's budget; importable, so that it can be spawned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_dpret.errors import BudgetExceededError
from lit_dpret.privacy.accounting.releases import GaussianRelease, Poisson, Release
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
