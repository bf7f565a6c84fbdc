"""Which bytes of a step each way to run on several devices divides among them.

| strategy | weights | float32 copies, states | sum of clipped gradients | noised gradients |
| --- | --- | --- | --- | --- |
| ddp | each | each | each | each |
| zero1 | each | divided | each | divided |
| zero2 | each | divided | each, until the last batch of a step | divided |
| zero3, fsdp | divided; a forward pass gathers some | divided | divided | divided |

The sum is kept by the clipping engine until the logical step is over, so ZeRO-2 does not divide it: a rank adds up
every weight's gradient of its own rows before anything is reduced.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lit_dpret.costs.memory import Bytes
from lit_dpret.errors import ConfigurationError

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def on_each_device(whole: Bytes, *, strategy: str, world: int, gathered: int = 0) -> Bytes:
    """The bytes on each of ``world`` devices, from those of one device that holds everything.

    Args:
        whole: On one device.
        strategy: One of `STRATEGIES`.
        world: How many devices.
        gathered: Bytes of weights that a forward pass needs at once; with sharded weights alone.

    Raises:
        ConfigurationError: The strategy is unknown, or ``world`` is no whole number of at least 1.
    """
    if strategy not in STRATEGIES:
        raise ConfigurationError(f"task.strategy={strategy!r} is not one of {', '.join(STRATEGIES)}.")
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ConfigurationError(f"task.world_size={world!r} is not a whole number of at least 1.")

    def share(count: int) -> int:
        return math.ceil(count / world)

    if strategy == "ddp" or world == 1:
        return whole
    divided = replace(whole, masters=share(whole.masters), states=share(whole.states), gradients=share(whole.gradients))
    if strategy in ("zero1", "zero2"):
        return divided
    return replace(divided, weights=share(whole.weights), sums=share(whole.sums), gathered=gathered)


def rows_that_fit(part: Bytes, memory: float, *, share: float = 0.9) -> int:
    """The most rows of a physical batch beside everything else in ``share`` of a device's memory; 0 where none fits."""
    room = share * memory
    if replace(part, rows=0).updating > room:
        return 0
    rows = 0
    while replace(part, rows=2 * rows or 1).peak <= room and rows < 2**12:
        rows = 2 * rows or 1
    return rows
