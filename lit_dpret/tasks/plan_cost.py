"""What a private step of a sequence-to-sequence model takes in time and memory, estimated or measured.

The estimate is arithmetic on the model that was asked for, at the full lengths that were asked for:

* time: 6 floating-point operations for each weight and each token that passes it (2 forward, 4
  backward), at the rate of a matrix product measured on this machine, times `OVERHEAD`; and noise for
  each weight once a step, at the rate that it is drawn here.
* memory: 4 bytes for each weight, for its clipped sum and its noised gradient, and for each value of
  the optimizer's state; and for each row of a physical batch what the clipping engine holds until the
  norms are known: inputs and output gradients of every linear layer, attention weights and logits.

A real step stands beside it with ``task.measure=true``. Rows in the data are mostly shorter.
"""

from __future__ import annotations

import math
import os
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import QueryGenerator
from lit_dpret.modules.outline import GeneratorOutline
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan

OVERHEAD = 3.0
"""Time of a clipped step over that of its products at the measured rate; between 1.5 and 5.2 where tried."""

FACTOR = 3.0
"""How far, either way, the estimate may lie from a measurement; a test holds it to that for small T5s."""

# Copies of each value: a linear layer's input and output gradient, attention weights, logits.
_LINEAR, _ATTENTION, _LOGITS = 2, 4, 5
_STATES = {"adam": 2, "adamw": 2, "adam_bc": 2, "sgd": 1, "adafactor": 1}
_TIMED_BATCHES = 2


def estimate(outline: GeneratorOutline, plan: PrivacyPlan, device: torch.device) -> dict[str, Any]:
    """Seconds and bytes of a step and of the run, by the formulas at the top of this file.

    Raises:
        ConfigurationError: The model is no sequence-to-sequence generator, whose shape the formulas know.
    """
    _check_shape(outline.model, outline.name)
    source, target = outline.max_passage_length, outline.max_query_length
    weights, trained = outline.parameters, outline.trained
    rows = plan.physical_batch_size
    flops = 6 * _weight_tokens(outline.model, source, target)
    rate = matmul_rate(device)
    noise = _seconds_per_normal(device) * trained
    seconds = OVERHEAD * flops * plan.denominator / rate + noise
    states = _STATES.get(outline.optimizer, 2)
    fixed = 4 * (weights + (2 + states) * trained)
    row = 4 * _values_per_row(outline.model, source, target)
    return {
        "kind": "estimate",
        "model": outline.name,
        "parameters": weights,
        "trained_parameters": trained,
        "passage_tokens": source,
        "query_tokens": target,
        "rows": rows,
        "device": str(device),
        "flops_per_row": flops,
        "matmul_flops_per_second": rate,
        "seconds_per_step": seconds,
        "seconds_of_run": seconds * plan.steps,
        "bytes": fixed + rows * row,
        "bytes_without_rows": fixed,
        "bytes_per_row": row,
    }


def measure(module: Any, plan: PrivacyPlan, device: torch.device, *, autocast: bool = False) -> dict[str, Any]:
    """Clip, noise and update on random token ids of the full lengths, and take the time and the peak memory.

    Guarantees:
        - No row of data is read, and no release is made: the ids are random, and the noise comes from a
          stream that is thrown away.

    Args:
        module: The model to train; its weights are changed.
        plan: The plan, for the engine, the physical batch and the number of steps.
        device: Where to run.
        autocast: Under bfloat16 autocast.

    Raises:
        ConfigurationError: The model is no sequence-to-sequence generator, or this machine does not say how
            much memory a process takes.
    """
    _check_family(module)
    base = _resident(device)
    source, target = _lengths(module)
    module.to(device)
    stream = KeyedStream(os.urandom(32), run_id="task=plan")
    mode = DPSGD(eps=plan.budget.eps)
    mode.attach(module, plan, stream)
    built = module.optimizer_spec.build(module.parameters(), steps=plan.steps, noise_std=mode.gradient_noise_std)
    optimizer = built[0][0] if isinstance(built, tuple) else built
    batch = {name: rows.to(device) for name, rows in module.longest_rows(plan.physical_batch_size).items()}
    units = torch.arange(plan.physical_batch_size, device=device)
    real = torch.ones_like(units, dtype=torch.bool)

    def clip() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16) if autocast else nullcontext():
            mode.add(lambda: module.per_row_loss(batch), units, real)

    def update() -> None:
        gradients = mode.privatize(mode.take(), attempt=0, step=0).gradients
        for name, parameter in module.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    _reset_peak(device)
    first = _seconds(clip, device)  # the engine checks itself in the first batch of a run
    batches = [_seconds(clip, device) for _ in range(_TIMED_BATCHES)]
    updates = _seconds(update, device)
    each = min(batches)
    step = math.ceil(plan.denominator / plan.physical_batch_size) * each + updates
    return {
        "kind": "measurement",
        "model": module.pretrained,
        "rows": plan.physical_batch_size,
        "passage_tokens": source,
        "query_tokens": target,
        "device": str(device),
        "seconds_of_first_batch": first,
        "seconds_of_batch": each,
        "seconds_of_update": updates,
        "seconds_per_step": step,
        "seconds_of_run": step * plan.steps,
        "bytes": _peak(device) - base + (_bytes_of(module) if device.type == "cpu" else 0),
    }


def format_cost(costs: Mapping[str, Any]) -> str:
    """The cost as a few lines for a terminal."""
    if "why" in costs:
        return textwrap.fill(f"Time and memory: not estimated. {costs['why']}", 80)
    facts = costs["estimate"]
    lines = [
        f"Time and memory of {facts['rows']} rows of {facts['passage_tokens']} + {facts['query_tokens']} tokens "
        f"at once, on {facts['device']}",
        f"  {'':<14}{'a step':>12}{'the run':>12}{'memory':>12}",
    ]
    for name in ("estimate", "measurement"):
        if (found := costs.get(name)) is not None:
            shown = [_duration(found["seconds_per_step"]), _duration(found["seconds_of_run"]), _size(found["bytes"])]
            lines.append(f"  {name:<14}" + "".join(f"{text:>12}" for text in shown))
    rate = f"{facts['matmul_flops_per_second'] / 1e9:.3g} GFLOP/s"
    lines += [
        f"  Estimated from {facts['parameters']:,} weights: 6 operations for each weight and token at the",
        f"  {rate} measured here, times {OVERHEAD:g} for clipping; 4 bytes for each value.",
        f"  It may be off by a factor of {FACTOR:g}."
        + ("" if "measurement" in costs else " To measure: task.measure=true"),
    ]
    return "\n".join(lines)


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations per second of a product of two large matrices in float32, measured."""
    size = 768 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device)
    fastest = min(_seconds(lambda: a @ a, device) for _ in range(4))
    return 2 * size**3 / fastest


def _seconds_per_normal(device: torch.device) -> float:
    stream, count = KeyedStream(os.urandom(32), run_id="task=plan"), 200_000

    def draw() -> None:
        stream.normal(torch.Size((count,)), attempt=0, step=0, parameter="x", device=device, dtype=torch.float32)

    return min(_seconds(draw, device) for _ in range(3)) / count


def _check_family(module: Any) -> None:
    if not isinstance(module, QueryGenerator):
        raise _unknown_shape(type(module).__name__)
    _check_shape(module.model, module.pretrained)


def _check_shape(model: Any, name: str) -> None:
    if not getattr(model.config, "is_encoder_decoder", False):
        raise _unknown_shape(name)


def _unknown_shape(name: str) -> ConfigurationError:
    return ConfigurationError(f"The formulas know encoder-decoder models (model=generator), and {name} is none.")


def _lengths(module: Any) -> tuple[int, int]:
    contract = module.codec.contract
    return int(contract.max_passage_length), int(contract.max_query_length)


def _tokens_of(name: str, source: int, target: int) -> int:
    """How many tokens of a row pass the layer of that name."""
    crossed = "EncDecAttention.k" in name or "EncDecAttention.v" in name or "encoder_attn.k" in name
    crossed = crossed or "encoder_attn.v" in name
    return source if crossed or "encoder." in f".{name}".replace("decoder.", "") else target


def _linear_layers(model: nn.Module, source: int, target: int) -> list[tuple[int, int, int]]:
    """Tokens, inputs and outputs of each linear layer."""
    return [
        (_tokens_of(name, source, target), layer.in_features, layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]


def _weight_tokens(model: nn.Module, source: int, target: int) -> int:
    layers = _linear_layers(model, source, target)
    return sum(tokens * inputs * outputs for tokens, inputs, outputs in layers)


def _values_per_row(model: Any, source: int, target: int) -> int:
    """Numbers that are alive at once for each row, before the norms are known."""
    config = model.config
    linear = sum(_LINEAR * tokens * (ins + outs) for tokens, ins, outs in _linear_layers(model, source, target))
    vocabulary = model.get_input_embeddings().num_embeddings
    heads = int(getattr(config, "num_heads", None) or config.encoder_attention_heads)
    encoder = int(getattr(config, "num_layers", None) or config.encoder_layers)
    decoder = int(getattr(config, "num_decoder_layers", None) or config.decoder_layers)
    attention = heads * (encoder * source**2 + decoder * (target**2 + source * target))
    return int(linear + _ATTENTION * attention + _LOGITS * target * vocabulary)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _resident(device: torch.device, field: str = "VmRSS") -> int:
    """Bytes that are in use now, or with ``VmHWM`` were at the peak."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise ConfigurationError(
            "task.measure=true reads the memory of a process from /proc, which this system does not have. "
            "Set task.measure=false for an estimate."
        ) from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak(device: torch.device) -> int:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _resident(device, "VmHWM")


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _size(count: float) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"
