"""Time and memory of a step and of the whole run: estimated by formulas, from slices of the model, or measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from lit_dpret.costs.measure import measure_step, product_rate, seconds_per_normal, seconds_per_value
from lit_dpret.costs.memory import bytes_of, estimated_bytes
from lit_dpret.costs.slices import measure_slices
from lit_dpret.costs.work import PASSES, Work, work_of
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import QueryGenerator
from lit_dpret.modules.outline import GeneratorOutline
from lit_dpret.privacy.plan import PrivacyPlan

OVERHEAD = 1.3
"""Time of a clipped batch's products over that of its linear layers in an ordinary batch; norms cause the excess."""
# Set by hand together with `PASSES`.

FACTOR = 2.0
"""The largest factor, either way, between estimate and measurement; a test checks it for small T5s."""

_UPDATE = 2.0
"""Time of noise and optimizer together over the time to draw the noise."""


def estimate(
    outline: GeneratorOutline, plan: PrivacyPlan, device: torch.device, *, precision: str = "32-true",
    secure_rng: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Estimate seconds and bytes of a step and of the run, by formulas."""
    work = work_of(outline)
    half = precision == "bf16-true"
    rows = plan.physical_batch_size
    on_half = precision.startswith("bf16") and device.type != "cpu"
    again = outline.gradient_checkpointing
    products, operations = _products(work, min(rows, 4), device, half=on_half, again=again)
    passes = PASSES * (4 / 3 if again else 1) * seconds_per_value(device)
    batch = rows * (OVERHEAD * products + passes * (work.linear_values + work.scores + work.logits))
    update = _UPDATE * seconds_per_normal(device, plan.noise, secure_rng=secure_rng) * outline.trained
    found = estimated_bytes(outline, work, half=half, rows=rows)
    return {
        "kind": "estimate",
        **_facts(outline, plan, device),
        "flops_per_row": work.model_flops,
        "flops_per_second_of_products": operations / products,
        **_seconds(batch, update, plan),
        "bytes": found.peak,
        "bytes_without_rows": found.lasting + found.sums,
        "bytes_per_row": found.row,
    }


def from_slices(
    outline: GeneratorOutline, plan: PrivacyPlan, device: torch.device, *, precision: str = "32-true",
    secure_rng: bool = False, progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:  # fmt: skip
    """Estimate seconds and bytes of a step and of the run, from slices of the model run here."""
    work, rows = work_of(outline), plan.physical_batch_size
    slices = measure_slices(
        outline, plan, device, rows=rows, precision=precision, secure_rng=secure_rng, progress=progress
    )
    whole = slices.whole(work.encoder_layers, work.decoder_layers)
    held = whole.held
    half = precision == "bf16-true"
    found = bytes_of(outline, half=half, rows=rows, clipped=held.clipped, checked=held.checked)
    return {
        "kind": "from slices",
        **_facts(outline, plan, device),
        "flops_per_row": work.model_flops,
        **_seconds(whole.seconds, slices.update_seconds * outline.trained, plan),
        "bytes": found.peak,
        "bytes_while_clipping": found.clipping,
        "bytes_while_updating": found.updating,
        "bytes_per_row": found.row,
        "slices": asdict(slices),
    }


def measure(
    module: Any, plan: PrivacyPlan, device: torch.device, *, autocast: bool = False, secure_rng: bool = False
) -> dict[str, Any]:
    """Clip, noise and update on random token ids at full lengths; return the time and the peak memory.

    No row of data is read, and nothing is released: the noise comes from a stream that is discarded.
    """
    if not isinstance(module, QueryGenerator):
        raise ConfigurationError(
            f"Costs are known for language models (model=generator) only, not for {type(module).__name__}."
        )
    rows = plan.physical_batch_size
    found = measure_step(module, plan, device, rows=rows, autocast=autocast, secure_rng=secure_rng)
    return {
        "kind": "measurement",
        **_facts(module.outlined, plan, device),
        "seconds_of_first_batch": found.first_batch,
        **_seconds(found.batch, found.update, plan),
        "bytes": found.peak,
        "bytes_while_clipping": found.clipping,
        "bytes_while_updating": found.updating,
    }


def _facts(outline: GeneratorOutline, plan: PrivacyPlan, device: torch.device) -> dict[str, Any]:
    return {
        "model": outline.name,
        "parameters": outline.parameters,
        "trained_parameters": outline.trained,
        "passage_tokens": outline.source_length,
        "query_tokens": outline.max_query_length,
        "rows": plan.physical_batch_size,
        "device": str(device),
    }


def _seconds(batch: float, update: float, plan: PrivacyPlan) -> dict[str, float]:
    # Physical batches of average size; the last one of a step is smaller and takes less time.
    step = batch * max(1.0, plan.denominator / plan.physical_batch_size) + update
    return {
        "seconds_of_batch": batch,
        "seconds_of_update": update,
        "seconds_per_step": step,
        "seconds_of_run": step * plan.steps,
    }


def _products(work: Work, rows: int, device: torch.device, *, half: bool, again: bool) -> tuple[float, int]:
    """Return seconds and operations of one row's linear layers, at rates of their shapes; ``again``: forward twice."""
    seconds, operations = 0.0, 0
    for product, count in work.products.items():
        done = count * ((6 if product.trained else 4) + (2 if again else 0)) * product.size
        seconds += done / product_rate(rows * product.tokens, product.inputs, product.outputs, device, half=half)
        operations += done
    return seconds, operations


def duration(seconds: float) -> str:
    """Format seconds for a reader."""
    for unit, length in (("years", 365.25 * 86_400), ("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def size(count: float) -> str:
    """Format bytes for a reader."""
    for unit, power in (("TiB", 40), ("GiB", 30)):
        if count >= 2**power:
            return f"{count / 2**power:.3g} {unit}"
    small = count / 2**20
    return f"{small:.3g} MiB" if small < 999.5 else f"{small:.0f} MiB"
