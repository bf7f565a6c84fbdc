"""Seeded runs of every mode and family give what they gave when `golden.json` was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import FACTS, HERE, IN_PROCESSES, fixed_secret, run_job

Patch = pytest.MonkeyPatch
GOLDEN: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def same_secret(own_state_folder: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Patch) -> None:
    folder = tmp_path_factory.getbasetemp() / "golden"
    folder.mkdir(exist_ok=True)
    for name, value in fixed_secret(folder).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads round otherwise, which Adam shows in weights whose gradient is nearly nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(found: Any, golden: Any, *, place: str = "", exact: bool = True) -> None:
    """Equal, but for the last bits of numbers: twelve digits, or five of weights, which kernels of a CPU may change."""
    if isinstance(golden, dict):
        assert isinstance(found, dict) and found.keys() == golden.keys(), place
        for name, value in golden.items():
            same(found[name], value, place=f"{place}/{name}", exact=exact and name != "weights")
    elif isinstance(golden, list):
        assert isinstance(found, (list, tuple)) and len(found) == len(golden), place
        for number, value in enumerate(golden):
            same(found[number], value, place=f"{place}/{number}", exact=exact)
    elif isinstance(golden, float):
        assert found == pytest.approx(golden, rel=1e-12 if exact else 1e-5, abs=0 if exact else 1e-6), place
    else:
        assert found == golden, place


def test_every_run_has_its_facts() -> None:
    assert set(GOLDEN) == {*IN_PROCESSES, *HERE}


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_a_run_in_processes_of_its_own(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server = request.getfixturevalue("zero_server" if name.startswith("ZeRO") else "server")
    same(run_job(server, tmp_path, name), GOLDEN[name])


@pytest.mark.parametrize("name", HERE)
def test_a_run_of_a_family(name: str, tmp_path: Path) -> None:
    same(json.loads(json.dumps(HERE[name](tmp_path))), GOLDEN[name])
