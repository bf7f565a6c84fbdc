"""Hold `task=plan`'s predictions against real private steps of T5-small and T5-base shapes, in one run.

    python benchmarks/plan_cost.py                     every case below
    python benchmarks/plan_cost.py --only small:2      cases whose name begins so

Weights are random, ids are random, lengths are 384 and 128. Each real step runs in a process of its own, whose memory
is read from the kernel with glibc told to hand freed memory back at once (it keeps up to some hundred MB otherwise).
Results are added to benchmarks/results/plan_cost_cpu.json case by case, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "plan_cost_cpu.json"
LORA = {"lora": {"r": 16, "lora_alpha": 32, "target_modules": ["q", "v"]}}
CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    f"{size}:{rows}:{label}": (f"google-t5/t5-{size}", rows, settings, precision)
    for size in ("small", "base")
    for rows in (2, 4)
    for label, settings, precision in (
        ("full", {}, "32-true"),
        ("checkpointing", {"gradient_checkpointing": True}, "32-true"),
        ("lora", LORA, "32-true"),
        ("bf16", {}, "bf16-true"),
    )
}


def plan_of(rows: int) -> Any:
    from lit_dpret.privacy.budget import PrivacyBudget
    from lit_dpret.privacy.plan import PrivacyPlan

    return PrivacyPlan.build(
        PrivacyBudget(eps=3.0, delta=1e-5), sampling="poisson", steps=60, max_grad_norm=0.1, n_public=10_000,
        expected_batch_size=64, noise_multiplier=5.0, physical_batch_size=rows,
    )  # fmt: skip


def one(case: str, what: str) -> dict[str, Any]:
    """The prediction of a case, or the real step, in this process."""
    import torch

    from lit_dpret.modules import OptimizerSpec
    from lit_dpret.modules.outline import GeneratorOutline
    from lit_dpret.modules.query_generator import QueryGenerator
    from lit_dpret.privacy.modes import DPSGD
    from lit_dpret.tasks.plan_cost import estimate, from_slices, measure

    torch.set_num_threads(1)
    name, rows, settings, precision = CASES[case]
    plan, cpu = plan_of(rows), torch.device("cpu")
    outline = GeneratorOutline.of_settings(optimizer=OptimizerSpec(), pretrained=name, **settings)
    if what == "estimate":
        return estimate(outline, plan, cpu, precision=precision)
    if what == "slices":
        return from_slices(outline, plan, cpu, precision=precision)
    shape = {k: v for k, v in outline.model.config.to_dict().items() if k in ("d_model", "d_kv", "d_ff", "num_layers",
             "num_decoder_layers", "num_heads", "vocab_size")}  # fmt: skip
    module = QueryGenerator(
        privacy=DPSGD(eps=3.0), optimizer=OptimizerSpec(), pretrained=None, config=shape, tokenizer="public_t5",
        max_passage_length=384, max_query_length=128, **settings,
    )  # fmt: skip
    if precision == "bf16-true":
        module.to(torch.bfloat16)
    return measure(module, plan, cpu)


def apart(case: str, what: str) -> dict[str, Any]:
    """The same in a process of its own."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
    command = [sys.executable, __file__, "--one", case, what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratios(told: dict[str, Any], real: dict[str, Any]) -> dict[str, float]:
    names = ("seconds_of_batch", "seconds_of_update", "seconds_per_step", "bytes", "bytes_while_clipping")
    return {name: told[name] / real[name] for name in names if name in told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--one", nargs=2)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(*asked.one)))
        return
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"cases": {}}
    for case in (each for each in CASES if each.startswith(asked.only) and each not in results["cases"]):
        load = os.getloadavg()[0]
        found = {what: apart(case, what) for what in ("slices", "measurement", "estimate")}
        results["cases"][case] = {
            "load": load,
            **found,
            "predicted_over_measured": {
                what: ratios(found[what], found["measurement"]) for what in ("slices", "estimate")
            },
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(case, json.dumps(results["cases"][case]["predicted_over_measured"]), flush=True)


if __name__ == "__main__":
    main()
