"""Who draws a group, and when, changes no byte; a process that dies leaves one sentence and what was finished."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import PASSAGES, SETTINGS, content, lively_generator, passage, write_parent_card

from lit_dpret.errors import UnsupportedModelError, WorkerError
from lit_dpret.synthesis.writer import synthesize

MANY = {f"p{number}": passage(number, 2 + number % 9) for number in range(60)}
SLOW: dict[str, Any] = {**SETTINGS, "queries_per_passage": 4}


class Shoot:
    """Kills a worker when some groups are there."""

    def __init__(self, after: int) -> None:
        self.calls, self.after = -1, after
        self.seen: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls += 1
        self.seen.append((done, total))
        if self.calls == self.after:
            for process in multiprocessing.active_children():
                os.kill(process.pid or 0, signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_is_shot_leaves_one_sentence_and_what_it_had_finished(
    whole: Path, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "set"
    shoot = Shoot(after=1)
    with pytest.raises(WorkerError, match=r"Worker 1 of 1 was ended by SIGKILL.*memory.*same command.*task\.workers"):
        synthesize(source, PASSAGES, out, progress=shoot, **SETTINGS, workers=1, groups_in_flight=1)
    assert shoot.seen == [(0, 11), (2, 11)]
    assert len(list((out / "shards").glob("*.jsonl"))) == 1
    assert not multiprocessing.active_children()
    synthesize(source, PASSAGES, out, **SETTINGS)
    assert content(out) == content(whole)


def test_the_threads_of_the_process_are_as_before_and_change_no_byte(whole: Path, source: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    try:
        out = synthesize(source, PASSAGES, tmp_path / "set", **SETTINGS)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, "medium")
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision("highest")
    assert content(out) == content(whole)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_workers_and_groups_in_flight_change_no_byte(source: Path, tmp_path: Path, precision: str) -> None:
    settings = {**SETTINGS, "precision": precision}
    alone = content(synthesize(source, MANY, tmp_path / "0" / "set", **settings))
    for workers, flight in ((0, 3), (1, 3), (2, 1), (2, 3)):
        out = synthesize(
            source, MANY, tmp_path / f"{workers}{flight}" / "set", workers=workers, groups_in_flight=flight, **settings
        )
        assert content(out) == alone
    again = content(synthesize(source, MANY, tmp_path / "again" / "set", **settings))
    assert again == alone


def job(source: Path, out: Path, **settings: Any) -> str:
    """A script that synthesizes, as a user writes it, and says how far it is."""
    return textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from lit_dpret.synthesis.writer import synthesize

        def told(done, total):
            print(done, flush=True)

        if __name__ == "__main__":
            synthesize({str(source)!r}, {MANY!r}, {str(out)!r}, progress=told, **{SLOW | settings!r})
    """)


def start(script: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def kill_alone(process: subprocess.Popen[str]) -> None:
    process.kill()


def press_control_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def interrupted(script: Path, after: int, how: Callable[[subprocess.Popen[str]], None]) -> None:
    """Run the script, end it when it has told ``after`` times, and wait until none of its processes is left."""
    process = start(script)
    assert process.stdout is not None
    for _ in range(after):
        assert process.stdout.readline().strip()
    how(process)
    process.communicate(timeout=600)
    assert process.returncode != 0
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a worker outlived the process that it worked for")


@pytest.mark.slow
def test_two_generations_that_were_killed_and_resumed_differently_are_the_same_to_the_byte(
    source: Path, tmp_path: Path
) -> None:
    plans: list[tuple[str, list[tuple[int, int, int, Callable[[subprocess.Popen[str]], None]]], tuple[int, int]]] = [
        ("first", [(2, 3, 4, kill_alone), (1, 1, 3, press_control_c)], (0, 1)),
        ("second", [(0, 1, 3, kill_alone), (2, 1, 5, press_control_c)], (2, 3)),
    ]
    found = []
    for name, stops, (workers, flight) in plans:
        out, script = tmp_path / name / "set", tmp_path / f"{name}.py"
        shards = 0
        for stop_workers, stop_flight, after, how in stops:
            script.write_text(job(source, out, workers=stop_workers, groups_in_flight=stop_flight))
            interrupted(script, after, how)
            now = len(list((out / "shards").glob("[0-9]*.jsonl")))
            assert shards < now < 20 and not (out / "queries.jsonl").exists()
            shards = now
        found.append(content(synthesize(source, MANY, out, workers=workers, groups_in_flight=flight, **SLOW)))
    assert found[0] == found[1]
    assert found[0] == content(synthesize(source, MANY, tmp_path / "third" / "set", **SLOW))


@pytest.mark.slow
def test_a_worker_refuses_in_its_own_words(tmp_path: Path) -> None:
    module = lively_generator()
    with torch.no_grad():
        module.model.shared.weight.fill_(float("nan"))
    broken = module.save_model(tmp_path / "g")
    write_parent_card(broken)
    with pytest.raises(UnsupportedModelError, match="weights are broken"):
        synthesize(broken, PASSAGES, tmp_path / "set", **SETTINGS, workers=1)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(source: Path, tmp_path: Path) -> None:
    script = tmp_path / "naive.py"
    script.write_text(job(source, tmp_path / "set", workers=2).replace('__name__ == "__main__"', "True"))
    process = start(script)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "WorkerError: Worker" in errors and 'if __name__ == "__main__":' in errors.splitlines()[-1]
