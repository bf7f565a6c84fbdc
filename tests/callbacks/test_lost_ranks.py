"""A rank that dies ends the job soon and in words, and the job goes on from there without losing a release."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from rank_runs import Server, told
from stand_ins import granted, records

from lit_dpret.privacy.accounting.releases import NonPrivateRelease
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases

STEPS = 6


def lose(server: Server, folder: Path, **doom: Any) -> None:
    """Train until a rank dies, and see that the other one ends with a message that helps."""
    begun = time.monotonic()
    statuses = server.run("fit", folder, replay="auto", steps=STEPS, doom=doom, timeout=90)
    took = time.monotonic() - begun
    whose = doom["whose"]
    assert statuses[whose] != 0 and statuses[1 - whose] == 2, statuses
    assert took < 60
    said = told(folder, 1 - whose)["text"]
    assert "Another process of this job ended" in said and "resume=true" in said


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "on", "errors"),
    [
        ("coupled late", 0, ["UnsupportedModelError", "UnsupportedModelError"]),
        ("coupled late", 1, ["UnsupportedModelError", "UnsupportedModelError"]),
        ("one update more", 1, ["WorkerError", "ConfigurationError"]),
    ],
)
def test_what_one_rank_finds_out_late_leaves_no_claim(
    kind: str, on: int, errors: list[str], server: Server, tmp_path: Path
) -> None:
    """Rank 0 holds the ledger, and another rank may find out, or end, alone."""
    folder = tmp_path / "run"
    statuses = server.run("fit", folder, module=kind, module_settings={"on": on}, steps=30, timeout=90)
    assert 0 not in statuses and [told(folder, rank)["error"] for rank in (0, 1)] == errors
    assert len(granted(folder)) >= 3
    found = charged_releases(PrivacyLedger.read(folder / "privacy_ledger.jsonl").records)
    assert found and all(isinstance(release, NonPrivateRelease) for release in found)


@pytest.mark.parametrize("whose", [0, pytest.param(1, marks=SLOW)])
def test_a_killed_rank_ends_the_job_in_words_and_the_run_goes_on(whose: int, server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lose(server, folder, whose=whose, at=3)
    assert granted(folder) == [(0, 0), (0, 1), (0, 2)]
    # The last checkpoint is of step 2: step 3 is repeated bit by bit, and paid for once.
    assert server.run("fit", folder, replay="auto", steps=STEPS, resume=True) == [0, 0]
    assert granted(folder) == [(0, step) for step in range(STEPS)]
    assert [record["step"] for record in records(folder, "replay")] == [2]
    assert server.run("fit", tmp_path / "whole", replay="auto", steps=STEPS) == [0, 0]
    assert told(folder, 0)["weights"] == told(folder, 1)["weights"] == told(tmp_path / "whole", 0)["weights"]


@pytest.mark.parametrize("whose", [pytest.param(0, marks=SLOW), 1])
def test_a_rank_that_dies_while_getting_ready_leaves_a_run_that_can_start(
    whose: int, server: Server, tmp_path: Path
) -> None:
    lose(server, tmp_path / "run", whose=whose, at=0, where="setup")
    assert granted(tmp_path / "run") == []
    assert server.run("fit", tmp_path / "run", replay="auto", steps=STEPS, resume=True) == [0, 0]
    assert len(granted(tmp_path / "run")) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("whose", [0, 1])
def test_a_rank_that_is_stuck_ends_the_job_after_the_timeout(whose: int, server: Server, tmp_path: Path) -> None:
    doom = {"whose": whose, "at": 3, "how": "hang"}
    statuses = server.run("fit", tmp_path / "run", steps=STEPS, doom=doom, patience=4, timeout=25)
    assert statuses[whose] == -9 and statuses[1 - whose] == 2  # the stuck one is killed by the test
    assert "Another process of this job ended or stopped answering" in told(tmp_path / "run", 1 - whose)["text"]


@pytest.mark.slow
@pytest.mark.parametrize("whose", [-1, 0, 1])
def test_a_sigterm_ends_the_job_after_the_step_and_it_goes_on(whose: int, server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    doom = {"whose": whose, "at": 3, "how": "sigterm"}
    statuses = server.run("fit", folder, replay="auto", steps=STEPS, doom=doom, timeout=60)
    assert 0 not in statuses and -9 not in statuses, "the job went on, or had to be killed"
    assert {told(folder, rank)["error"] for rank in (0, 1)} <= {"SIGTERMException", "WorkerError"}
    assert granted(folder) == [(0, step) for step in range(4)]
    assert server.run("fit", folder, replay="auto", steps=STEPS, resume=True) == [0, 0]
    assert sorted(set(granted(folder))) == [(0, step) for step in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "error"), [("memory", "MemoryError"), ("error", "RuntimeError")])
def test_a_rank_that_fails_alone_takes_the_others_with_it(how: str, error: str, server: Server, tmp_path: Path) -> None:
    lose(server, tmp_path / "run", whose=1, at=3, how=how)
    assert told(tmp_path / "run", 1)["error"] == error
    assert server.run("fit", tmp_path / "run", replay="auto", steps=STEPS, resume=True) == [0, 0]
    assert sorted(set(granted(tmp_path / "run"))) == [(0, step) for step in range(STEPS)]


@pytest.mark.parametrize(("before", "after"), [pytest.param(1, 2, marks=SLOW), (2, 1)])
def test_another_number_of_ranks_goes_on_with_fresh_noise_and_charges_it(
    before: int, after: int, server: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    statuses = server.run(
        "fit", folder, world=before, replay="auto", steps=STEPS, doom={"whose": 0, "at": 3}, timeout=90
    )
    assert statuses[0] == -9
    assert server.run("fit", folder, world=after, replay="auto", steps=STEPS, resume=True) == [0] * after
    # Step 2 was granted and not in the checkpoint: it is made again as another release.
    assert granted(folder) == [(0, 0), (0, 1), (0, 2), *((1, step) for step in range(2, STEPS))]
    assert server.run("fit", tmp_path / "whole", world=after, replay="auto", steps=STEPS) == [0] * after
    assert told(folder, 0)["eps"] > told(tmp_path / "whole", 0)["eps"], "the release that was lost is free"
