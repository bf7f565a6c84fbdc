"""Measure the cost of clipping every pair (Logit-DP), over keeping n squared gradients and over a plain step.

    python benchmarks/logit_dp.py [--rounds 5] [--threads 1] [--quick]

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import GIVEN_BACK, apart, in_turns, machine, median_ratio, options, say, timed, write

TEMPERATURE = 1.0
BOUND = 0.5
ROWS_AT_ONCE = 64

LABELS = {
    "plain": "no privacy", "vmap": "all gradients (one vmap)", "brute_force": "all gradients (a loop)",
    "pair_ghost": "pair_ghost", "jacobian": "jacobian", "k_blocks": "k_blocks (bound)",
    "k_blocks_towers": "k_blocks (two towers, exact)",
}  # fmt: skip
#: The variants that keep n squared gradients.
MATERIALISING = ("vmap", "brute_force")


@dataclass(frozen=True)
class Row:
    """A model name, the number of records, and the embedding dimension."""

    model: str
    n: int
    dim: int

    @property
    def label(self) -> str:
        return f"{self.model} n={self.n} d={self.dim}"


TIMED = [
    *(Row("conv", n, 8) for n in (16, 64, 400)),
    *(Row("conv", 64, d) for d in (32,)),
    *(Row("mlp", n, 64) for n in (16, 64)),
    *(Row("minilm-shape", n, 32) for n in (16, 64)),
    *(Row("minilm", n, 384) for n in (8, 16)),
]
WEIGHED = [
    *(Row("conv", n, 8) for n in (16, 32, 64, 128, 400)),
    *(Row("mlp", n, 64) for n in (16, 32, 64, 128)),
    *(Row("minilm-shape", n, 32) for n in (16, 32, 64, 128)),
]
#: More records, or columns of a Jacobian, would take minutes.
MOST_RECORDS_TIMED = {"brute_force": 16, "pair_ghost": 128}
MOST_COLUMNS_TIMED = {"jacobian": 64, "k_blocks": 64, "k_blocks_towers": 64, "brute_force": 64}
QUICK = [Row("conv", 3, 4), Row("mlp", 4, 4)]


def build_encoder(name: str, dim: int) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Normalised(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return F.normalize(self.body(rows), dim=1)

    class Pooled(nn.Module):
        def __init__(self, encoder: nn.Module, width: int) -> None:
            super().__init__()
            self.encoder = encoder
            self.head = nn.Identity() if dim == width else nn.Linear(width, dim, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(input_ids=ids).last_hidden_state.mean(1))

    if name == "conv":
        layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()]
        layers += [nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, dim)]
        return Normalised(nn.Sequential(*layers)).eval()
    if name == "mlp":
        return Normalised(nn.Sequential(nn.Linear(384, 256), nn.GELU(), nn.Linear(256, dim))).eval()
    from transformers import BertConfig, BertModel

    width, layers, words, attention = (384, 6, 30522, "sdpa") if name == "minilm" else (48, 2, 512, "eager")
    shape = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=4 * width)
    config = BertConfig(**shape, vocab_size=words, max_position_embeddings=32, attn_implementation=attention)
    return Normalised(Pooled(BertModel(config, add_pooling_layer=False), width)).eval()


def build_rows(model: str, n: int) -> Any:
    import torch

    if model == "conv":
        return torch.randn(n, 3, 32, 32)
    return torch.randn(n, 384) if model == "mlp" else torch.randint(1, 512, (n, 24 if model == "minilm" else 16))


def build_module(variant: str, row: Row) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    count = 2 if variant.endswith("_towers") else 1
    return nn.ModuleList([build_encoder(row.model, row.dim) for _ in range(count)])


def build_step(variant: str, module: Any, row: Row) -> Callable[[], Any]:
    """Return one step of a variant: the gradient of an in-batch softmax, clipped pair by pair to ``BOUND``."""
    import torch
    import torch.nn.functional as F

    from lit_dpret.privacy.clipping.pairs import (
        BruteForce,
        PairBatch,
        clipped_pair_factors,
        embed_all,
        make_pair_norms,
        weighted_backward,
    )

    n = row.n
    queries, passages = build_rows(row.model, n), build_rows(row.model, n)
    batch = PairBatch(queries, passages, module[0], module[-1], n)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def slopes() -> torch.Tensor:
        e, f = embed_all(batch, rows_at_once=ROWS_AT_ONCE)
        return ((e @ f.T / TEMPERATURE).softmax(1) - torch.eye(n)) / TEMPERATURE

    def plain() -> list[torch.Tensor]:
        logits = module[0](queries) @ module[-1](passages).T / TEMPERATURE
        loss = F.cross_entropy(logits, torch.arange(n), reduction="sum")
        return list(torch.autograd.grad(loss, list(trained.values()), allow_unused=True))

    def weighted(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        norms = torch.zeros(n, n)
        for gradient in gradients.values():  # row by row: the squares of all would need another n * n * p
            for i, of_query in enumerate(gradient):
                norms[i] += of_query.flatten(1).square().sum(1)
        weights = slopes() * clipped_pair_factors(norms.sqrt(), BOUND)[0]
        return {name: torch.tensordot(weights, gradient, dims=2) for name, gradient in gradients.items()}

    def vmap() -> dict[str, torch.Tensor]:
        values = {name: p.detach() for name, p in trained.items()}

        def similarity(values: dict[str, torch.Tensor], query: torch.Tensor, passage: torch.Tensor) -> torch.Tensor:
            sides = {name.removeprefix("0."): value for name, value in values.items()}
            e, f = (torch.func.functional_call(module[0], sides, (x[None],)) for x in (query, passage))
            return (e * f).sum()

        of_pair = torch.func.grad(similarity)
        by_passage = torch.func.vmap(of_pair, in_dims=(None, None, 0))
        return weighted(torch.func.vmap(by_passage, in_dims=(None, 0, None))(values, queries, passages))

    if variant == "plain":
        return plain
    if variant == "vmap":
        return vmap
    if variant == "brute_force":
        return lambda: weighted(BruteForce(module).gradients(batch))
    towers = variant.endswith("_towers")
    norms: Any = make_pair_norms(variant.removesuffix("_towers"), module, shared=not towers)  # type: ignore[arg-type]

    def private() -> dict[str, torch.Tensor]:
        factors, _ = clipped_pair_factors(norms.table(batch), BOUND)
        return weighted_backward(batch, slopes() * factors, trained, rows_at_once=ROWS_AT_ONCE)

    return private


def gradient_bytes(row: Row) -> int:
    return 4 * row.n**2 * sum(p.numel() for p in build_module("plain", row).parameters())


def measure_time(row: Row, variants: list[str], rounds: int) -> dict[str, Any]:
    """Return the seconds of every variant, and their ratios to the plain step."""
    steps: dict[str, Callable[[], Any]] = {v: build_step(v, build_module(v, row), row) for v in variants}

    often = {v: step for v, step in steps.items() if v not in MATERIALISING}
    for step in often.values():  # not counted: it includes the engine's audit
        step()
    done = in_turns(often, rounds)
    for variant in set(variants) - set(often):
        build_step(variant, build_module(variant, row), Row(row.model, 2, row.dim))()
        _, once = timed(steps[variant])
        for found in done:
            found[variant] = once
    return {
        variant: {
            "wall_seconds": statistics.median(found[variant]["seconds"] for found in done),
            "cpu_seconds": statistics.median(found[variant]["processor_seconds"] for found in done),
            "cpu_ratio": median_ratio(done, variant, "plain", "processor_seconds"),
        }
        for variant in variants
    }


def measure_memory_here(variant: str, row: Row) -> int:
    """Measure, in a fresh process, how many bytes a step needs beyond a step with two records."""
    import torch

    from lit_dpret.costs.measure import peak, reset_peak, resident

    build_step(variant, build_module(variant, row), Row(row.model, 2, row.dim))()
    step, here = build_step(variant, build_module(variant, row), row), torch.device("cpu")
    base = resident(here)
    reset_peak(here)
    step()
    return peak(here) - base


def measure_memory(variant: str, row: Row, threads: int) -> int:
    """Measure in a separate process."""
    words = ["--threads", threads, "--memory-of", variant, row.model, row.n, row.dim]
    return int(apart(__file__, *words, **GIVEN_BACK))


def runnable(row: Row, limit_gb: float) -> list[str]:
    return [v for v in LABELS if v not in MATERIALISING or gradient_bytes(row) <= limit_gb * 1e9]


def main() -> None:
    parser = options(__doc__, "logit_dp_cpu.json", threads=1)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways")
    parser.add_argument("--limit-gb", type=float, default=2.0, help="limit for gradients that are kept")
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that the script runs")
    parser.add_argument(
        "--part", choices=["both", "time"], default="both", help="time: keep the memory results in the file"
    )
    parser.add_argument("--memory-of", nargs=4, metavar="X", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        variant, model, n, dim = arguments.memory_of
        say(str(measure_memory_here(variant, Row(model, int(n), int(dim)))))
        return
    report: dict[str, Any] = {
        "method": __doc__, "rounds": arguments.rounds, "threads": arguments.threads, **machine("torch"), "memory": {},
        "time": {},
    }  # fmt: skip
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
        ways = [
            v
            for v in runnable(row, arguments.limit_gb)
            if row.n <= MOST_RECORDS_TIMED.get(v, row.n) and row.dim <= MOST_COLUMNS_TIMED.get(v, row.dim)
        ]
        spent = measure_time(row, ways, arguments.rounds)
        report["time"][row.label] = spent
        print(row.label)
        for variant, measured in spent.items():
            print(f"  {LABELS[variant]:30}{measured['cpu_ratio']:9.1f}x  {measured['cpu_seconds']:.3f} s", flush=True)
        write(report, out)


if __name__ == "__main__":
    main()
