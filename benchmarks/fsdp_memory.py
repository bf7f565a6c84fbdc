"""Memory of a private step on one of two ranks: DDP, FSDP2 in one piece and block by block.

    python benchmarks/fsdp_memory.py

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from common import CASES, GIVEN_BACK, machine, options, ranks, say, write
from torch import Tensor, nn

from lit_dpret.costs.measure import peak, reset_peak, resident

HERE = torch.device("cpu")
WAYS = ("ddp", "fsdp, one piece", "fsdp, by block", "fsdp, by block, bf16")
SHAPES: dict[str, Any] = CASES["t5"]


class Model(nn.Module):
    """A T5 and its loss, row by row."""

    def __init__(self, shape: dict[str, Any]) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        torch.manual_seed(0)
        self.t5 = T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0))

    def losses(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.t5(input_ids=ids, labels=labels, use_cache=False).logits.float()
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)


def measure(way: str, shape: str, steps: int, units: int) -> dict[str, Any]:
    """Do one rank's work: clip, add up, noise, step."""
    from torch.distributed.device_mesh import init_device_mesh

    from lit_dpret.distributed import fsdp
    from lit_dpret.distributed.ranks import Ranks
    from lit_dpret.distributed.shards import like, place_of
    from lit_dpret.modules import OptimizerSpec
    from lit_dpret.privacy.clipping import make_engine
    from lit_dpret.privacy.noise import KeyedStream

    dist.init_process_group("gloo")
    group, shards = Ranks.here(), None
    mesh = init_device_mesh("cpu", (group.world_size,))
    group.barrier()
    warm = torch.nn.Linear(8, 8)  # what the first step of an optimizer imports is not the model's
    warm(torch.ones(1, 8)).sum().backward()
    torch.optim.Adam(warm.parameters()).step()
    before = resident(HERE)
    model = Model(SHAPES[shape])
    if way != "ddp":
        if way == "fsdp, one piece":
            fsdp.own_blocks = lambda module: []
        shards = fsdp.ShardedParameters(model, mesh, compute_dtype=torch.bfloat16 if way.endswith("bf16") else None)
        with shards.whole():
            engine = make_engine("ghost", model, max_grad_norm=0.1, clip="abadi", clip_groups="flat")
    else:
        engine = make_engine("ghost", model, max_grad_norm=0.1, clip="abadi", clip_groups="flat")
    optimizer = OptimizerSpec(name="adam", lr=1e-3).build(model.parameters(), steps=0)
    stream = KeyedStream(b"s" * 32, "benchmark")
    vocabulary = SHAPES[shape]["vocab_size"]
    ids, labels = torch.randint(1, vocabulary, (units, 64)), torch.randint(1, vocabulary, (units, 16))

    def step(number: int) -> None:
        if shards is not None:
            shards.gather()
        engine.add(lambda: model.losses(ids, labels), torch.arange(units), torch.ones(units, dtype=torch.bool))
        sums = engine.take()
        if shards is not None:
            shards.scatter()
            sums = shards.add_up(sums)
        else:
            group.sum_(sums)
        for name, parameter in model.named_parameters():
            total, start = place_of(sums[name])
            noise = stream.normal(total.shape, attempt=0, step=number, parameter=name, start=start)
            parameter.grad = like(sums.pop(name), total.add_(noise.mul_(0.1)).div_(units))
            del total, noise
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(0)
    group.barrier()
    reset_peak(HERE)
    for number in range(1, steps + 1):
        step(number)
    highest, held = peak(HERE), resident(HERE)
    state = [v for each in optimizer.state.values() for v in each.values() if torch.is_tensor(v)]
    counted = sum(place_of(t)[0].numel() * t.element_size() for t in (*model.parameters(), *state))
    dist.destroy_process_group()
    parameters = sum(p.numel() for p in model.parameters())
    return {"held": held - before, "peak": highest - before, "counted": counted, "parameters": parameters}


def run(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    words = ["--rank-of", way, "--shape", arguments.shape, "--steps", arguments.steps, "--units", arguments.units]
    found: dict[str, Any] = ranks(__file__, *words, world=2, timeout=arguments.timeout, **GIVEN_BACK)[0]
    return found


def main() -> None:
    parser = options(__doc__, "fsdp_memory_cpu.json", steps=3, timeout=600)
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--units", type=int, default=4, help="of a rank, in one physical batch")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        say(json.dumps(measure(arguments.rank_of, arguments.shape, arguments.steps, arguments.units)))
        return
    rows = {way: run(way, arguments) for way in WAYS}
    for row in rows.values():
        for name in ("held", "peak", "counted"):
            row[f"{name}_to_ddp"] = round(row[name] / rows["ddp"][name], 2)
    say(json.dumps(rows, indent=1))
    facts = {"rows": rows, "shape": arguments.shape, "units": arguments.units, "ranks": 2, **machine("torch")}
    write(facts, arguments.out)


if __name__ == "__main__":
    main()
