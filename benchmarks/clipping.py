"""What clipping costs: a step with this package's engine and with opacus over a step without privacy.

    python benchmarks/clipping.py [--pairs 7] [--threads 2] [--quick]

The model is T5 in the shape of t5-small with random weights, in train mode with dropout 0.1; a
step is forward, backward, and (with privacy) the clipped sum. No optimizer, no noise.

* Time: the three variants run in one process, one after the other and in rotating order, after one
  step of each that is not counted (for the ghost engine that is the step with the audit, reported on
  its own). Each round gives one ratio to the plain step of the same round; the median over rounds is
  reported, for wall time and for CPU time. Other load on the machine moves both sides of a wall ratio.
* Memory: one fresh process per variant. The peak of the resident set (VmHWM, reset before the step)
  less the resident set after the model was built; freed blocks go back to the system at once
  (MALLOC_MMAP_THRESHOLD_), so the number is what the step needs, gradients or their sums included.
* ``opacus`` is GradSampleModule with DPOptimizer.clip_and_accumulate as the library runs them, with
  the relative position bias **frozen**, because opacus cannot do it. The ghost engine trains all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIANTS = ("plain", "ghost", "opacus")
SHAPES = {"4 x 384/64": (4, 384, 64), "8 x 128/24": (8, 128, 24)}
QUICK_SHAPES = {"3 x 32/8": (3, 32, 8)}


def build_model(quick: bool) -> Any:
    """T5 in the shape of t5-small; with ``quick`` a toy of the same kind."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    size = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=256) if quick else {}
    shape = dict(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128) | size
    return T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0)).train()


def build_step(variant: str, model: Any, shape: tuple[int, int, int]) -> Callable[[], None]:
    """One step of a variant; its result (gradients or their sums) is freed by the next one."""
    import torch
    import torch.nn.functional as F

    batch, source, target = shape
    vocabulary = model.config.vocab_size
    ids = torch.randint(1, vocabulary, (batch, source))
    labels = torch.randint(1, vocabulary, (batch, target))
    mask = torch.ones_like(ids)

    def losses() -> torch.Tensor:
        logits = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).logits
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)

    if variant == "plain":

        def plain() -> None:
            model.zero_grad(set_to_none=True)
            torch.autograd.backward(losses().sum())

        return plain
    if variant == "ghost":
        from lit_dpret.privacy.clipping import make_engine

        engine = make_engine("ghost", model, max_grad_norm=1.0)
        units, real = torch.arange(batch), torch.ones(batch, dtype=torch.bool)

        def ghost() -> None:
            engine.zero()
            engine.add(losses, units, real)

        return ghost
    import warnings

    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    warnings.filterwarnings("ignore", message="Full backward hook")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(trained, lr=0.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=batch
    )

    def opacus() -> None:
        optimizer.zero_grad(set_to_none=True)
        for p in trained:
            p.summed_grad = None
        torch.autograd.backward(losses().sum())
        optimizer.clip_and_accumulate()

    return opacus


def measure_time(shape: tuple[int, int, int], pairs: int, quick: bool) -> dict[str, Any]:
    """Seconds and ratios of every variant over the plain step, interleaved."""
    model = build_model(quick)
    steps = {"plain": build_step("plain", model, shape), "ghost": build_step("ghost", model, shape)}
    steps["opacus"] = build_step("opacus", build_model(quick), shape)

    def run(variant: str) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        steps[variant]()
        return time.perf_counter() - wall, time.process_time() - cpu

    run("plain")
    first = {variant: run(variant) for variant in VARIANTS}
    model.zero_grad(set_to_none=True)
    rounds: list[dict[str, tuple[float, float]]] = []
    for i in range(pairs):
        order = VARIANTS[i % 3 :] + VARIANTS[: i % 3]
        rounds.append({variant: run(variant) for variant in order})
        model.zero_grad(set_to_none=True)
    result: dict[str, Any] = {}
    for variant in VARIANTS:
        result[variant] = {
            "wall_seconds": statistics.median(r[variant][0] for r in rounds),
            "cpu_seconds": statistics.median(r[variant][1] for r in rounds),
            "wall_ratio": statistics.median(r[variant][0] / r["plain"][0] for r in rounds),
            "cpu_ratio": statistics.median(r[variant][1] / r["plain"][1] for r in rounds),
            "first_step_cpu_seconds": first[variant][1],
        }
    return result


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only.")


def measure_memory_here(variant: str, shape: tuple[int, int, int], quick: bool) -> dict[str, int]:
    """In a fresh process: bytes above the built model, in the first step and in later ones."""
    model = build_model(quick)
    step = build_step(variant, model, shape)
    peaks = []
    base = resident("VmRSS")
    for _ in range(3):
        Path("/proc/self/clear_refs").write_text("5")
        step()
        peaks.append(resident("VmHWM") - base)
    return {"model_bytes": base, "first_step_bytes": peaks[0], "later_step_bytes": max(peaks[1:])}


def measure_memory(name: str, quick: bool, threads: int) -> dict[str, Any]:
    """One process per variant."""
    result: dict[str, Any] = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--memory-of", variant, name, "--threads", str(threads)]
        environment = dict(os.environ, MALLOC_MMAP_THRESHOLD_="131072", MALLOC_TRIM_THRESHOLD_="131072")
        done = subprocess.run(
            command + ["--quick"] * quick, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        result[variant] = json.loads(done.stdout.splitlines()[-1])
        for key in ("first_step", "later_step"):
            result[variant][f"{key}_ratio"] = result[variant][f"{key}_bytes"] / result["plain"][f"{key}_bytes"]
    return result


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="rounds of all variants; at least 5 for a report")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a toy model: shows that the script runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "clipping.json")
    parser.add_argument("--memory-of", nargs=2, metavar=("VARIANT", "SHAPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    shapes = QUICK_SHAPES if arguments.quick else SHAPES
    if arguments.memory_of:
        variant, name = arguments.memory_of
        print(json.dumps(measure_memory_here(variant, shapes[name], arguments.quick)))
        return
    import opacus
    import transformers

    report: dict[str, Any] = {
        "model": "toy" if arguments.quick else "T5 in the shape of t5-small, 60.5 M parameters, dropout 0.1",
        "method": __doc__,
        "pairs": arguments.pairs,
        "threads": arguments.threads,
        "load_before": os.getloadavg()[0],
        "versions": {library.__name__: library.__version__ for library in (torch, opacus, transformers)},
        "shapes": {},
    }
    labels = {"plain": "no privacy", "ghost": "ghost (all trained)", "opacus": "opacus (position bias frozen)"}
    for name, shape in shapes.items():
        result = {
            "memory": measure_memory(name, arguments.quick, arguments.threads),
            "time": measure_time(shape, arguments.pairs, arguments.quick),
        }
        report["shapes"][name] = result
        print(f"\nbatch x tokens {name}")
        print(f"{'':32}{'wall':>8}{'cpu':>8}{'memory':>8}{'first step':>12}   seconds, MB above the model")
        for variant in VARIANTS:
            spent, held = result["time"][variant], result["memory"][variant]
            print(
                f"{labels[variant]:32}{spent['wall_ratio']:7.2f}x{spent['cpu_ratio']:7.2f}x"
                f"{held['later_step_ratio']:7.2f}x{held['first_step_ratio']:11.2f}x"
                f"   {spent['wall_seconds']:.2f} s, {held['later_step_bytes'] / 1e6:.0f} MB"
            )
    report["load_after"] = os.getloadavg()[0]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten: {arguments.out}")


if __name__ == "__main__":
    main()
