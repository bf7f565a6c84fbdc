"""Memory that runs out on one of two processes: the other one neither hangs nor goes on alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_runs import REFUSED, Server, told

from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, noise_keys

DATA = {"sample_rate": 0.1, "expected_batch_size": None, "physical_batch_size": 4}

pytestmark = pytest.mark.slow


def intents(folder: Path) -> list[tuple[int, int]]:
    return sorted(noise_keys(PrivacyLedger.read(folder / "privacy_ledger.jsonl").records))


def test_a_rank_that_begins_its_step_again_changes_nothing_for_the_others(server: Server, tmp_path: Path) -> None:
    assert server.run("fit", tmp_path / "whole", data=DATA) == [0, 0]
    settings = {"data": DATA, "at": 3, "always": False}
    assert server.run("short_of_memory", tmp_path / "short", **settings) == [0, 0]
    short, other = told(tmp_path / "short", 1), told(tmp_path / "short", 0)
    assert short["calls"] > 3 and short["weights"] == other["weights"]
    for name, value in told(tmp_path / "whole", 0)["weights"].items():
        torch.testing.assert_close(torch.tensor(short["weights"][name]), torch.tensor(value), rtol=0, atol=1e-5)
    assert intents(tmp_path / "whole") == intents(tmp_path / "short") == [(0, step) for step in range(6)]


def test_a_rank_on_which_nothing_fits_ends_all_of_them_unpaid(server: Server, tmp_path: Path) -> None:
    settings = {"data": DATA, "at": 5, "always": True}
    assert server.run("short_of_memory", tmp_path / "short", **settings) == [REFUSED, REFUSED]
    for rank in (0, 1):
        seen = told(tmp_path / "short", rank)
        assert seen["error"] == "DeviceMemoryError" and "a single unit" in seen["text"], seen
    paid = intents(tmp_path / "short")
    assert paid == [(0, step) for step in range(len(paid))] and len(paid) < 6
    assert server.run("fit", tmp_path / "short", data=DATA, resume=True) == [0, 0]
    # Without replay the steps since the last checkpoint are paid once more, and the one that ran short but once.
    again = [key for key in intents(tmp_path / "short") if key not in paid]
    assert [step for _, step in again] == list(range(again[0][1], 6)) and again[0][1] <= len(paid)
