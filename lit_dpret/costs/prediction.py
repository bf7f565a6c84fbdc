"""Predict a private step on another accelerator, from the vendor's rates for each kind of work.

One rate for everything would be off by a factor. So products in bfloat16 and in float32, passes over memory, noise and
messages each have a rate, and a step is predicted as a range: from every class at its peak to every class at an assumed
share of it. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lit_dpret.costs.measure import seconds_per_normal
from lit_dpret.costs.memory import check_sharding, estimated_bytes, on_each_device, rows_that_fit
from lit_dpret.costs.work import PASSES, Work, accelerator, work_of
from lit_dpret.privacy.budget import NoiseName
from lit_dpret.privacy.clipping import BY_BLOCK
from lit_dpret.privacy.clipping.contributions import norm_multiplications

ASSUMED = {
    "bfloat16 products": 0.3, "tf32 products": 0.3, "float32 products": 0.5, "memory": 0.5, "update": 0.5,
    "messages": 0.5,
}  # fmt: skip
"""Assumed shares of the peak that a private step reaches. Their only support is that none is near one."""

_UPDATE_BYTES = 40
"""Bytes read and written per trained weight in an update: sum, noise, two states, float32 copy, weight."""

_NOISE_BYTES: dict[NoiseName, int] = {"gaussian": 2300, "discrete": 5900}
"""Bytes read and written on the accelerator per coordinate of noise from ChaCha20, operation by operation."""
# Counted on the CPU, where the operations are the same; a test checks them.

_NODE, _NETWORK = 8, 50e9
"""Devices of a node, and bytes per second of a device beyond it: one typical 400 Gbit/s adapter each."""


def check_devices(device: str, world: int, strategy: str) -> None:
    """Refuse, before any computation, what `predict` would refuse."""
    accelerator(device)
    check_sharding(strategy, world)


def predict(
    outline: Any, *, batch: float, device: str, world: int, strategy: str, noise: NoiseName = "gaussian",
    engine: str = "ghost", secure_rng: bool = False, seconds_of_a_normal: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Predict one step of ``batch`` rows on ``world`` devices, with bfloat16 weights and float32 copies.

    Noise is drawn on the processor, at ``seconds_of_a_normal`` (None measures it here). With ``secure_rng``, and always
    for ``discrete`` noise, it is drawn on the device. Engines other than ``ghost_tf32`` and ``ghost_bf16`` count as
    ``ghost``.

    Returns:
        Bytes on each device, ``rows_that_fit`` (0 if none does), ``seconds`` of each class of work ``at_peak`` and
        ``assumed``, and their sums ``seconds_per_step`` (from, to); both are None if no row fits.
    """
    known, work, on_device = accelerator(device), work_of(outline), secure_rng or noise == "discrete"
    by_block = strategy == "fsdp" and engine in BY_BLOCK
    blocks = outline.blocks if by_block else None
    part = on_each_device(estimated_bytes(outline, work), strategy=strategy, world=world, blocks=blocks)
    rows = rows_that_fit(part, known.memory)
    facts = {
        "kind": "prediction",
        "device": known.name,
        "source": known.source,
        "world_size": world,
        "strategy": strategy,
        "bytes_lasting": part.lasting,
        "bytes_of_sum": part.sums,
        "bytes_gathered": part.gathered,
        "bytes_while_updating": part.updating,
        "rows_that_fit": rows,
        "assumed": ASSUMED,
        "noise_drawn_on": "accelerator" if on_device else "processor",
        "seconds": None,
        "seconds_per_step": None,
    }
    if not rows:
        return facts
    if on_device:
        drawing = _NOISE_BYTES[noise] / known.bandwidth
    else:
        drawing = seconds_per_normal(torch.device("cpu")) if seconds_of_a_normal is None else seconds_of_a_normal
    share = 1 / world if strategy != "ddp" else 1.0
    on_one = batch / world
    half, low, full = products_of(work, again=outline.gradient_checkpointing, engine=engine)
    values = work.linear_values + work.scores + work.logits
    passes = PASSES * (4 / 3 if outline.gradient_checkpointing else 1) * 2 * values  # two bytes each
    sent = _sent(outline, strategy, world, batches=math.ceil(on_one / rows), by_block=by_block)
    peak = {
        "bfloat16 products": on_one * (half + (low if engine == "ghost_bf16" else 0)) / known.bf16_flops,
        **({"tf32 products": on_one * low / known.tf32_flops} if engine == "ghost_tf32" else {}),
        "float32 products": on_one * full / known.fp32_flops,
        "memory": on_one * passes / known.bandwidth,
        "update": _UPDATE_BYTES * outline.trained * share / known.bandwidth,
        "noise": outline.trained * share * drawing,
        "messages": sent / known.link,
    }
    shares = ASSUMED | {"noise": ASSUMED["memory"] if on_device else 1.0}  # on the processor it was measured
    assumed = {name: seconds / shares[name] for name, seconds in peak.items()}
    if world > _NODE:
        assumed["messages"] *= known.link / min(known.link, _NETWORK)
    return facts | {
        "seconds": {name: {"at_peak": peak[name], "assumed": assumed[name]} for name in peak},
        "seconds_per_step": [sum(peak.values()), sum(assumed.values())],
    }


#: By engine: the number of products that replace one of a weighted sum (`arithmetic.Format.parts`).
_PARTS = {"ghost_tf32": 1, "ghost_bf16": 2}


def products_of(work: Work, *, again: bool, size: int = 2, engine: str = "ghost") -> tuple[int, int, int]:
    """Return the operations of a private row: of passes, of products in the engine's low precision, and in float32.

    The first are forward and to the inputs, and may use half precision. The others are each unit's norm, from pairs or
    written out, as the engine does it, and the weighted sum. Products tied to an embedding are always in float32.
    ``again`` means that the forward pass runs twice (gradient checkpointing). ``size`` is bytes per value of a pass.
    """
    sums = low = full = 0
    for product, count in work.products.items():
        if not product.trained:
            continue
        apart = engine in _PARTS and not product.tied
        norm = norm_multiplications(
            product.tokens, product.outputs, product.inputs, size=None if apart else size, half=not apart
        )
        sums += 2 * count * product.size
        if apart:
            low += 2 * count * (_PARTS[engine] * product.size + norm)
        else:
            full += 2 * count * (product.size + norm)
    return work.model_flops - sums + (work.forward_flops if again else 0), low, full


def _sent(outline: Any, strategy: str, world: int, *, batches: int, by_block: bool) -> float:
    sums, weights = 4 * int(outline.trained), 2 * int(outline.parameters)
    if strategy == "ddp":
        weights = 0
        sums *= 2  # an all-reduce is a reduce-scatter and an all-gather
    elif strategy == "zero3":
        weights *= batches  # gathered for every physical batch
    elif by_block:
        weights *= 2 * batches  # for forward and backward pass, after which the block's sums are added up
        sums *= batches
    return (world - 1) / world * (sums + weights)
