"""The known ways to lose a privacy guarantee without noticing, and what this package does about each.

``task=doctor`` tells them for a run; ``docs/doctor.md`` tells them for a reader. The numbers are those
that refusals carry as `LitDpretError.trap`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["settings", "plan", "secret", "engine", "loader", "rehearsal", "construction"]


@dataclass(frozen=True)
class Trap:
    """One way to lose a guarantee.

    Args:
        name: ``T1`` and so on.
        title: The mistake.
        stage: The last stage of the examination that looks for it; ``construction`` where the code cannot make it.
        instead: What is true of a run in which it was not found.
        modes: The guarantees that it could break.
    """

    name: str
    title: str
    stage: Stage
    instead: str
    modes: tuple[str, ...] = ("dp",)


TRAPS: tuple[Trap, ...] = (
    Trap("T1", "Shuffled batches, accounted as Poisson samples", "plan",
         "The sampler is built from the law that the accountant judges."),
    Trap("T2", "A loader that draws otherwise than planned", "loader",
         "The training loader draws by the planned sampler, and no logical batch is cut short."),
    Trap("T3", "Coins or noise shared between processes", "settings",
         "All processes share one draw and one noise per step, under a strategy that is shown to keep the claim.",
         ("dp", "inherited", "none")),
    Trap("T4", "Empty batches that are skipped", "construction",
         "An empty draw is a batch of padding: its step is noised, taken and counted."),
    Trap("T5", "A rate or a denominator derived from a private number of units", "plan",
         "Rate, delta and denominator are declared, or derive from a number of units that the claim calls public."),
    Trap("T6", "Truncated batches, accounted as whole ones", "plan",
         "A cap on the batch is part of the law that the accountant judges."),
    Trap("T7", "Steps that nobody counts", "settings",
         "An accountant counts logical steps, and nothing skips one that was paid for.", ("dp", "inherited", "none")),
    Trap("T8", "Norms in low precision", "construction",
         "Norms, sums and noise are kept in float32 or wider, whatever the precision of the forward pass."),
    Trap("T9", "A weight that is used in several places", "rehearsal",
         "The gradients of all uses of a weight are added up before its norm is taken."),
    Trap("T10", "A gradient without a batch axis", "rehearsal",
         "The gradient at each recorded call can be told apart by unit."),
    Trap("T11", "A loss or a layer that couples examples", "rehearsal",
         "No row changed the loss of another one, and no layer keeps statistics of a batch."),
    Trap("T12", "A denominator that is not a public constant", "settings",
         "The noised sum is divided by the plan's constant, and by nothing of the Trainer's."),
    Trap("T13", "A trained parameter that is not clipped", "rehearsal",
         "The engine covers every trainable parameter."),
    Trap("T14", "Parameters that are replaced or hooked", "rehearsal",
         "The parameters are those that the engine was made for, without hooks; every batch checks it again."),
    Trap("T15", "An example whose gradient is not finite", "construction",
         "A unit whose loss or gradient is not finite contributes zero."),
    Trap("T16", "Clipping by the Trainer instead of by unit", "settings",
         "The Trainer clips nothing."),
    Trap("T17", "The sensitivity of another relation", "construction",
         "Clipping bounds a unit by C, and the accountant of replace_one counts 2C."),
    Trap("T18", "A clip bound that adapts to private gradients", "construction",
         "The bound is a constant of the plan."),
    Trap("T21", "Noise that others can compute again", "secret",
         "The secret of noise and coins lies outside the run folder, readable by its owner alone."),
    Trap("T25", "Metrics and choices on private rows", "settings",
         "Nothing stops, chooses, tunes, validates or logs by private rows."),
    Trap("T27", "Synthetic data whose claim is unknown", "settings",
         "The privacy card of the data describes the files that are read.", ("inherited",)),
    Trap("T29", "A delta that permits publishing a unit", "plan",
         "Delta is below 1/n, or n is private and delta is declared."),
    Trap("T30", "A start from weights that were trained on private data", "settings",
         "The weights to start from carry no privacy card.", ("dp", "inherited")),
)  # fmt: skip
