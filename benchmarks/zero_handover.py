"""Compare four ways to hand a clipped sum and its noise to DeepSpeed's ZeRO: their error, traffic and draws.

    python benchmarks/zero_handover.py [--world 2] [--out benchmarks/results/zero_handover_cpu.json]

`benchmarks/README.md` says how it measures.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import common
from common import options, say, write

WAYS = ("pieces", "surrogate", "shares", "safe_set")
STEPS = 3


def one_rank(way: str, stage: int, bf16: bool) -> dict[str, Any]:
    import logging

    import deepspeed
    import torch
    import torch.distributed as dist
    from torch import nn

    from lit_dpret.distributed.ranks import Ranks
    from lit_dpret.distributed.zero import zero_handover

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    ranks = Ranks.here()
    world = ranks.world_size
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 33))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()  # so that the new weights equal the update
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    total = sum(parameter.numel() for parameter in net.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16}, "communication_data_type": "fp32", "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), config=config,
        model_parameters=net.parameters(), dist_init_required=False,
    )  # fmt: skip
    sent = _Sent()
    drawn = 0
    wanted = {name: torch.zeros(shape) for name, shape in shapes.items()}
    handover = zero_handover(engine, net, ranks) if way == "pieces" else None
    for step in range(STEPS):
        parts = [
            {name: 10 * torch.randn(shape, generator=_coins(step, rank, name)) for name, shape in shapes.items()}
            for rank in range(world)
        ]
        noise = {name: torch.randn(shape, generator=_coins(step, -1, name)) for name, shape in shapes.items()}
        own = {name: part.clone() for name, part in parts[ranks.rank].items()}
        share = {
            rank: {name: torch.randn(shape, generator=_coins(step, 100 + rank, name)) / world**0.5
                   for name, shape in shapes.items()}
            for rank in range(world)
        }  # fmt: skip
        if way == "shares":
            noise = {name: sum(each[name] for each in share.values()) for name in shapes}
        with sent:
            if handover is not None:
                pieces = handover.add_up(own)
                starts = handover.starts or {}
                for name, piece in pieces.items():
                    piece += noise[name].flatten()[starts[name] : starts[name] + len(piece)]
                    drawn += len(piece)
                handover.give(pieces, engine.optimizer)
            else:
                if way == "shares":
                    finished = {name: world * (own[name] + share[ranks.rank][name]) for name in shapes}
                else:
                    ranks.sum_(own)
                    finished = {name: own[name] + noise[name] for name in shapes}
                drawn += total
                through = {name: value if way != "safe_set" else torch.zeros_like(value)
                           for name, value in finished.items()}  # fmt: skip
                scalar = sum((p * through[name].to(p.dtype)).sum() for name, p in net.named_parameters())
                engine.backward(scalar)
                if way == "safe_set":
                    for name, parameter in net.named_parameters():
                        deepspeed.utils.safe_set_full_grad(parameter, finished[name])
        engine.step()
        for name in shapes:
            wanted[name] -= sum(part[name] for part in parts) + noise[name]
    error = 0.0
    for name, parameter in net.named_parameters():
        found = deepspeed.utils.safe_get_full_fp32_param(parameter).reshape(-1)
        error = max(error, float((found - wanted[name].flatten()).abs().max()))
    dist.barrier()
    return {"error": error, "sent": sent.bytes / STEPS / (4 * total), "drawn": drawn / STEPS / total}


def _coins(step: int, rank: int, name: str) -> Any:
    import torch

    return torch.Generator().manual_seed(hash((step, rank, len(name), name[0])) % 2**31)


class _Sent:
    """Counts the bytes passed to collectives while it is entered."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.bytes = 0.0
        self._on = False
        for name, factor in (("all_reduce", 2), ("reduce", 1), ("reduce_scatter", 1), ("reduce_scatter_tensor", 1),
                             ("all_gather", 1), ("all_gather_into_tensor", 1), ("broadcast", 1)):  # fmt: skip
            setattr(dist, name, self._counting(getattr(dist, name), factor))

    def _counting(self, plain: Any, factor: int) -> Any:
        import torch

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._on:
                given = [*args, *kwargs.values()]
                tensors = [t for a in given for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
                largest = max((a for a in given if isinstance(a, list)), key=len, default=None)
                size = sum(t.numel() * t.element_size() for t in largest) if largest else max(
                    t.numel() * t.element_size() for t in tensors)  # fmt: skip
                self.bytes += factor * size
            return plain(*args, **kwargs)

        return call

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False


def measure(way: str, stage: int, bf16: bool, world: int) -> dict[str, Any]:
    """Start the ranks, and return the worst of their results."""
    words = ["--rank", json.dumps([way, stage, bf16])]
    try:
        told = common.ranks(
            __file__, *words, world=world, timeout=300, DS_ACCELERATOR="cpu", PYTHONHASHSEED="0"
        )  # fmt: skip
    except RuntimeError as error:
        return {"refused": str(error)[:200]}
    row: dict[str, Any] = {key: max(each[key] for each in told) for key in told[0]}
    row["post_processing"] = way != "shares" or not bf16
    return row


def main() -> None:
    parser = options(__doc__, None, world=2)
    parser.add_argument("--quick", action="store_true", help="one stage and one precision")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        say(json.dumps(one_rank(*json.loads(arguments.rank))))
        return
    rows: dict[str, Any] = {}
    for stage in (2,) if arguments.quick else (1, 2, 3):
        for bf16 in (True,) if arguments.quick else (False, True):
            for way in WAYS:
                if stage == 3 and way != "pieces":
                    continue
                name = f"ZeRO-{stage}, {'bfloat16' if bf16 else 'float32'}, {way}"
                rows[name] = row = measure(way, stage, bf16, arguments.world)
                print(f"{name:34}", *(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if arguments.out:
        write({"world": arguments.world, "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
