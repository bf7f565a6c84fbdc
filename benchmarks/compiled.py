"""Measure what torch.compile saves in a plain step, and how much of a private step it could reach.

    python benchmarks/compiled.py [--rounds 5] [--threads 2] [--device cpu|cuda] [--models NAME ...]

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from clipping import QUICK, ROWS, Row, build_losses, build_model, build_step, wait
from common import in_turns, machine, median_ratio, options, say, timed, write


def compiled_step(model: Any, row: Row, device: str) -> Any:
    """Return the plain step of a model of which forward and backward pass are compiled."""
    import torch

    model.compile(dynamic=False)
    losses = build_losses(model, row, device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(losses().sum())

    return step


def with_compiled_norms(step: Any) -> Any:
    """Return a private step whose norms are compiled, products and the bounds on their rounding alike."""
    from unittest.mock import patch

    import torch
    import torch._dynamo.config

    from lit_dpret.privacy.clipping.certificate import Bounds

    torch._dynamo.config.recompile_limit = 64  # a program for each shape of weights and inputs
    compiled = torch.compile(Bounds.of_products, dynamic=False)

    def of_products(self: Bounds, layers: Any, **settings: Any) -> None:
        compiled(self, list(layers), **settings)

    def changed() -> None:
        with patch.object(Bounds, "of_products", of_products):
            step()

    return changed


def shares_of_phases(step: Any, device: str) -> dict[str, float]:
    """Return the share of a private step's seconds that each phase of the clipping engine takes."""
    from torch.profiler import ProfilerActivity, profile

    from lit_dpret.privacy.clipping.ghost import PHASES, PREFIX

    activities = [ProfilerActivity.CPU] if device == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as found:
        begun = time.perf_counter()
        step()
        wait(device)
        whole = time.perf_counter() - begun
    total = "cpu_time_total" if device == "cpu" else "device_time_total"
    spent = {each.key: getattr(each, total) / 1e6 for each in found.key_averages()}
    shares = {name: spent[PREFIX + name] / whole for name in PHASES if PREFIX + name in spent}
    return shares | {"rest": 1 - sum(shares.values())}


def report_row(row: Row, rounds: int, device: str) -> dict[str, Any]:
    plain = build_step("plain", build_model(row.model, device), row, device)
    compiled = compiled_step(build_model(row.model, device), row, device)
    ghost = build_step("ghost", build_model(row.model, device), row, device)
    norms = with_compiled_norms(build_step("ghost", build_model(row.model, device), row, device))
    steps = {"plain": plain, "compiled": compiled, "ghost": ghost, "ghost, compiled norms": norms}

    def run(name: str) -> None:
        steps[name]()
        wait(device)

    first = {name: timed(partial(run, name))[1]["seconds"] for name in steps}
    for name in steps:
        run(name)
    done = in_turns({name: partial(run, name) for name in steps}, rounds)
    ratios = {name: median_ratio(done, name, "plain", "seconds") for name in steps if name != "plain"}
    shares = shares_of_phases(partial(run, "ghost"), device)
    if "check_backward" in shares:  # a step that checked itself; the next one does not
        shares = shares_of_phases(partial(run, "ghost"), device)
    say(f"{row.label}: over the plain step: {', '.join(f'{name} {ratio:.2f}' for name, ratio in ratios.items())}")
    say(f"  of the private step: {', '.join(f'{name} {share:.0%}' for name, share in shares.items())}")
    say(f"  first step with compilation: {', '.join(f'{name} {seconds:.0f} s' for name, seconds in first.items())}")
    return {"row": row.label, "over_plain": ratios, "first_step_seconds": first, "shares_of_private_step": shares}


def main() -> None:
    parser = options(__doc__, "compiled_cpu.json", rounds=5, threads=2, device="cpu")
    parser.add_argument("--models", nargs="*", default=["t5-small", "minilm"], help="names in cases.yaml")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    of_device = ROWS[arguments.device]
    rows = [row for row in (*of_device, *QUICK) if row.model in arguments.models]
    report = {
        "machine": machine("torch", "transformers"), "threads": arguments.threads, "device": arguments.device,
        "rows": [report_row(row, arguments.rounds, arguments.device) for row in rows],
    }  # fmt: skip
    write(report, arguments.out)


if __name__ == "__main__":
    main()
