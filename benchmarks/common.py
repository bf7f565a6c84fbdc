"""Shared parts of the benchmarks: work in separate processes and ranks, timing, and results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import yaml

RESULTS = Path(__file__).resolve().parent / "results"
CASES: dict[str, Any] = yaml.safe_load(RESULTS.with_name("cases.yaml").read_text(encoding="utf-8"))
#: Freed memory returns to the system at once, so that a peak shows what a step needs.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
T = TypeVar("T")


def options(doc: str, results: str | None, **numbers: Any) -> argparse.ArgumentParser:
    """Return a parser with ``--out``, by default a file in `RESULTS`, and one option with a default for each number."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None if results is None else RESULTS / results)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser


def write(report: Any, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    say(f"written: {out}")


def say(line: str) -> None:
    """Print a line immediately, even into a pipe."""
    print(line, flush=True)


def machine(*packages: str) -> dict[str, Any]:
    """Return cores, load, Python and the versions of packages; null for one that is not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    load = [round(load, 2) for load in os.getloadavg()]
    return {"cores": os.cpu_count(), "load": load, "python": platform.python_version(), "versions": found}


def timed(work: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """Return the result of work, and its wall-clock and processor seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = work()
    return made, {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - cpu}


def in_turns(works: Mapping[str, Callable[[], Any]], rounds: int) -> list[dict[str, dict[str, float]]]:
    """Run works one after the other, in rotating order; return the seconds of each work in every round, as by `timed`.

    A shared machine is slower at some times than at others, so only measurements of the same round are compared.
    """
    names, done = list(works), []
    for turn in range(rounds):
        start = turn % len(names)
        done.append({name: timed(works[name])[1] for name in names[start:] + names[:start]})
    return done


def median_ratio(rounds: list[dict[str, dict[str, float]]], of: str, over: str, unit: str) -> float:
    """Return the median over the rounds of `in_turns` of one work's time divided by another's."""
    return statistics.median(each[of][unit] / each[over][unit] for each in rounds)


def apart(script: str, *words: object, **environment: str) -> Any:
    """Run a script in a separate process and return the JSON of its last line; raise with its stderr if it fails."""
    command = [sys.executable, script, *map(str, words)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def ranks(script: str, *words: object, world: int, timeout: float | None = None, **environment: str) -> list[Any]:
    """Run a script in ``world`` ranks on this machine, and return the JSON of each rank's last line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *map(str, words)]
    started = [
        subprocess.Popen(
            command, env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, told, strict=True):
        if process.returncode:
            raise RuntimeError((error.strip().splitlines() or ["a rank failed"])[-1])
    return [json.loads(out.splitlines()[-1]) for out, _ in told]
