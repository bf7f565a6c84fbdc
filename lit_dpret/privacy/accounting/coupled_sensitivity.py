"""Sensitivity of losses that couple the units of a batch: which units interact, and how far one unit moves the sum.

One coin per unit splits a logical batch into ``sub_batches`` parts, whose units see only each other. No part holds more
than ``n_max`` units; the surplus is left out uniformly. docs/derivations.md says what that means under each relation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from scipy import stats

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.releases import FixedSize, FullBatch, Poisson, SamplingLaw, Shuffle, TruncatedPoisson
from lit_dpret.privacy.budget import Neighbours
from lit_dpret.settings import require_choice, require_whole

Bounded = Literal["sub_batch", "row", "pair"]
# As in `lit_dpret.losses.pairs.base`: neither package imports the other, and accounting does not load torch.
Relation = Literal["add_or_remove", "replace_one"]
LossClaim = Literal["proved", "declared", "refuted"]

BOUNDED_TEXTS: Mapping[Bounded, str] = {
    "sub_batch": "the gradient of each sub-batch",
    "row": "the gradient of each row",
    "pair": "the gradient of each pair's similarity",
}
# What cuts may add to delta in all steps together, as a share of delta: less than the rounding up of noise multipliers.
_SHARE = 1e-6
# The default n_max is this many standard deviations above the mean size of a sub-batch.
_MARGIN = 6.0


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """The quantity that a mode for coupled losses bounds, and the sub-batches that limit the effect of one unit."""

    bounded: Bounded  # what is clipped to ``max_grad_norm``: a ``sub_batch``, a ``row``, or a ``pair``
    sub_batches: int  # parts of a logical batch
    n_max: int  # the maximum number of units in a part
    expected: float  # the mean number of units in a part; a public constant, for losses that are divided by it
    loss: str = ""  # the loss for which the sensitivity was computed, as a phrase; part of the plan
    # Where the sensitivity comes from: ``proved`` here, ``declared`` by the user for a custom loss, or ``refuted``,
    # kept for comparison. If it is refuted, nothing may be claimed.
    claim: LossClaim = "proved"

    def __post_init__(self) -> None:
        require_choice("bounded", self.bounded, get_args(Bounded))
        require_whole("privacy", self, 1, "sub_batches", "n_max")

    def describe(self, bound: float) -> str:
        parts = "one sub-batch" if self.sub_batches == 1 else f"{self.sub_batches} sub-batches"
        loss = f", under {self.loss}" if self.loss else ""
        return f"{BOUNDED_TEXTS[self.bounded]} is clipped to {bound:g}, in {parts} of at most {self.n_max} units{loss}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Coupling:
        """Return the coupling that ``asdict`` wrote; refuse unknown fields."""
        if unknown := sorted(set(data) - {field.name for field in fields(cls)}):
            raise ConfigurationError(f"A recorded coupling has unknown fields: {', '.join(unknown)}.")
        return cls(**data)


def largest_batch(law: SamplingLaw, units: int | None = None) -> int | None:
    """Return the most units that a logical batch of this law can hold; None without a bound. ``units`` are public."""
    if isinstance(law, TruncatedPoisson):
        return law.cap
    if isinstance(law, (FixedSize, Shuffle)):
        return law.batch_size
    return units if isinstance(law, FullBatch) else None


def resolve_n_max(
    n_max: int | None, *, law: SamplingLaw, sub_batches: int, expected: float, units: int | None = None
) -> int:
    """Return the bound on a sub-batch, as declared or else one that is hardly ever reached, from public facts alone."""
    mean = expected / sub_batches
    if n_max is not None:
        if n_max < math.floor(mean):
            raise ConfigurationError(
                f"privacy.n_max={n_max} is below the {mean:.4g} units that a sub-batch holds on average: most of them "
                "would be left out. Raise privacy.n_max or privacy.sub_batches, or lower "
                "datamodule.expected_batch_size."
            )
        return n_max
    largest = largest_batch(law, units)
    if sub_batches == 1 and largest is not None:
        return largest
    # Some deviations above the mean; the last term is for small batches, whose tail is longer.
    likely = math.ceil(mean + _MARGIN * math.sqrt(mean) + _MARGIN)
    return likely if largest is None else min(likely, largest)


def least_n_max(law: SamplingLaw, *, sub_batches: int, steps: int, units: int, delta: float) -> int:
    """Return the least sub-batch bound that keeps amplification valid under ``zero_out`` and ``replace_one``.

    *Why.* Outside the event that the unit is drawn into a sub-batch that is cut, a step is dominated by the pair of
    plain sampling: either no unit was left out, or both neighbours show the batch without the unit. The event depends
    on coins alone, and has probability at most q P[Binomial(n - 1, q / k) >= n_max] in a step. What happens on it adds
    at most its probability to delta. Here ``steps`` times that is at most a millionth of delta.

    Laws without coins for each unit need no bound. Without amplification, the batch without the unit is compared with
    nothing. In ``fixed_size`` batches, a unit that is not drawn is replaced, in its slot, by one that is.
    """
    if not isinstance(law, (Poisson, TruncatedPoisson)) or law.sample_rate == 1:
        return 1
    # A union bound over all steps.
    allowed = _SHARE * delta / (steps * law.sample_rate)
    low, high = 1, largest_batch(law) or units
    while low < high:
        middle = (low + high) // 2
        if stats.binom.sf(middle - 1, units - 1, law.sample_rate / sub_batches) <= allowed:
            high = middle
        else:
            low = middle + 1
    return low


def change_of_a_sub_batch(neighbours: Neighbours, law: SamplingLaw, *, n_max: int) -> Relation:
    """Return how a sub-batch of neighbouring data can differ, if only one side contains the unit."""
    if neighbours != "add_or_remove":
        return "add_or_remove"
    largest = largest_batch(law)
    # Only where a sub-batch can be too full may a missing unit let another one in.
    cut = largest is None or largest > n_max
    return "replace_one" if cut else "add_or_remove"


def holds_under(
    coupling: Coupling,
    *,
    planned: tuple[SamplingLaw, Neighbours],
    read_as: tuple[SamplingLaw, Neighbours],
    steps: int,
    units: int | None,
    delta: float,
) -> bool:
    """Return whether the planned sensitivity of a coupled loss is valid under another law and relation."""
    (law, neighbours), (planned_law, planned_neighbours) = read_as, planned
    if read_as == planned:
        return True
    if planned_neighbours == "replace_one" and isinstance(planned_law, (FullBatch, Shuffle)):
        # Half a replacement, which is less than removing a unit.
        return neighbours == "replace_one" and isinstance(law, (FullBatch, Shuffle))
    if neighbours == "add_or_remove":
        counted = change_of_a_sub_batch(planned_neighbours, planned_law, n_max=coupling.n_max)
        return counted in ("replace_one", change_of_a_sub_batch(neighbours, law, n_max=coupling.n_max))
    largest = largest_batch(law, units)
    # Never cut, so nothing depends on how many others were drawn.
    if largest is not None and largest <= coupling.n_max:
        return True
    if units is None:
        return False
    parts = coupling.sub_batches
    return coupling.n_max >= least_n_max(law, sub_batches=parts, steps=steps, units=units, delta=delta)
