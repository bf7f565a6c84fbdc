"""What a private step would take on accelerators that are not here: bytes counted, time predicted."""

from __future__ import annotations

from typing import Any

from lit_dpret.costs.devices import UTILISATION, accelerator
from lit_dpret.costs.memory import Bytes
from lit_dpret.costs.sharding import check_sharding, on_each_device, rows_that_fit
from lit_dpret.costs.slices import estimated_bytes
from lit_dpret.costs.work import Work, work_of
from lit_dpret.modules.outline import GeneratorOutline


def predict(outline: GeneratorOutline, *, batch: float, device: str, world: int, strategy: str) -> dict[str, Any]:
    """One step of ``batch`` rows on ``world`` devices, with bfloat16 weights and float32 copies.

    Messages between devices and the drawing of noise are left out. Time rests on the maker's peak and on an assumed
    utilisation (`UTILISATION`).

    Args:
        outline: The generator.
        batch: Rows of a logical step.
        device: One of `lit_dpret.costs.devices.ACCELERATORS`.
        world: How many of them.
        strategy: One of `lit_dpret.costs.sharding.STRATEGIES`.

    Returns:
        Bytes on each device, ``rows_that_fit`` (0 where none does), and ``seconds_per_step``, None where none fits.

    Raises:
        ConfigurationError: The device or strategy is unknown, or ``world`` is no whole number of at least 1.
    """
    known, work = accelerator(device), work_of(outline)
    part = on_each_device(bytes_on_one(outline, work), strategy=strategy, world=world)
    rows = rows_that_fit(part, known.memory)
    return {
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
        "assumed_utilisation": UTILISATION,
        "seconds_per_step": work.model_flops * batch / (UTILISATION * known.bf16_flops * world) if rows else None,
    }


def check_devices(device: str, world: int, strategy: str) -> None:
    """Refuse, before anything is computed, what `predict` would refuse."""
    accelerator(device)
    check_sharding(strategy, world)


def bytes_on_one(outline: GeneratorOutline, work: Work, rows: int = 1) -> Bytes:
    """The bytes of a step on one device that holds everything, in bfloat16 with float32 copies."""
    return estimated_bytes(outline, work, half=True, rows=rows)
