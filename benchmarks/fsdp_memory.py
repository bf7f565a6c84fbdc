"""Measure the memory of a private step on a rank: DDP, and FSDP2 with weights gathered at once or block by block.

    python benchmarks/fsdp_memory.py
    python benchmarks/fsdp_memory.py --scaling --out benchmarks/results/fsdp_scaling_cpu.json

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from common import CASES, GIVEN_BACK, machine, options, ranks, say, write
from torch import Tensor, nn

from lit_dpret.costs.measure import LiveBytes, peak, reset_peak, resident
from lit_dpret.distributed.fsdp import CutParameter, ShardedParameters

HERE = torch.device("cpu")
WAYS = ("ddp", "fsdp, at once", "fsdp, by block", "fsdp, by block, bf16")
SHAPES: dict[str, Any] = CASES["t5"]
#: Bytes of state per trained weight: itself, Adam's two moments and the clipped sum, all in float32.
STATE = 16


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


def most_alive(work: Callable[[], object]) -> int:
    """Return the largest number of bytes that tensors created by ``work`` hold at once, including gathered weights.

    Memory inside a communication backend or a kernel does not count.
    """
    alive = LiveBytes()
    kept = CutParameter.allocate, CutParameter.free

    def change(cut: Any, how: Callable[[Any], None]) -> None:
        before = cut.memory.untyped_storage().nbytes()
        how(cut)
        alive.now += cut.memory.untyped_storage().nbytes() - before
        alive.peak = max(alive.peak, alive.now)

    CutParameter.allocate = lambda cut: change(cut, kept[0])  # type: ignore[method-assign]
    CutParameter.free = lambda cut: change(cut, kept[1])  # type: ignore[method-assign]
    try:
        with alive:
            work()
    finally:
        CutParameter.allocate, CutParameter.free = kept  # type: ignore[method-assign]
    return alive.peak


def measure(way: str, shape: dict[str, Any], steps: int, units: int, tokens: tuple[int, int]) -> dict[str, Any]:
    """Do one rank's work: clip, sum, add noise, step."""
    from torch.distributed.device_mesh import init_device_mesh

    from lit_dpret.distributed.block_by_block import BlockByBlock
    from lit_dpret.distributed.ranks import Ranks
    from lit_dpret.distributed.shards import like, place_of
    from lit_dpret.modules import OptimizerSpec
    from lit_dpret.privacy.clipping import make_engine
    from lit_dpret.privacy.noise import KeyedStream

    dist.init_process_group("gloo")
    group, shards, store = Ranks.here(), None, None
    mesh = init_device_mesh("cpu", (group.world_size,))
    group.barrier()
    warm = torch.nn.Linear(8, 8)  # memory of modules that an optimizer's first step imports is not the model's
    warm(torch.ones(1, 8)).sum().backward()
    torch.optim.Adam(warm.parameters()).step()
    before = resident(HERE)
    model = Model(shape)
    if way != "ddp":
        shards = ShardedParameters(model, mesh, compute_dtype=torch.bfloat16 if way.endswith("bf16") else None)
    if shards is not None and "by block" in way:
        store = BlockByBlock(shards, group)

    def new_engine() -> Any:
        whole = nullcontext() if shards is None else shards.whole() if store is None else store.placed()
        with whole:
            engine = make_engine("ghost", model, max_grad_norm=0.1, clip="abadi", clip_groups="flat")
        engine.store = store
        return engine

    engine = new_engine()
    optimizer = OptimizerSpec(name="adam", lr=1e-3).build(model.parameters(), steps=0)
    stream = KeyedStream(b"s" * 32, "benchmark")
    ids, labels = (torch.randint(1, shape["vocab_size"], (units, count)) for count in tokens)

    def clip() -> dict[str, Tensor]:
        """Return this rank's part of the sum, from two physical batches."""
        if shards is not None and store is None:
            shards.gather()
        for _ in range(2):
            with nullcontext() if store is None else store.passes():
                engine.add(lambda: model.losses(ids, labels), torch.arange(units), torch.ones(units, dtype=torch.bool))
        sums: dict[str, Tensor] = engine.take()
        if shards is None:
            group.sum_(sums)
        elif store is None:
            shards.scatter()
            sums = shards.add_up(sums)
        return sums

    def step(number: int) -> None:
        sums = clip()
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
    found = {"held": held - before, "peak": highest - before, "counted": counted}
    group.barrier()
    found["counted_clipping"] = counted + most_alive(clip)
    engine = new_engine()
    found["counted_checking"] = counted + most_alive(clip)  # its first batch
    dist.destroy_process_group()
    found["parameters"] = sum(p.numel() for p in model.parameters())
    if shards is not None:
        sizes = [sum(cut.cut.numel() for cut in block.cuts.values()) for block in shards.blocks]
        found |= {"largest_block": max(sizes), "outside_of_blocks": sizes[-1]}
    return found


def run(way: str, arguments: argparse.Namespace, *, world: int = 2, layers: int | None = None) -> dict[str, Any]:
    words: list[object] = ["--rank-of", way, "--shape", arguments.shape, "--steps", arguments.steps]
    words += ["--units", arguments.units, "--tokens", *arguments.tokens]
    words += [] if layers is None else ["--layers", layers]
    found: list[dict[str, Any]] = ranks(__file__, *words, world=world, timeout=arguments.timeout, **GIVEN_BACK)
    return {name: max(each[name] for each in found) for name in found[0]}  # of the rank that holds most


def scaling(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the counted peaks of the rank that holds most, by number of ranks and of layers."""
    rows = []
    for layers in arguments.scaling_layers:
        for world in arguments.scaling_ranks:
            at_once = ["fsdp, at once"] if layers == max(arguments.scaling_layers) else []
            for way in (*at_once, "fsdp, by block"):
                found = run(way, arguments, world=world, layers=layers)
                share, block = STATE * found["parameters"] / world, 4 * found["largest_block"]
                row = {"layers": layers, "ranks": world, "way": way, **found, "state_share": round(share)}
                for name in ("counted_clipping", "counted_checking"):
                    row[f"{name}_beyond_share_in_blocks"] = round((found[name] - share) / block, 2)
                rows.append(row)
                say(json.dumps(row))
    return rows


def main() -> None:
    parser = options(__doc__, "fsdp_memory_cpu.json", steps=3, timeout=600)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument(
        "--units", type=int, help="units per rank in one physical batch; default 4, or 1 with --scaling"
    )
    parser.add_argument(
        "--tokens", type=int, nargs=2, help="tokens of passage and query; default 64 16, or 2 1 with --scaling"
    )
    parser.add_argument("--scaling", action="store_true", help="vary the numbers of ranks and of layers")
    parser.add_argument("--scaling-ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--scaling-layers", type=int, nargs="+", default=[6, 12, 24], help="layers of encoder and of decoder"
    )
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.shape = arguments.shape or ("t5-3b/8" if arguments.scaling else "t5-small")
    arguments.units = arguments.units or (1 if arguments.scaling else 4)
    arguments.tokens = arguments.tokens or ([2, 1] if arguments.scaling else [64, 16])
    if arguments.rank_of:
        shape = SHAPES[arguments.shape] | ({} if arguments.layers is None else {"num_layers": arguments.layers})
        passage, query = arguments.tokens
        say(json.dumps(measure(arguments.rank_of, shape, arguments.steps, arguments.units, (passage, query))))
        return
    facts = {"shape": arguments.shape, "units": arguments.units, "tokens": arguments.tokens}
    if arguments.scaling:
        write({"rows": scaling(arguments), **facts, **machine("torch")}, arguments.out)
        return
    rows = {way: run(way, arguments) for way in WAYS}
    for row in rows.values():
        for name in ("held", "peak", "counted", "counted_clipping", "counted_checking"):
            row[f"{name}_to_ddp"] = round(row[name] / rows["ddp"][name], 2)
    say(json.dumps(rows, indent=1))
    write({"rows": rows, **facts, "ranks": 2, **machine("torch")}, arguments.out)


if __name__ == "__main__":
    main()
