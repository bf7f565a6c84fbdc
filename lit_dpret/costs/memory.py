"""Bytes of a private step, by what has to be there at the same time.

While batches are clipped, there are the weights, the optimizer's states, the sum of clipped gradients, and for each
row of the physical batch what the clipping engine holds until the norms are known. In the first batch, and where the
pattern of calls changes, the engine goes through the graph once more to check itself, and holds more. While the
update is made, there are the weights, the states, the sum, the noised gradients, and the noise of one parameter.
The largest of these is the peak.

Bytes of weights, sums and states are counted. Bytes of a row are measured on slices (`lit_dpret.costs.slices`), or
estimated from the number of values by `COPIES`. Tensors are counted: what an
allocator keeps beside them (fragments, blocks rounded up, libraries) is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lit_dpret.costs.work import Work

STATES = {"adam": 2, "adamw": 2, "adam_bc": 2, "sgd": 1, "adafactor": 0}
"""Values of state for each trained weight; sgd without momentum has none, and row averages hardly count."""

# Of the parameter that is noised: noise and noised sum, and the noise as it was added, in float64, and its squares.
_NOISE = 28

# Set by hand on T5-small at 384/128 tokens in float32: 4 percent above what its slices held, and some 20 percent above
# with checkpointing. Other widths, and bfloat16 (taken for half), were not held against a measurement.
#: Copies of each value of a linear layer, of an attention weight and of a logit that a row holds at the peak.
COPIES = {"plain": (1.2, 3.4, 3.4), "checkpointing": (0.9, 0.5, 3.4)}


@dataclass(frozen=True)
class Bytes:
    """The parts of the peak, on one device.

    Attributes:
        weights: Of the model, in the type in which they are computed with.
        masters: The float32 copies of weights in half precision.
        states: Of the optimizer.
        sums: The sum of clipped gradients, float32.
        gradients: The noised gradients, float32, while the update is made.
        noise: Of the largest parameter, while it is drawn and measured.
        checked_row: What one row holds in a batch in which the engine checks itself.
        gathered: Weights that are gathered while batches are clipped, where they are sharded.
        row: What one row of the physical batch holds.
        rows: Rows of the physical batch.
    """

    weights: int
    masters: int
    states: int
    sums: int
    gradients: int
    noise: int
    row: int
    rows: int
    checked_row: int = 0
    gathered: int = 0

    @property
    def lasting(self) -> int:
        """What lies there all the time."""
        return self.weights + self.masters + self.states

    @property
    def clipping(self) -> int:
        """The peak while batches are clipped, the first one included."""
        checked = max(self.rows * self.checked_row, self.sums + self.gradients + self.row if self.checked_row else 0)
        return self.lasting + self.gathered + max(self.sums + self.rows * self.row, checked)

    @property
    def updating(self) -> int:
        """The peak while the update is made."""
        return self.lasting + self.sums + max(self.gradients, self.noise)

    @property
    def peak(self) -> int:
        """The larger of the two."""
        return max(self.clipping, self.updating)


def step_bytes(
    *,
    weights: int,
    trained: int,
    largest: int,
    optimizer: str,
    row: int,
    rows: int,
    half: bool = False,
    checked_row: int = 0,
) -> Bytes:
    """The bytes of a step on one device that holds everything.

    Args:
        weights: How many there are.
        trained: How many are trained.
        largest: Weights of the largest trained parameter.
        optimizer: Its name.
        row: Bytes of a row.
        rows: Rows of a physical batch.
        half: Weights in bfloat16, with float32 copies of the trained ones in the optimizer.
        checked_row: Bytes of a row in a batch in which the engine checks itself.
    """
    return Bytes(
        weights=(2 if half else 4) * weights,
        masters=4 * trained if half else 0,
        states=4 * STATES.get(optimizer, 2) * trained,
        sums=4 * trained,
        gradients=4 * trained,
        noise=_NOISE * largest,
        row=row,
        rows=rows,
        checked_row=checked_row,
    )


def estimated_row(work: Work, *, checkpointing: bool, half: bool = False) -> int:
    """Bytes of a row, from the number of values and `COPIES`."""
    linear, attention, logits = COPIES["checkpointing" if checkpointing else "plain"]
    values = linear * work.linear_values + attention * work.scores + logits * work.logits
    return round((2 if half else 4) * values)
