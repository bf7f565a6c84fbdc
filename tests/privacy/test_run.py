"""A run is known by its ledger: what was written once holds for every resume."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.errors import ResumeError
from lit_dpret.privacy import chain
from lit_dpret.privacy.run import PrivateRun

DESCRIBED = {
    "mode": "dp_sgd",
    "unit": "query",
    "neighbours": "zero_out",
    "plan": None,
    "law": {"kind": "poisson"},
    "planned_steps": 6,
    "rows_per_unit": "one",
    "secure_rng": False,
}


def opened(folder: Path, *, resume: bool = False, **described: Any) -> list[dict[str, Any]]:
    """The records of a run that was opened and closed again."""
    run = PrivateRun.open(
        folder / "privacy_ledger.jsonl",
        resume=resume,
        secret=b"k" * 32,
        secure_rng=False,
        described=DESCRIBED | described,
        data_fingerprint=lambda key: "data",
        run_id="run",
    )
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
    assert first["time"] == second["time"] and first["hash"] != second["hash"]


def test_what_counts_a_run_is_remembered_from_any_of_its_plans(tmp_path: Path) -> None:
    opened(tmp_path)
    opened(tmp_path, resume=True, dataset_ledger=None)
    opened(tmp_path, resume=True, dataset_ledger="first")
    before = (tmp_path / "privacy_ledger.jsonl").read_bytes()
    for other in ({}, {"dataset_ledger": None}, {"dataset_ledger": "second"}):
        with pytest.raises(ResumeError, match=r"privacy\.dataset_ledger"):
            opened(tmp_path, resume=True, **other)
    assert (tmp_path / "privacy_ledger.jsonl").read_bytes() == before
    assert len(opened(tmp_path, resume=True, dataset_ledger="first")) == 4


def test_a_run_from_before_its_data_sets_ledger_was_noted_goes_on_as_it_was(tmp_path: Path) -> None:
    opened(tmp_path)
    assert len(opened(tmp_path, resume=True, dataset_ledger=None)) == 2
