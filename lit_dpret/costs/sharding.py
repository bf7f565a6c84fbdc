"""Which bytes of a step each way to run on several devices divides among them.

| strategy | weights | float32 copies, states | sum of clipped gradients | noised gradients |
| --- | --- | --- | --- | --- |
| ddp | each | each | each | each |
| zero1, zero2 | each | divided | each | divided |
| zero3 | divided; gathered while a batch is clipped | divided | each | divided |
| fsdp | none but the float32 ones; gathered while a step is clipped | divided | each | divided |

This is what `trainer=ddp|deepspeed|fsdp` do. A unit's norm is of its gradient in all layers, so clipping wants all
weights at once; and a rank adds up every weight's gradient of its own rows before anything is reduced. No strategy
divides those two, and they set the peak.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lit_dpret.costs.memory import Bytes
from lit_dpret.errors import ConfigurationError

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def check_sharding(strategy: str, world: int) -> None:
    """Refuse what `on_each_device` cannot tell.

    Raises:
        ConfigurationError: The strategy is unknown, or ``world`` is no whole number of at least 1.
    """
    if strategy not in STRATEGIES:
        raise ConfigurationError(f"task.strategy={strategy!r} is not one of {', '.join(STRATEGIES)}.")
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ConfigurationError(f"task.world_size={world!r} is not a whole number of at least 1.")


def on_each_device(whole: Bytes, *, strategy: str, world: int) -> Bytes:
    """The bytes on each of ``world`` devices, from those of one device that holds everything.

    Args:
        whole: On one device.
        strategy: One of `STRATEGIES`.
        world: How many devices.

    Raises:
        ConfigurationError: The strategy is unknown, or ``world`` is no whole number of at least 1.
    """
    check_sharding(strategy, world)

    def share(count: int) -> int:
        return math.ceil(count / world)

    if strategy == "ddp" or world == 1:
        return whole
    divided = replace(whole, masters=share(whole.masters), states=share(whole.states), gradients=share(whole.gradients))
    if strategy in ("zero1", "zero2"):
        return divided
    if strategy == "zero3":
        return replace(divided, weights=share(whole.weights), gathered=whole.weights - share(whole.weights))
    # FSDP's shards are float32, and of what is trained they are the copies; gathered copies come beside them.
    kept = 2 * whole.weights - whole.masters if whole.masters else whole.weights
    return replace(divided, weights=share(kept), gathered=whole.weights)


def rows_that_fit(part: Bytes, memory: float, *, share: float = 0.9) -> int:
    """The most rows of a physical batch beside everything else in ``share`` of a device's memory; 0 where none fits."""
    room = share * memory
    if replace(part, rows=0).updating > room:
        return 0
    rows = 0
    while replace(part, rows=2 * rows or 1).peak <= room and rows < 2**12:
        rows = 2 * rows or 1
    return rows
