"""A module with a step of its own runs on several processes only where it adds up over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_runs import REFUSED, Server, told


def kinds(folder: Path) -> list[str]:
    lines = (folder / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["kind"] for line in lines]


@pytest.mark.slow
def test_a_foreign_module_is_counted_and_gets_its_card_on_one_process(server: Server, tmp_path: Path) -> None:
    assert server.run("foreign_loop:fit", tmp_path / "run", world=1) == [0]
    assert kinds(tmp_path / "run").count("release") == 3
    assert json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))["claim"]["epsilon"] > 0


def test_a_foreign_module_is_refused_on_two_processes_before_a_ledger_is_begun(server: Server, tmp_path: Path) -> None:
    assert server.run("foreign_loop:fit", tmp_path / "run") == [REFUSED] * 2
    for rank in (0, 1):
        assert "Regression has a custom training step" in told(tmp_path / "run", rank)["text"]
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_ranks_that_say_they_add_up_and_do_not_are_refused_before_any_noise(server: Server, tmp_path: Path) -> None:
    assert server.run("foreign_loop:fit", tmp_path / "run", declares=True) == [REFUSED] * 2
    for rank in (0, 1):
        assert "different sums for step 0" in told(tmp_path / "run", rank)["text"]
    assert "intent" not in kinds(tmp_path / "run")


def test_a_foreign_module_that_adds_up_makes_the_same_update_on_both(server: Server, tmp_path: Path) -> None:
    assert server.run("foreign_loop:fit", tmp_path / "run", declares=True, adds_up=True) == [0, 0]
    assert told(tmp_path / "run", 0)["weights"] == told(tmp_path / "run", 1)["weights"]
    assert kinds(tmp_path / "run").count("release") == 3
