"""Compare the predictions of `task=plan` with real private steps of T5-small and T5-base shapes.

    python benchmarks/plan_cost.py                     every case below that is not in the results
    python benchmarks/plan_cost.py --only small:2      cases whose name begins so, again
    python benchmarks/plan_cost.py --table             the results so far, as a table

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import json
import os
from statistics import median
from typing import Any

from common import apart, options, say, write

ROUNDS = 3
LORA = {"lora": {"r": 16, "lora_alpha": 32, "target_modules": ["q", "v"]}}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({}, "32-true"),
    "checkpointing": ({"gradient_checkpointing": True}, "32-true"),
    "lora": (LORA, "32-true"),
    "bf16": ({}, "bf16-true"),
}
PARTS = ("slices", "measurement", "times", "estimate", "measurement_with_holes")
CASES = [
    "small:2:lora", "small:2:checkpointing", "small:2:bf16", "base:1:full", "base:2:lora", "small:2:full",
    "small:4:full", "small:4:lora",
]  # fmt: skip
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "65536"}


class Case:
    """A model and the plan of its steps."""

    def __init__(self, name: str) -> None:
        from lit_dpret.modules import OptimizerSpec
        from lit_dpret.modules.outline import GeneratorOutline
        from lit_dpret.privacy.budget import PrivacyBudget
        from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan

        size, rows, label = name.split(":")
        self.rows = int(rows)
        settings, self.precision = SETTINGS[label]
        self.outline = GeneratorOutline.of_settings(
            optimizer=OptimizerSpec(), pretrained=f"google-t5/t5-{size}", **settings
        )
        self.plan = PrivacyPlan.build(
            PrivacyBudget(eps=3.0, delta=1e-5),
            PlainSamplingRequest(sampling="poisson", expected_batch_size=64, physical_batch_size=self.rows),
            steps=60, max_grad_norm=0.1, n_public=10_000, noise_multiplier=5.0,
        )  # fmt: skip
        config: Any = self.outline.model.config
        self.layers = int(config.num_layers), int(config.num_decoder_layers)

    def model(self, encoder: int, decoder: int) -> Any:
        import torch

        from lit_dpret.costs.slices import slice_of

        module = slice_of(self.outline, encoder, decoder)
        return module.to(torch.bfloat16) if self.precision == "bf16-true" else module


def one(name: str, what: str) -> dict[str, Any]:
    """Return the prediction for a case, a real step, or times of both in turn, measured in this process."""
    import torch

    from lit_dpret.costs.estimate import estimate, measure

    torch.set_num_threads(1)
    case, cpu = Case(name), torch.device("cpu")
    if what == "times":
        return times(case)
    if what.startswith("measurement"):
        return measure(case.model(*case.layers), case.plan, cpu)
    if what == "slices":
        return memory(case)
    return estimate(case.outline, case.plan, cpu, precision=case.precision)


def memory(case: Case) -> dict[str, Any]:
    import torch

    from lit_dpret.costs.measure import held_bytes
    from lit_dpret.costs.memory import bytes_of
    from lit_dpret.costs.slices import SLICES, Part, taken_apart

    cpu = torch.device("cpu")
    parts = [Part(0.0, held_bytes(case.model(*layers), case.plan, cpu)) for layers in SLICES]
    base, encoder, decoder = taken_apart(parts)
    held = (base + encoder * case.layers[0] + decoder * case.layers[1]).held
    half = case.precision == "bf16-true"
    found = bytes_of(case.outline, half=half, rows=case.rows, clipped=held.clipped, checked=held.checked)
    return {
        "bytes": found.peak, "bytes_while_clipping": found.clipping, "bytes_while_updating": found.updating,
        "bytes_per_row": found.row,
    }  # fmt: skip


def times(case: Case) -> dict[str, Any]:
    """Return the processor seconds of a batch and of an update in every round, predicted from slices and real."""
    import torch

    from lit_dpret.costs.measure import TrialStep, seconds
    from lit_dpret.costs.slices import SLICES

    cpu = torch.device("cpu")
    whole = TrialStep(case.model(*case.layers), case.plan, cpu)
    whole.clip(case.rows)
    whole.update()  # makes the optimizer's states
    whole.clip(case.rows)
    rounds = []
    for _ in range(ROUNDS):
        slices = []
        for layers in SLICES:
            module = case.model(*layers)
            step = TrialStep(module, case.plan, cpu)
            step.clip(case.rows)
            batch = seconds(lambda step=step: step.clip(case.rows), cpu)  # type: ignore[misc]
            slices.append((batch, seconds(step.update, cpu) / module.outlined.trained))
            del step, module
        (small, rate), (encoder, _), (decoder, _) = slices
        rounds.append({
            "told_batch": small + sum(
                (more - small) / 2 * (count - 1) for more, count in zip((encoder, decoder), case.layers, strict=True)
            ),
            "told_update": rate * case.outline.trained,
            "batch": seconds(lambda: whole.clip(case.rows), cpu),
            "update": seconds(whole.update, cpu),
        })  # fmt: skip
        whole.clip(case.rows)
    found = {key: median(each[key] for each in rounds) for key in rounds[0]}
    batches = case.plan.denominator / case.rows
    told, real = (batches * found[f"{who}batch"] + found[f"{who}update"] for who in ("told_", ""))
    return {"rounds": rounds, **found, "told_step": told, "step": real}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Return predicted over measured values, where both are known."""
    slices, real, timed = (found.get(what, {}) for what in ("slices", "measurement", "times"))
    estimate, plain = found.get("estimate", {}), found.get("measurement_with_holes", {})
    pairs = {
        "bytes": (slices.get("bytes"), real.get("bytes")),
        "bytes_while_clipping": (slices.get("bytes_while_clipping"), real.get("bytes_while_clipping")),
        "bytes_while_updating": (slices.get("bytes_while_updating"), real.get("bytes_while_updating")),
        "bytes_over_those_with_holes": (slices.get("bytes"), plain.get("bytes")),
        "batch": (timed.get("told_batch"), timed.get("batch")),
        "update": (timed.get("told_update"), timed.get("update")),
        "step": (timed.get("told_step"), timed.get("step")),
        "bytes_estimated": (estimate.get("bytes"), real.get("bytes")),
        "step_estimated": (estimate.get("seconds_per_step"), timed.get("step")),
    }
    return {name: told / measured for name, (told, measured) in pairs.items() if told and measured}


def table(cases: dict[str, Any]) -> str:
    names = ("bytes", "step", "bytes_over_those_with_holes", "bytes_estimated", "step_estimated")
    lines = [["case", *names], ["---"] * (1 + len(names))]
    for case, found in cases.items():
        told = found["predicted_over_measured"]
        lines.append([case, *(f"{told[name]:.2f}" if name in told else "" for name in names)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = options(__doc__, "plan_cost_cpu.json")
    parser.add_argument("--only", default="")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", nargs=2)
    asked = parser.parse_args()
    if asked.one:
        say(json.dumps(one(*asked.one)))
        return
    results = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {"cases": {}}
    if asked.table:
        say(table(results["cases"]))
        return
    for case in CASES:
        for what in PARTS:
            found = results["cases"].setdefault(case, {})
            if not case.startswith(asked.only) or (what in found and not asked.only):
                continue
            before = os.getloadavg()[0]
            found[what] = apart(__file__, "--one", case, what, **(MAPPED if what == "measurement" else {}))
            found[what]["load"] = [before, os.getloadavg()[0]]
            found["predicted_over_measured"] = ratios(found)
            whole = {name: each for name, each in results["cases"].items() if each}
            write({"cases": whole}, asked.out)
            say(f"{case} {what} {json.dumps(found['predicted_over_measured'])}")


if __name__ == "__main__":
    main()
