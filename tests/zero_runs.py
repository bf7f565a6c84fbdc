"""Tiny private runs under DeepSpeed on CPUs, each rank a process: the jobs of `rank_runs`, and those below."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import rank_runs


class ZeroServer(rank_runs.Server):
    """Jobs in order, on processes with DeepSpeed."""

    def __init__(self) -> None:
        super().__init__(__file__, DS_ACCELERATOR="cpu")


def prepare() -> None:
    """Import once what every rank needs, and stop DeepSpeed from logging and compiling kernels."""
    import logging

    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# -- jobs: each runs on every rank ---------------------------------------------------------------


def zero_fit(folder: Path, rank: int, world: int, *, zero: dict[str, Any] | None = None, precision: str = "32-true",
             **given: Any) -> dict[str, Any]:  # fmt: skip
    """Run `rank_runs.fit`, under ZeRO with the settings ``zero``; return the final master weights, in float32."""
    import pair_stand_ins
    import stand_ins

    from lit_dpret.distributed.zero import ZeroStrategy

    masters: dict[str, Any] = {}
    plain, numbers = stand_ins.fit, pair_stand_ins._numbers

    class Pairs(pair_stand_ins.Pairs):  # DeepSpeed does not support float64
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.float()

    make = rank_runs.make_module

    def make_module(kind: str, *args: Any, **settings: Any) -> tuple[Any, Any]:
        if kind == "lora":
            kind, settings = "t5", {**settings, "lora": {"r": 2, "target_modules": ["q", "v"], "lora_dropout": 0.0}}
        return make(kind, *args, **settings)

    rank_runs.make_module = make_module
    pair_stand_ins.Pairs = Pairs  # type: ignore[misc]
    pair_stand_ins._numbers = lambda texts: numbers(texts).float()

    def fit(*args: Any, extra: list[Any] | None = None, **settings: Any) -> Any:
        return plain(*args, extra=[*(extra or []), keeper(masters)], **settings)

    stand_ins.fit = fit
    trainer: dict[str, Any] = {"precision": precision}
    if zero is not None:
        trainer |= {"strategy": ZeroStrategy(**zero), "devices": world}
    seen = rank_runs.fit(folder, rank, world, trainer=trainer, **given)
    found = {key: masters.pop(key, []) for key in ("momenta", "steps")}
    return seen | {"weights": masters} | found


def keeper(masters: dict[str, Any]) -> Any:
    """Return a callback that saves the master weights after the last step."""
    import torch
    from lightning.pytorch.callbacks import Callback

    class Keeper(Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    masters[name] = master_of(parameter).flatten().to(torch.float32).tolist()
            if getattr(trainer.strategy, "handover", None) is not None:
                state = trainer.strategy.handover.optimizer_state()
                found = {
                    f"{key} {name}": value.flatten().tolist()
                    for key, whole in state.get("states", {}).items()
                    for name, value in whole.items()
                }
                masters["momenta"] = [x for _, value in sorted(found.items()) for x in value]
                masters["steps"] = [x for values in state.get("numbers", {}).values() for x in values]

    return Keeper()


def master_of(parameter: Any) -> Any:
    """Return the whole master weight of a parameter, as DeepSpeed reports it."""
    from deepspeed.utils import safe_get_full_fp32_param

    zero = hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")
    return safe_get_full_fp32_param(parameter) if zero else parameter.detach()


def handed(folder: Path, rank: int, world: int, *, zero: dict[str, Any], bf16: bool, steps: int = 3) -> dict[str, Any]:
    """Return how far the weights of DeepSpeed's engine are from Adam's, under gradients that bfloat16 would round."""
    import copy

    import deepspeed
    import torch
    from torch import nn

    from lit_dpret.distributed.ranks import Ranks
    from lit_dpret.distributed.zero import zero_handover

    deepspeed.init_distributed("gloo", verbose=False)
    ranks = Ranks.here()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1, bias=False))
    if bf16:  # DeepSpeed derives the master weights from the compute weights
        net.load_state_dict({name: value.bfloat16().float() for name, value in net.state_dict().items()})
    alone = copy.deepcopy(net)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": bf16}, "zero_optimization": zero,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        args=None, model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.1), config=config,
        model_parameters=net.parameters(), dist_init_required=False,
    )  # fmt: skip
    handover = zero_handover(engine, net, ranks)
    own = torch.optim.Adam(alone.parameters(), lr=0.1)
    coins = torch.Generator().manual_seed(1)
    for _ in range(steps):
        # Each rank adds 1/world of the gradient, so add_up returns the gradient.
        whole = {name: torch.randn(p.shape, generator=coins) for name, p in alone.named_parameters()}
        handover.give(handover.add_up({name: value / world for name, value in whole.items()}), engine.optimizer)
        engine.step()
        for name, parameter in alone.named_parameters():
            parameter.grad = whole[name]
        own.step()
    found = {name: master_of(parameter).reshape(-1) for name, parameter in net.named_parameters()}
    worst = max(float((found[name] - p.detach().flatten()).abs().max()) for name, p in alone.named_parameters())
    with handover.whole():
        here = max(
            float((found[name].view(p.shape).to(p.dtype) - p.detach()).float().abs().max())
            for name, p in net.named_parameters()
        )
    return {"worst": worst, "here": here, "own": sum(len(found[n]) for n in handover.starts or found)}


if __name__ == "__main__":
    prepare()
    for job in (zero_fit, handed):
        setattr(rank_runs, job.__name__, job)
    rank_runs.serve()
