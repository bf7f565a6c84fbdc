"""A run goes on in one place at a time, and a killed one frees its place."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.errors import LedgerError, StorageError
from lit_dpret.privacy.ledger.dataset_account import RunLock
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger

FORK = multiprocessing.get_context("fork")


def hold(path: Path, held: Any) -> None:
    lock = RunLock(path, "r")
    lock.take()
    held.set()
    time.sleep(600)


def contend(folder: Path, rounds: int) -> None:
    """Take the lock so often, and fail where somebody else is inside as well."""
    done = 0
    while done < rounds:
        lock = RunLock(folder / "data.jsonl", "r")
        try:
            lock.take()
        except LedgerError:
            continue
        (folder / "inside").touch(exist_ok=False)
        (folder / "inside").unlink()
        lock.release()
        done += 1


def test_nobody_else_gets_it_in_this_process_until_it_is_let_go(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path / "data.jsonl", "r"), RunLock(tmp_path / "data.jsonl", "r")
    first.take()
    first.take()
    with pytest.raises(LedgerError, match="Run r is already running"):
        second.take()
    second.release()
    with pytest.raises(LedgerError, match="Run r is already running"):
        second.take()
    first.release()
    second.take()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_another_run_on_the_data_set_is_not_in_the_way(tmp_path: Path) -> None:
    locks = [RunLock(tmp_path / "data.jsonl", "r"), RunLock(tmp_path / "data.jsonl", "s")]
    for lock in locks:
        lock.take()
    for lock in locks:
        lock.release()


def test_another_path_to_the_same_ledger_leads_to_the_same_lock(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "data.jsonl")
    lock = RunLock(tmp_path / "data.jsonl", "r")
    lock.take()
    with pytest.raises(LedgerError, match="already running"):
        RunLock(tmp_path / "link.jsonl", "r").take()
    lock.release()


def test_a_killed_process_lets_it_go(tmp_path: Path) -> None:
    held = FORK.Event()
    holder = FORK.Process(target=hold, args=(tmp_path / "data.jsonl", held), daemon=True)
    holder.start()
    assert held.wait(timeout=60)
    lock = RunLock(tmp_path / "data.jsonl", "r")
    with pytest.raises(LedgerError, match="already running") as refused:
        lock.take()
    assert ": kill " not in str(refused.value), "it still runs"
    holder.kill()
    holder.join()
    lock.take()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def left_behind(path: Path, kind: str) -> int:
    """Return the id of a worker that still runs after the process that took the lock was killed."""
    reads, writes = os.pipe()
    holder = os.fork()
    if holder == 0:
        kept = RunLock(path, "r") if kind == "run" else None
        if kept is not None:
            kept.take()
        else:
            kept = PrivacyLedger.open(path)
        worker = os.fork()
        if worker == 0:
            time.sleep(600)
        os.write(writes, str(worker).encode())
        time.sleep(600)
    worker = int(os.read(reads, 20))
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    return worker


@pytest.mark.parametrize("kind", ["run", "ledger"])
def test_a_worker_that_a_killed_run_left_is_named_and_its_end_frees_the_place(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    worker = left_behind(path, kind)
    try:
        with pytest.raises(LedgerError, match=rf"kill {worker}\b"):
            RunLock(path, "r").take() if kind == "run" else PrivacyLedger.open(path)
    finally:
        os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            RunLock(path, "r").take() if kind == "run" else PrivacyLedger.open(path).close()
            break
        except LedgerError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_lock_file_that_lies_there_from_a_killed_run_is_in_nobodys_way(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "data.jsonl", "r")
    lock.path.touch()
    lock.take()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_worker_cannot_let_it_go(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "data.jsonl", "r")
    lock.take()
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(LedgerError, match="already running"):
        RunLock(tmp_path / "data.jsonl", "r").take()
    lock.release()


def test_two_processes_are_never_inside_together(tmp_path: Path) -> None:
    runs = [FORK.Process(target=contend, args=(tmp_path, 300)) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(timeout=120)
    assert [run.exitcode for run in runs] == [0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match=r"data\.jsonl\.r\.lock could not be opened.*another privacy\.dataset_ledger"
    ):
        RunLock(tmp_path / "file" / "data.jsonl", "r").take()
