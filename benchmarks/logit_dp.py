"""What clipping every pair costs (Logit-DP), over keeping n squared gradients and over a step without privacy.

    python benchmarks/logit_dp.py [--rounds 5] [--threads 1] [--quick]

Encoders with random weights: ``conv`` (3 convolutions of 8, 16, 32 channels on 32 x 32 images, and a
linear layer: the embedding net of the paper's size), ``mlp`` (384-256-d on features), ``minilm-shape`` (MiniLM's
12 heads and 4-fold feed-forward at width 48, 2 layers, 16 tokens). A step is the gradient of an in-batch
softmax over n records: without privacy by autograd, else with every pair's similarity gradient clipped.
Queries and passages share the encoder unless the row says two towers. fp32, no optimizer, no noise.

* Ways that keep all gradients: ``one vmap`` is one vmap over all pairs, in one piece, as the authors'
  public code does it; ``a loop`` is ``norms=brute_force``, pair after pair, which keeps nothing but the gradients.
  Where n * n * p floats take more than ``--limit-gb`` they are not run: ``extrapolated`` gives the size of the
  gradients alone, so a lower bound.
* Time: the ways run in one process, one after the other and in rotating order, after one step of each that is not
  counted (it has the engine's audit). Medians over the rounds of the ratio to the plain step of the same
  round. Those that keep all gradients run once; the loop up to 16 records, pair_ghost up to 128.
* Memory: one fresh process per way and row. The peak of the resident set (VmHWM, reset before the step) less the
  resident set after a step with 2 records; freed blocks go back to the system at once (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

from common import GIVEN_BACK, apart, machine, options, say, timed, write
from logit_dp_steps import LABELS, MATERIALISING, Row, build_module, build_step

TIMED = [
    *(Row("conv", n, 8) for n in (16, 64, 400)),
    *(Row("conv", 64, d) for d in (32,)),
    *(Row("mlp", n, 64) for n in (16, 64)),
    *(Row("minilm-shape", n, 32) for n in (16, 64)),
]
WEIGHED = [
    *(Row("conv", n, 8) for n in (16, 32, 64, 128, 400)),
    *(Row("mlp", n, 64) for n in (16, 32, 64, 128)),
    *(Row("minilm-shape", n, 32) for n in (16, 32, 64, 128)),
]
#: More would take minutes.
MOST_RECORDS_TIMED = {"brute_force": 16, "pair_ghost": 128}
QUICK = [Row("conv", 3, 4), Row("mlp", 4, 4)]


def gradient_bytes(row: Row) -> int:
    """What n squared gradients take in fp32."""
    return 4 * row.n**2 * sum(p.numel() for p in build_module("plain", row).parameters())


def measure_time(row: Row, variants: list[str], rounds: int) -> dict[str, Any]:
    """Seconds of every way, and their ratios to the plain step."""
    steps: dict[str, Callable[[], Any]] = {v: build_step(v, build_module(v, row), row) for v in variants}

    def run(variant: str) -> tuple[float, float]:
        _, spent = timed(steps[variant])
        return spent["seconds"], spent["processor_seconds"]

    often = [v for v in variants if v not in MATERIALISING]
    for variant in often:
        run(variant)
    done = []
    for i in range(rounds):
        order = often[i % len(often) :] + often[: i % len(often)]
        done.append({variant: run(variant) for variant in order})
    for variant in set(variants) - set(often):
        build_step(variant, build_module(variant, row), Row(row.model, 2, row.dim))()
        once = run(variant)
        for found in done:
            found[variant] = once
    return {
        variant: {
            "wall_seconds": statistics.median(found[variant][0] for found in done),
            "cpu_seconds": statistics.median(found[variant][1] for found in done),
            "cpu_ratio": statistics.median(found[variant][1] / found["plain"][1] for found in done),
        }
        for variant in variants
    }


def measure_memory_here(variant: str, row: Row) -> int:
    """In a fresh process: bytes that a step takes above a step with two records."""
    import torch

    from lit_dpret.costs.measure import peak, reset_peak, resident

    build_step(variant, build_module(variant, row), Row(row.model, 2, row.dim))()
    step, here = build_step(variant, build_module(variant, row), row), torch.device("cpu")
    base = resident(here)
    reset_peak(here)
    step()
    return peak(here) - base


def measure_memory(variant: str, row: Row, threads: int) -> int:
    """In a process of its own."""
    words = ["--threads", threads, "--memory-of", variant, row.model, row.n, row.dim]
    return int(apart(__file__, *words, **GIVEN_BACK))


def runnable(row: Row, limit_gb: float) -> list[str]:
    """The ways that fit."""
    return [v for v in LABELS if v not in MATERIALISING or gradient_bytes(row) <= limit_gb * 1e9]


def main() -> None:
    """Print the tables and write the JSON."""
    parser = options(__doc__, "logit_dp_cpu.json")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit-gb", type=float, default=2.0, help="of gradients that are kept")
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that the script runs")
    parser.add_argument("--part", choices=["both", "time"], default="both", help="time: keep the file's memory")
    parser.add_argument("--memory-of", nargs=4, metavar="X", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        variant, model, n, dim = arguments.memory_of
        say(str(measure_memory_here(variant, Row(model, int(n), int(dim)))))
        return
    report: dict[str, Any] = {
        "method": __doc__,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        **machine("torch"),
        "memory": {},
        "time": {},
    }
    out = arguments.out
    if arguments.part == "time" and out.exists():
        report["memory"] = json.loads(out.read_text())["memory"]
    print("memory of a step above one with 2 records, MB")
    for row in () if arguments.part == "time" else QUICK if arguments.quick else WEIGHED:
        found = {v: measure_memory(v, row, arguments.threads) for v in runnable(row, arguments.limit_gb)}
        entry: dict[str, Any] = {"bytes": found, "bytes_of_all_gradients": gradient_bytes(row)}
        print(f"{row.label:26}" + "  ".join(f"{v} {size / 1e6:.1f}" for v, size in found.items()))
        private = {v: size for v, size in found.items() if v not in (*MATERIALISING, "plain")}
        references = {v: found[v] for v in MATERIALISING if v in found} or {"extrapolated": gradient_bytes(row)}
        for name, reference in references.items():
            ratios = entry[f"less_than_{name}"] = {v: reference / max(1, size) for v, size in private.items()}
            said = "  ".join(f"{v} {ratio:.0f}x" for v, ratio in ratios.items())
            print(f"  less than {name} ({reference / 1e6:.0f} MB): {said}", flush=True)
        report["memory"][row.label] = entry
        write(report, out)
    print("\ntime of a step: over the plain step, seconds on one thread" if arguments.threads == 1 else "\ntime")
    for row in QUICK if arguments.quick else TIMED:
        ways = [v for v in runnable(row, arguments.limit_gb) if row.n <= MOST_RECORDS_TIMED.get(v, row.n)]
        spent = measure_time(row, ways, arguments.rounds)
        report["time"][row.label] = spent
        print(row.label)
        for variant, measured in spent.items():
            print(f"  {LABELS[variant]:30}{measured['cpu_ratio']:9.1f}x  {measured['cpu_seconds']:.3f} s", flush=True)
        write(report, out)


if __name__ == "__main__":
    main()
