"""When a group is drawn, and after which interruption, changes no byte."""

from __future__ import annotations

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
from tiny_generator import PASSAGES, SETTINGS, content, passage

from lit_dpret.synthesis.writer import synthesize

MANY = {f"p{number}": passage(number, 2 + number % 9) for number in range(60)}
SLOW: dict[str, Any] = {**SETTINGS, "queries_per_passage": 4}


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
    pytest.importorskip("ray")
    plans: list[tuple[str, list[tuple[int, int, Callable[[subprocess.Popen[str]], None]]]]] = [
        ("first", [(2, 4, kill_alone), (0, 3, press_control_c)]),
        ("second", [(0, 3, kill_alone), (2, 5, press_control_c)]),
    ]
    found = []
    for name, stops in plans:
        out, script = tmp_path / name / "set", tmp_path / f"{name}.py"
        shards = 0
        for workers, after, how in stops:
            script.write_text(job(source, out, workers=workers))
            interrupted(script, after, how)
            now = len(list((out / "shards").glob("[0-9]*.jsonl")))
            assert shards < now < 20 and not (out / "queries.jsonl").exists()
            shards = now
        found.append(content(synthesize(source, MANY, out, **SLOW)))
    assert found[0] == found[1]
    assert found[0] == content(synthesize(source, MANY, tmp_path / "third" / "set", **SLOW))
