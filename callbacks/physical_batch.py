"""`datamodule.physical_batch_size=auto`: measure how many units fit on the device at once.

Before the first release, batches of random tokens of full length are clipped and discarded, doubling in size until
memory runs out: nothing about private texts is learned. If a batch of the run does not fit after all, the step starts
again with smaller ones (`lit_dpret.modules.physical_batches`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_dpret.callbacks.planning import PlannedRun
from lit_dpret.callbacks.strategies import strategy_name
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.distributed.shards import place_of
from lit_dpret.errors import ConfigurationError, DeviceMemoryError
from lit_dpret.memory import give_back_memory, is_out_of_memory
from lit_dpret.privacy.accounting.coupled_sensitivity import largest_batch
from lit_dpret.privacy.batches import UnitBatch
from lit_dpret.privacy.clipping.base import trainable
from lit_dpret.privacy.noise import KeyedStream

#: A CPU is no faster with more rows than this, and its allocator hands out memory that it does not have.
MOST_ON_CPU = 32
#: The share of a machine's free memory that batches on a CPU may take.
SHARE_ON_CPU = 0.5
#: The largest size to try: beyond it a GPU is busy anyway.
MOST = 4096

# Optimizer values per weight: two moments. The float32 copy of a half-precision weight is counted separately.
_STATES = 2


def fit_physical_batch(trainer: L.Trainer, module: Any, data: Any, planned: PlannedRun, ranks: Ranks) -> PlannedRun:
    """Return the planned run with the largest physical batches that fit on every rank; unchanged for a fixed size."""
    if not getattr(data, "finds_physical_batch_size", False):
        return planned
    own = ranks.together(lambda: _find(trainer, module, data, planned))
    size = min(ranks.gather(own))
    data.physical_batch_size = size
    plan = None if planned.plan is None else replace(planned.plan, physical_batch_size=size)
    return replace(planned, plan=plan)


def _find(trainer: L.Trainer, module: Any, data: Any, planned: PlannedRun) -> int:
    if not module.may_split:
        raise ConfigurationError(
            f"datamodule.physical_batch_size=auto: under privacy={module.privacy.name} units of a physical batch are "
            f"compared with each other by {type(module).__name__}, so its size is part of the loss. Set a number."
        )
    if not hasattr(module, "longest_rows"):
        raise ConfigurationError(
            f"datamodule.physical_batch_size=auto tries batches of the longest rows: implement longest_rows(count) of "
            f"{type(module).__name__}, or give a number."
        )
    strategy, device = strategy_name(trainer), trainer.strategy.root_device
    if strategy not in ("one_device", "ddp", "fsdp"):
        raise ConfigurationError(
            f"datamodule.physical_batch_size=auto cannot try batches under trainer.strategy={strategy}, which "
            "allocates weights and states later. Set a number (task=plan estimates one)."
        )
    if strategy == "fsdp":
        module.configure_model()  # shards the parameters, as it would a moment later
    else:
        module = trainer.precision_plugin.convert_module(module)
        module.to(device)
    weights = [parameter.detach() for parameter in trainable(module).values()]
    beside = sum(_STATES * 4 * place_of(weight)[0].numel() for weight in weights)  # for this process's part
    beside += sum(4 * weight.numel() for weight in weights if weight.element_size() < 4)  # the float32 copies
    with module.whole():
        most = _most(module, data, planned, device)
        return largest_that_fits(
            partial(_try, trainer, module, beside if device.type != "cpu" else 0, device),
            most=most,
            room=_room if device.type == "cpu" else lambda: None,
        )


def _most(module: Any, data: Any, planned: PlannedRun, device: torch.device) -> int:
    """Attach the mode, and return the maximum number of rows to try."""
    # Never the run's own streams: draws made here must reveal nothing about the run.
    module.privacy.attach(module, planned.plan, KeyedStream(secrets.token_bytes(32), "physical_batch_size"))
    # The size found is published: if the number of units is private, it must not be the bound.
    drawn = largest_batch(planned.law, module.privacy.public_units(data.n_units)) or data.expected_batch_size or MOST
    return min(MOST if device.type != "cpu" else MOST_ON_CPU, drawn)


def _try(trainer: L.Trainer, module: Any, beside: int, device: torch.device, size: int) -> None:
    held = torch.empty(beside, dtype=torch.uint8, device=device)
    with trainer.precision_plugin.train_step_context():
        module.rehearse([_batch(module.longest_rows(size), size, device)])
    del held


def largest_that_fits(
    attempt: Callable[[int], None], *, most: int, room: Callable[[], tuple[int, int] | None] = lambda: None
) -> int:
    """Return the largest size up to ``most``, found by doubling, for which ``attempt`` does not run out of memory.

    If attempts do not fail when memory is short, ``room`` returns the peak bytes so far and the free bytes. Doubling
    stops before it would take more than `SHARE_ON_CPU` of what is free.
    """
    best, size, before = 0, 1, room()
    while True:
        if not _fits(attempt, size):
            break
        best = size
        if size >= most:
            break
        now = room()
        if before is not None and now is not None and 2 * (now[0] - before[0]) > SHARE_ON_CPU * now[1]:
            break
        size = min(2 * size, most)
    if best == 0:
        raise DeviceMemoryError(
            "datamodule.physical_batch_size=auto: one unit of the longest rows does not fit; nothing was released. "
            "Train adapters (model.lora), set model.gradient_checkpointing=true, shorten the texts, or shard."
        )
    return best


def _fits(attempt: Callable[[int], None], size: int) -> bool:
    try:
        attempt(size)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    else:
        fits = True
    give_back_memory()
    return fits


def _batch(rows: Any, size: int, device: torch.device) -> UnitBatch:
    ids = torch.arange(size)
    return UnitBatch(rows, ids, torch.ones(size, dtype=torch.bool), step=0, part=0, last=True).to(device)


def _room() -> tuple[int, int] | None:
    """Return this process's peak memory and the machine's free memory, in bytes; None if the system does not say."""
    found = []
    for file, field in (("/proc/self/status", "VmHWM:"), ("/proc/meminfo", "MemAvailable:")):
        try:
            lines = Path(file).read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        found.append(next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0))
    return found[0], found[1]
