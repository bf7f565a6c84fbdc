"""The peak memory of a private step, from the tensors held at the same time; allocator overhead is not included.

While batches are clipped, memory holds weights, optimizer states, the sum of clipped gradients, and the buffers of each
phase of clipping: a fixed part, and one per row. A batch in which the engine checks itself needs more. During the
update, noised gradients and the noise of one parameter replace the buffers. The buffers of the phases are measured on
slices (`lit_dpret.costs.slices`) or estimated by `COPIES`; the rest is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from lit_dpret.costs.work import Work
from lit_dpret.distributed.ranks import BUCKET
from lit_dpret.settings import require_choice, require_whole

STATES = {"adam": 2, "adamw": 2, "adam_bc": 2, "sgd": 1, "adafactor": 0}
"""State values per trained weight; sgd is counted with momentum. Adafactor's averages are negligible."""

# Bytes per coordinate of the parameter being noised, rounded up: noise, noised sum and measured noise take 12 in
# float32 and 24 in float64.
_NOISE = 28

# Set by hand on T5-small at 384/128 tokens in float32: 4 percent above what its slices held, and about 20 percent above
# with checkpointing. Other widths, and bfloat16 (assumed half), were never compared with a measurement.
#: Copies that a row holds at the peak of each value of a linear layer, of an attention weight and of a logit.
COPIES = {"plain": (1.2, 3.4, 3.4), "checkpointing": (0.9, 0.5, 3.4)}


#: Bytes per row in a self-checking batch, divided by those in an ordinary batch; also set by hand.
CHECKED = 1.3

# Bytes per weight of the parameter whose gradient is compared with autograd's.
_IN_FLOAT64 = 8


@dataclass(frozen=True)
class LinearCost:
    """Bytes at the peak of a phase: ``fixed``, plus ``row`` per row of the physical batch."""

    fixed: float
    row: float

    def __add__(self, other: LinearCost) -> LinearCost:
        return LinearCost(self.fixed + other.fixed, self.row + other.row)

    def __mul__(self, factor: float) -> LinearCost:
        return LinearCost(factor * self.fixed, factor * self.row)

    def at(self, rows: int) -> int:
        """Return the bytes for this many rows."""
        return round(self.fixed + rows * self.row)


@dataclass(frozen=True)
class Bytes:
    """The parts of the peak, on one device."""

    weights: int  # of the model, in the compute dtype
    masters: int  # the float32 copies of weights in half precision
    states: int
    sums: int  # the sum of clipped gradients, float32
    gradients: int  # the noised gradients, float32, while the update is made
    noise: int  # of the largest parameter, while its noise is drawn and measured
    clipped: tuple[LinearCost, ...]  # held by the phases of a batch in addition to the sum
    # The same for a self-checking batch: the first of a run or of a resumed run, when there is no sum yet.
    checked: tuple[LinearCost, ...]
    rows: int
    gathered: int = 0  # if sharded: gathered while batches are clipped, or summed for one block

    @property
    def lasting(self) -> int:
        """Bytes allocated throughout."""
        return self.weights + self.masters + self.states

    @property
    def clipping(self) -> int:
        """The peak while batches are clipped, including the first one."""
        checked = max((line.at(self.rows) for line in self.checked), default=0)
        return self.lasting + self.gathered + max(self.sums + max(line.at(self.rows) for line in self.clipped), checked)

    @property
    def row(self) -> int:
        """Bytes per further row in the most expensive phase of a batch."""
        return round(max(self.clipped, key=lambda line: line.at(self.rows)).row)

    @property
    def updating(self) -> int:
        """The peak during the update."""
        return self.lasting + self.sums + max(self.gradients, self.noise)

    @property
    def peak(self) -> int:
        """The larger of `clipping` and `updating`."""
        return max(self.clipping, self.updating)


def bytes_of(
    outline: Any, *, half: bool, rows: int, clipped: tuple[LinearCost, ...], checked: tuple[LinearCost, ...] = ()
) -> Bytes:
    """Return the bytes of a step on a single device.

    ``half`` means weights in bfloat16, with float32 copies of the trained ones in the optimizer. ``clipped`` and
    ``checked`` are the bytes held by the phases of a batch of ``rows`` rows, and of a self-checking batch.
    """
    return Bytes(
        weights=(2 if half else 4) * outline.parameters,
        masters=4 * outline.trained if half else 0,
        states=4 * STATES.get(outline.optimizer, 2) * outline.trained,
        sums=4 * outline.trained,
        gradients=4 * outline.trained,
        noise=_NOISE * outline.largest,
        clipped=clipped,
        checked=checked,
        rows=rows,
    )


def estimated_bytes(outline: Any, work: Work, *, half: bool = True, rows: int = 1) -> Bytes:
    """Return the same, with phases estimated from the number of values, without running anything."""
    linear, attention, logits = COPIES["checkpointing" if outline.gradient_checkpointing else "plain"]
    size = 2 if half else 4
    row = size * (linear * work.linear_values + attention * work.scores + logits * work.logits)
    gradients = LinearCost(size * outline.trained + _IN_FLOAT64 * outline.largest, size * work.linear_values)
    checked = (LinearCost(0, CHECKED * row), gradients)
    return bytes_of(outline, half=half, rows=rows, clipped=(LinearCost(0, row),), checked=checked)


STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def check_sharding(strategy: str, world: int) -> None:
    """Refuse combinations that `on_each_device` does not support."""
    require_choice("task.strategy", strategy, STRATEGIES)
    require_whole("task", {"world_size": world}, 1)


def on_each_device(whole: Bytes, *, strategy: str, world: int, blocks: tuple[int, int] | None = None) -> Bytes:
    """Return the bytes on each of ``world`` devices, from those of a single device.

    | strategy | weights | float32 copies, states | sum of clipped gradients | noised gradients |
    | --- | --- | --- | --- | --- |
    | ddp | each | each | each | each |
    | zero1, zero2 | each | divided | each | divided |
    | zero3 | divided; gathered while a batch is clipped | divided | each | divided |
    | fsdp | only float32; gathered while a step is clipped | divided | each | divided |
    | fsdp, ``blocks`` | only float32; one block gathered at a time | divided | divided | divided |

    A unit's norm is that of its gradient in all layers. So without ``blocks`` a rank sums every weight's gradient over
    its own rows before anything is reduced. ``blocks`` are the weights of the largest block and those outside any
    block, for the engines that clip one block at a time (`lit_dpret.distributed.block_by_block`).
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
    # FSDP's shards are float32 and serve as the copies of the trained weights; gathered copies are additional.
    kept = 2 * whole.weights - whole.masters if whole.masters else whole.weights
    divided = replace(divided, weights=share(kept), gathered=whole.weights)
    if blocks is None:
        return divided
    block, outside = blocks
    copies = (2 if whole.masters else 4) * (block + outside)
    # Needed even while weights are gathered, since a rank serves the others at any time.
    message = 4 * min(BUCKET, block // 4)
    # Autograd's gradients of all trained weights, in a self-checking batch.
    at_once = whole.sums // (2 if whole.masters else 1)
    checked = tuple(
        replace(line, fixed=line.fixed - at_once + min(at_once, copies)) if line.fixed >= at_once else line
        for line in whole.checked
    )
    gathered = max(copies, 4 * block) + message
    return replace(divided, sums=share(whole.sums), gathered=gathered, checked=checked)


def rows_that_fit(part: Bytes, memory: float, *, share: float = 0.9) -> int:
    """Return the largest power of two of rows, up to 4096, that fits into ``share`` of a device's memory; 0 if none."""
    room = share * memory
    if replace(part, rows=0).updating > room:
        return 0
    rows = 0
    while replace(part, rows=2 * rows or 1).peak <= room and rows < 2**12:
        rows = 2 * rows or 1
    return rows
