"""Shared set-up: the tests' own stand-ins are importable, and no test touches the user's secret."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each of several workers, also in the processes they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))
