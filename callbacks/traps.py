"""Known ways to lose a privacy guarantee unnoticed, and how this package handles each.

``task=doctor`` checks a run for them; `pitfalls_page` lists them for readers. Refusals carry the trap's number as
`LitDpretError.trap`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["settings", "plan", "secret", "engine", "loader", "rehearsal", "construction", "elsewhere"]
Severity = Literal["breaks_claim", "weakens", "costs_utility"]

SEVERITIES: dict[Severity, tuple[str, str]] = {
    "breaks_claim": ("breaks the claim", "Epsilon on the card would not be true of what was trained."),
    "weakens": (
        "weakens the promise",
        "Epsilon is true of what it covers, but it promises little, or something else is not covered.",
    ),
    "costs_utility": ("costs utility", "The claim holds, but accuracy is lost."),
}
"""The name and the meaning of each severity."""


@dataclass(frozen=True)
class Trap:
    """One way to lose a guarantee."""

    name: str  # ``T1`` and so on
    title: str  # the mistake
    # The last stage of the examination that looks for it; ``construction`` if the code rules it out, ``elsewhere`` if
    # no examination of a run can see it.
    stage: Stage
    instead: str  # what holds if it was not found; or what to do if nothing can find it
    modes: tuple[str, ...] = ("dp",)  # the guarantees that it could break
    severity: Severity = "breaks_claim"  # the cost of the mistake


TRAPS: tuple[Trap, ...] = (
    Trap("T1", "Shuffled batches, accounted as Poisson samples", "plan",
         "The sampler is built from the law that the accountant judges."),
    Trap("T2", "A loader that does not draw as planned", "loader",
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
         "Norms, sums and noise are kept in float32 or wider, whatever the precision of the forward pass; what else "
         "low precision does is T39."),
    Trap("T9", "A weight that is used in several places", "rehearsal",
         "The gradients of all uses of a weight are added up before its norm is taken."),
    Trap("T10", "A gradient without a batch axis", "rehearsal",
         "The gradient at each recorded call can be told apart by unit."),
    Trap("T11", "A loss or a layer that couples examples", "rehearsal",
         "No row changed the loss or the gradient of another one in the mode in which it trains, nothing of one batch "
         "changed the next, and no layer keeps statistics of a batch."),
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
    Trap("T19", "Noise that is not one draw on the sum of a logical step", "construction",
         "The sum of all physical batches and all ranks gets noise of the planned deviation, once."),
    Trap("T20", "The same noise or coins twice", "construction",
         "Streams are keyed by secret, run, attempt, step and parameter, and noise by the sum it is added to."),
    Trap("T21", "Noise that others can compute again", "secret",
         "The secret of noise and coins is stored outside the run folder, readable by its owner alone."),
    Trap("T22", "A generator of noise that is not cryptographic", "elsewhere",
         "Philox with a secret key draws the noise, and the card says so; privacy.secure_rng=true uses ChaCha20, and "
         "so does privacy.noise=discrete.",
         ("dp",), "weakens"),
    Trap("T23", "Noise in floating point", "elsewhere",
         "The guarantee is that of the idealised mechanism, and the card says so; privacy.noise=discrete adds "
         "integers on a public grid, drawn exactly, to which the guarantee applies as it is.",
         ("dp",), "weakens"),
    Trap("T24", "Noise only where a gradient is", "construction",
         "Every coordinate of every trainable parameter gets noise, also in rows of an embedding that nobody used."),
    Trap("T25", "Metrics and choices on private rows", "rehearsal",
         "Nothing stops, chooses, tunes or validates by private rows, and the loss of a row logs nothing. The fit "
         "checks what a callback or a training step logs, and what a checkpoint holds."),
    Trap("T26", "Preparation that looked at private queries", "elsewhere",
         "Decide on vocabularies, means, lengths, filters and the list of passages without the log; the card says so.",
         ("dp", "inherited"), "weakens"),
    Trap("T27", "Synthetic data whose claim is unknown", "settings",
         "The privacy card of the data describes the files that are read, and a DP mode is not given data with a card.",
         ("dp", "inherited")),
    Trap("T28", "Settings that were chosen on private queries", "elsewhere",
         "Count the search (callbacks.card.tuning_method, task=sweep), or say so: callbacks.card.tuning_data.",
         ("dp", "inherited"), "weakens"),
    Trap("T29", "A delta that permits publishing a unit", "plan",
         "Delta is below 1/n, or n is private and delta is declared.", ("dp",), "weakens"),
    Trap("T30", "A start from weights that were trained on private data", "settings",
         "The weights to start from carry no privacy card, and no run is known that trained them on private data.",
         ("dp", "inherited")),
    Trap("T31", "An accountant that rounds in its own favour", "construction",
         "The default accountant discretises pessimistically, so that its epsilon is an upper bound."),
    Trap("T32", "A step of Adam that is mostly noise", "elsewhere",
         "Its second moment learns the noise. Compare model.optimizer.name=adam_bc, and larger batches.",
         ("dp",), "costs_utility"),
    Trap("T33", "A batch far below the knee", "elsewhere",
         "task=plan prints the batch size beyond which a larger one gains little.",
         ("dp",), "costs_utility"),
    Trap("T34", "A clipping bound that hardly any gradient reaches", "elsewhere",
         "The noise is in proportion to privacy.max_grad_norm: a bound that is too large adds noise and no signal.",
         ("dp",), "costs_utility"),
    Trap("T35", "Times of private steps in files that are handed on", "settings",
         "No callback stops, saves or logs by the clock. Records and cards carry a day, and loggers that stamp times "
         "get their numbers when the run is over. Anyone who watches the machine or its disk still sees how long a "
         "step takes."),
    Trap("T36", "A mode that adds less noise than it says", "construction",
         "The noise of every step is measured on every process; a step without the planned noise ends the run, and "
         "is charged as one without noise."),
    Trap("T37", "Rounding that nobody charges", "construction",
         "A unit is clipped to a little less than the bound, so rounding does not bring it above what is charged."),
    Trap("T38", "A data set that answers with another unit", "loader",
         "No row was returned for two units, every draw got its own unit, and no batch was missing or repeated."),
    Trap("T39", "Comparisons in low precision that depend on the batch", "settings",
         "Rows keep their gradients when a unit is gone: everything is computed in float32, or in batches of one "
         "shape in which units keep their positions. What a row is compared with is found without the other rows."),
)  # fmt: skip


def pitfalls_page() -> str:
    """Return the traps by severity, as a page in Markdown."""
    lines = [
        "# Pitfalls",
        "",
        "The known ways to lose a guarantee without noticing, or to pay for it in accuracy. This page is generated",
        "from the list that [`task=doctor`](doctor.md) checks. A fit refuses what it finds. What no program can see",
        "is for you to check; the card says so, or asks.",
    ]
    for severity, (name, meaning) in SEVERITIES.items():
        lines += [
            "",
            f"## {name.capitalize()}",
            "",
            meaning,
            "",
            "| | The mistake | Looked for in | What holds here, or what to do |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {trap.name} | {trap.title} | {_PLACES.get(trap.stage, trap.stage)} | {trap.instead} |"
            for trap in TRAPS
            if trap.severity == severity
        ]
    return "\n".join(lines) + "\n"


_PLACES: dict[str, str] = {"construction": "guaranteed by construction", "elsewhere": "not looked for: yours to check"}
