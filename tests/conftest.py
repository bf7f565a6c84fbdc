"""Shared set-up: the tests' own helpers can be imported, and no test touches the user's secret."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each of several workers, also in processes that they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import idle_work
from rank_runs import Server
from zero_runs import ZeroServer

from lit_dpret import errors


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="I/N", help="every N-th of the chosen tests, from the I-th on (I modulo N)")
    parser.addoption("--turn", metavar="I/N", help="every N-th of the costly tests (I modulo N), and all others")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Keep every n-th case of ``like(n)`` fast; then keep the requested shares of what ``-m`` selected."""
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("like")) is not None:
            function = item.nodeid.partition("[")[0]
            if seen[function] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[function] += 1
    yield
    dropped: set[pytest.Item] = set()
    if (share := _fraction(config, "--share")) is not None:
        dropped.update(set(items) - set(items[share[0] :: share[1]]))
    if (turn := _fraction(config, "--turn")) is not None:
        costly = [item for item in items if item.get_closest_marker("costly") is not None]
        files = list(dict.fromkeys(item.path for item in costly))
        cases: Counter[str] = Counter()
        for item in costly:
            # By file, so that a fixture of a file is not made in every turn; then by case, so that each turn has some.
            function = item.nodeid.partition("[")[0]
            if (files.index(item.path) + cases[function]) % turn[1] != turn[0]:
                dropped.add(item)
            cases[function] += 1
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


def _fraction(config: pytest.Config, option: str) -> tuple[int, int] | None:
    """Return I modulo N and N of an option of the form ``I/N``; None where it is not given."""
    if (given := config.getoption(option)) is None:
        return None
    try:
        first, parts = map(int, given.split("/"))
        return first % parts, parts
    except (ValueError, ZeroDivisionError) as error:
        raise pytest.UsageError(f"{option}={given} is not of the form I/N, such as 3/6.") from error


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Disable garbage collection while modules are imported and tests are collected, which leave no garbage."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported and collected objects from later garbage collections, which then also run less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)  # tests allocate much and keep little: the default takes 5 % of their time
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_idle_work() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        idle_work.leave_out(patch.setattr)
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server of processes for all tests with several ranks: starting it takes longer than most of them."""
    found = Server()
    yield found
    found.close()


@pytest.fixture(scope="session")
def zero_server() -> Iterator[ZeroServer]:
    """A server like ``server`` for jobs under DeepSpeed."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install lit-dpret[deepspeed]")
    found = ZeroServer()
    yield found
    found.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start Ray with two CPUs of this machine."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install lit-dpret[ray]")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def bucket() -> Iterator[Any]:
    """An empty remote file system, in this process."""
    import fsspec  # few test files need it

    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture(autouse=True, scope="module")
def no_run_of_other_files() -> Iterator[None]:
    """Forget all runs after each file, so that a file behaves as if it were run alone."""
    yield
    _forget(None)


@pytest.fixture(autouse=True)
def no_run_of_other_tests(no_run_of_other_files: None) -> Iterator[None]:
    """Forget the runs of each test after it, except those of shared fixtures."""
    known = _known_runs()
    yield
    _forget(known)


def _known_runs() -> tuple[dict[Any, Any], list[Any]] | None:
    trained, passed = (sys.modules.get(f"lit_dpret.privacy.ledger.{name}") for name in ("trained", "passed"))
    if trained is None or passed is None:  # these import torch, which not every test file needs
        return None
    return {shape: dict(found) for shape, found in trained._values.items()}, list(passed._noted)


def _forget(known: tuple[dict[Any, Any], list[Any]] | None) -> None:
    trained, passed = (sys.modules.get(f"lit_dpret.privacy.ledger.{name}") for name in ("trained", "passed"))
    if trained is not None and passed is not None:
        trained._values, passed._noted = known or ({}, [])


@pytest.fixture(autouse=True)
def words_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make errors name settings as the command line does, whatever raised them."""
    monkeypatch.setattr(errors, "on_command_line", True)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore the SIGTERM handler: a broken fit may leave Lightning's, which forked processes would inherit."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def own_loaders() -> Iterator[None]:
    """Unwrap torch's loaders: if a hook that builds one raises, Lightning leaves them wrapped, and rejects new ones."""
    yield
    if (data := sys.modules.get("torch.utils.data")) is None:
        return
    for kind in (data.DataLoader, data.BatchSampler):
        while (wrapped := getattr(kind.__init__, "__wrapped__", None)) is not None:
            kind.__init__ = wrapped


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Return a function that sets PyTorch's threads until the test ends."""
    import torch  # not above: torch reads the number of threads when it is imported

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
