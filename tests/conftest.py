"""Shared set-up: the tests' own stand-ins are importable, and no test touches the user's secret."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each of several workers, also in the processes they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="I/N", help="every N-th of the chosen tests, from the I-th on (I modulo N)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share that was asked for of what ``-m`` and ``-k`` have left."""
    if (share := config.getoption("--share")) is None:
        return
    try:
        turn, parts = map(int, share.split("/"))
        first = turn % parts
    except (ValueError, ZeroDivisionError) as error:
        raise pytest.UsageError(f"--share={share} is not of the form I/N, such as 3/6.") from error
    kept = items[first::parts]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def nothing_is_waited_for_that_no_test_looks_at() -> Iterator[None]:
    """Spare each tiny fit what takes a third of its time and decides nothing.

    What was written outlives a killed process without the disk; `os.fstat` still refuses a file that is closed.
    `torch.manual_seed` keeps a traceback for each kind of device that is not there, for when it should come.
    Each Trainer searches all installed packages for callbacks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        if (torch := sys.modules.get("torch")) is not None:
            for kind in ("cuda", "xpu", "mtia"):
                if not getattr(torch, kind).is_available():
                    patch.setattr(getattr(torch, kind), "manual_seed_all", lambda seed: None)
        connector = sys.modules.get("lightning.pytorch.trainer.connectors.callback_connector")
        if connector is not None:
            patch.setattr(connector, "_load_external_callbacks", functools.cache(connector._load_external_callbacks))
        yield


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A fit that breaks off may leave Lightning's handler of SIGTERM, which forked processes would inherit."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
