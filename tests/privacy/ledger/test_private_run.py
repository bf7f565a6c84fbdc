"""A run is known by its ledger: what was written once holds for every resume."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.errors import ResumeError
from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.ledger import chain
from lit_dpret.privacy.ledger.assumptions import leaks
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.private_run import Fingerprints, Position, PrivateRun
from lit_dpret.privacy.ledger.run_ledger import DECLARED_EVENT, PRIVATE_EVENT, Key, PrivacyLedger, read_keys

DESCRIBED = {
    "mode": "dp_sgd", "unit": "query", "neighbours": "zero_out", "plan": None, "law": {"kind": "poisson"},
    "planned_steps": 6, "rows_per_unit": "one", "secure_rng": False,
}  # fmt: skip


def open_run(
    folder: Path, *, secret: bytes = b"k" * 32, resume: bool = False, dataset: Any = None, **described: Any
) -> PrivateRun:
    return PrivateRun.open(
        folder / "privacy_ledger.jsonl",
        resume=resume,
        secret=secret,
        described=DESCRIBED | described,
        fingerprints=Fingerprints(data=lambda key: "data"),
        run_id="run",
        dataset=dataset,
    )


def opened(folder: Path, *, resume: bool = False, **described: Any) -> list[dict[str, Any]]:
    """The records of a run that was opened and closed again."""
    run = open_run(folder, resume=resume, **described)
    run.ledger.close()
    return run.ledger.records


class OneMoment(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> OneMoment:
        return cls(2026, 1, 1, tzinfo=UTC)


def test_two_runs_that_were_opened_in_one_moment_have_different_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "datetime", OneMoment)
    [first], [second] = opened(tmp_path / "a"), opened(tmp_path / "b")
    assert first["day"] == second["day"] and first["hash"] != second["hash"]


def test_what_counts_a_run_is_remembered_from_any_of_its_plans(tmp_path: Path) -> None:
    first, second, absent = (
        DatasetLedger(tmp_path / f"{name}.jsonl", total_eps=8.0, budget=PrivacyBudget(eps=1.0, delta=1e-2))
        for name in ("first", "second", "absent")
    )
    second.begin()
    opened(tmp_path)
    opened(tmp_path, resume=True)
    opened(tmp_path, resume=True, dataset=first)
    before = (tmp_path / "privacy_ledger.jsonl").read_bytes()
    for other in (None, second, absent):
        with pytest.raises(ResumeError, match=r"privacy\.dataset_ledger"):
            opened(tmp_path, resume=True, dataset=other)
    assert (tmp_path / "privacy_ledger.jsonl").read_bytes() == before and not absent.path.exists()
    assert len(opened(tmp_path, resume=True, dataset=first)) == 4


@pytest.mark.parametrize("seed", range(8))
def test_a_ledger_knows_every_checkpoint_that_was_taken_before_it_and_none_that_needs_a_later_step(
    seed: int, tmp_path: Path
) -> None:
    """Launches that end at random moments, also before their first step, and under other secrets."""
    coins, release = random.Random(seed), NonPrivateRelease(label="train").to_dict()
    path = tmp_path / "privacy_ledger.jsonl"
    moments: list[tuple[Position, frozenset[Key], bytes]] = []  # a checkpoint, the steps in its weights, the ledger
    secret = b"k" * 32
    for launch in range(12):
        secret = bytes([launch]) * 32 if coins.random() < 0.3 else secret
        run = open_run(tmp_path, secret=secret, resume=launch > 0)
        step, inside = 0, frozenset[Key]()
        if moments and coins.random() < 0.9:
            position, inside, _ = coins.choice(moments)
            run.go_on_from(position, must_be_known=True)
            step = position.steps_done
        run.resume_or_begin_attempt(step, None)
        for due in range(step, step + coins.choice((1, 1, 2, 4))):
            if due > step:
                key = (run.attempt, due - 1)
                assert key not in run.intents
                run.intents[key] = run.ledger.append("intent", attempt=key[0], step=key[1], release=release)
                inside |= {key}
            moments.append((Position("run", run.attempt, due), inside, path.read_bytes()))
        run.ledger.close()
    read_keys(run.ledger.records)
    refused = 0
    for early, (_, _, written) in enumerate(moments):
        (tmp_path / "backup.jsonl").write_bytes(written)
        backup = PrivateRun(PrivacyLedger.read(tmp_path / "backup.jsonl"), run.stream, "run")
        for taken, (position, inside, _) in enumerate(moments):
            try:
                backup.go_on_from(position, must_be_known=True)
            except ResumeError:
                refused += 1
                assert taken > early
            else:
                assert inside <= set(backup.intents)
    assert refused > 50


@pytest.mark.parametrize("mode", ["dp_sgd", "logit_dp", "batch_clip", "per_example_duplicated", "public_passages"])
def test_a_declared_leak_is_told_in_every_mode_that_promises_something(mode: str) -> None:
    plan = {"kind": "plan", "mode": mode, "log_private_loss": True, "noise_seed": 7}
    assert [leak.standing for leak in leaks([plan])] == ["refuted", "refuted"]
    assert leaks([{**plan, "mode": "none"}]) == []


def test_each_kind_of_private_metric_and_each_declaration_is_told_once() -> None:
    def event(label: str) -> dict[str, object]:
        return {"kind": "event", "name": PRIVATE_EVENT, "release": {"kind": "non_private", "label": label, "count": 1}}

    found = leaks([event("a of dev"), event("b of dev"), event("a of dev")])
    assert [(leak.standing, leak.consequence) for leak in found] == [("refuted", "no_guarantee")] * 2
    declared = {"kind": "event", "name": DECLARED_EVENT, "data": "public", "split": "dev"}
    assert [leak.standing for leak in leaks([declared, declared])] == ["unverified"]
