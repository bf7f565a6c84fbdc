"""Measure how fast the noise of a step is drawn: by Philox, by ChaCha20, and exactly on a grid, on 1 and 2 threads.

    python benchmarks/noise.py
    python benchmarks/noise.py --device cuda --out noise_gpu.json    # and there, with every bit compared

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import in_turns, machine, median_ratio, options, say, write

from lit_dpret.privacy import box_muller
from lit_dpret.privacy.budget import NoiseName
from lit_dpret.privacy.chacha import WORDS, keystream
from lit_dpret.privacy.noise import BLOCK, KeyedStream, noise_source

T5_XL = 2.85e9
KEY: dict[str, Any] = {"attempt": 0, "step": 0, "parameter": "w"}


def main() -> None:
    parser = options(__doc__, "noise_cpu.json", rounds=7, threads=2)
    parser.add_argument("--count", type=int, default=1 << 24, help="coordinates of a parameter")
    parser.add_argument("--device", default="cpu", help="also draw there, where supported: cpu or cuda")
    arguments = parser.parse_args()
    count, secret = arguments.count, os.urandom(32)
    plain, secure = KeyedStream(secret, "benchmark"), KeyedStream(secret, "benchmark", secure_rng=True)

    def at_once() -> None:
        np.random.Generator(np.random.Philox(key=7)).standard_normal(count, dtype=np.float32)

    def blocks(stream: KeyedStream, threads: int, where: str = "cpu") -> Callable[[], None]:
        def draw() -> None:
            torch.set_num_threads(threads)
            stream.normal(torch.Size([count]), **KEY, device=where)
            wait(where)

        return draw

    def rounded(threads: int, where: str = "cpu") -> Callable[[], None]:
        def draw() -> None:
            torch.set_num_threads(threads)
            plain.rounded_normal(torch.Size([few]), bits=30, **KEY, device=where)
            wait(where)

        return draw

    def words() -> None:
        torch.set_num_threads(1)
        for first in range(0, count // WORDS, box_muller.AT_ONCE["cpu"]):
            keystream(secret, torch.arange(first, first + box_muller.AT_ONCE["cpu"]))

    def added(noise: NoiseName) -> Callable[[], None]:
        source, total = noise_source(noise, plain, noise_multiplier=1.0, coordinates=few), torch.zeros(few)

        def add() -> None:
            torch.set_num_threads(1)
            source.noised(total, std=1.0, **KEY)

        return add

    few = max(count // 8, 1)  # exact draws are slow
    ways: dict[str, tuple[Callable[[], None], int]] = {
        "a parameter at once": (at_once, count),
        "blocks, 1 thread": (blocks(plain, 1), count),
        f"blocks, {arguments.threads} threads": (blocks(plain, arguments.threads), count),
        "ChaCha20, words alone, 1 thread": (words, count),
        "ChaCha20, 1 thread": (blocks(secure, 1), count),
        f"ChaCha20, {arguments.threads} threads": (blocks(secure, arguments.threads), count),
        "on a grid, 1 thread": (rounded(1), few),
        f"on a grid, {arguments.threads} threads": (rounded(arguments.threads), few),
        "privacy.noise=gaussian, drawn and added, 1 thread": (added("gaussian"), few),
        "privacy.noise=discrete, drawn and added, 1 thread": (added("discrete"), few),
    }
    if arguments.device != "cpu":
        ways[f"ChaCha20, {arguments.device}"] = (blocks(secure, 1, arguments.device), count)
        ways[f"on a grid, {arguments.device}"] = (rounded(1, arguments.device), few)
        for draw in (secure.normal, partial(plain.rounded_normal, bits=30)):
            here, there = (draw(torch.Size([few]), **KEY, device=where).cpu() for where in ("cpu", arguments.device))
            if not torch.equal(here, there):
                raise RuntimeError(f"{arguments.device} draws different bits from the CPU")
    rounds = in_turns({name: draw for name, (draw, _) in ways.items()}, arguments.rounds)
    units, rows = ("seconds", "processor_seconds"), {}
    for name, (_, size) in ways.items():
        rate, work = (statistics.median(size / each[name][unit] for each in rounds) for unit in units)
        ratio, work_ratio = (
            round(size / count * median_ratio(rounds, "a parameter at once", name, unit), 2) for unit in units
        )
        rows[name] = {
            "normals_per_second": round(rate), "ratio_to_a_parameter_at_once": ratio,
            "normals_per_processor_second": round(work), "processor_ratio": work_ratio,
            "processor_seconds_for_t5_xl": round(T5_XL / work, 1),
        }  # fmt: skip
    say(json.dumps(rows, indent=1))
    facts = {"rows": rows, "count": count, "block": BLOCK, "rounds": arguments.rounds, **machine("numpy")}
    write(facts, arguments.out)


def wait(where: str) -> None:
    if where != "cpu":
        torch.get_device_module(where).synchronize()


if __name__ == "__main__":
    main()
