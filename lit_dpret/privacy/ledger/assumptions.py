"""The assumptions of a run's claim: those that its ledger confirms or refutes, and those that it cannot see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lit_dpret.privacy.accounting.releases import Release, SamplingLaw, Shuffle, release_from_dict
from lit_dpret.privacy.budget import NAMES, ROUNDING_SHARE
from lit_dpret.privacy.ledger.dataset_file import noted_total
from lit_dpret.privacy.ledger.run_ledger import (
    DECLARED_EVENT,
    FAILED,
    FLOAT_SLACK,
    NOISE_KINDS,
    PRIVATE_EVENT,
    PRIVATE_LOG_EVENT,
    SAMPLING_DEPARTURE,
    SECRET_CHANGED,
    UNITS_UNNAMED,
    attempts_with,
    events_of,
    noise_keys,
    plans_of,
    realised_multiplier,
    recorded_start,
)
from lit_dpret.privacy.plan import EVOLUTION, HISTOGRAM, PrivacyPlan

Record = Mapping[str, Any]
Consequence = Literal["charged", "no_amplification", "no_guarantee", "no_claim", "weights_alone"]
Standing = Literal["holds", "refuted", "unverified"]

# How a card stores it under "holds".
_STORED: Mapping[Standing, bool | str] = {"holds": True, "refuted": False, "unverified": "unverified"}

RANDOM_WEIGHTS = "random weights"
"""The start that a card names where training began without a model."""


@dataclass(frozen=True)
class Assumption:
    """A step of the argument from the mechanism to the claim."""

    text: str  # the assumption as a statement
    # Whether the ledger shows that the assumption ``holds``, shows that it does not (``refuted``), or neither
    # (``unverified``).
    standing: Standing
    # What happens to the claim if it is refuted: ``charged`` (epsilon already counts it), ``no_amplification`` (every
    # unit is charged for every step), ``no_guarantee`` (not proved, so no number is printed), ``no_claim`` (no number
    # is printed either, but a total over runs includes its releases), or ``weights_alone`` (epsilon covers the weights,
    # not the ledger).
    consequence: Consequence = "no_guarantee"

    @property
    def refuted(self) -> bool:
        return self.standing == "refuted"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for a card, where ``holds`` is true, false, or ``"unverified"``."""
        return {"text": self.text, "holds": _STORED[self.standing], "consequence": self.consequence}


def derived_assumptions(records: Sequence[Record], plan: PrivacyPlan) -> list[Assumption]:
    """List the assumptions that the ledger can confirm or refute, then those that it cannot."""
    return [*_recorded(records, plan), *_declared(plan, [most for _, most in units_before(recorded_start(records))])]


def _recorded(records: Sequence[Record], plan: PrivacyPlan) -> list[Assumption]:
    intents = set(noise_keys(records))
    releases = [record for record in records if record["kind"] == "release"]
    confirmed = {(record["attempt"], record["step"]) for record in releases}
    silent = len(intents - confirmed)
    steps = max((int(record["steps"]) for record in records if record["kind"] == "end"), default=0)
    announced = len({step for _, step in intents})
    found = [
        Assumption(
            "Every step was announced in the ledger before its noise was drawn."
            if steps <= announced
            else f"Every step was announced in the ledger before its noise was drawn: {steps} were made, "
            f"{announced} announced.",
            "holds" if steps <= announced else "refuted",
        ),
        Assumption("No noise was used for two different steps.", "holds"),
    ]
    # Slack, because a quotient of floats that equals the plan's on paper may be one last digit below it.
    weak = [r for r in releases if realised_multiplier(r) < plan.noise_multiplier * (1 - FLOAT_SLACK)]
    text = "Each confirmed step added at least the planned noise, once, to the sum over the batch."
    if weak:
        text += f" {len(weak)} of {len(releases)} added less; they are charged with what they added."
    found.append(Assumption(text, "refuted" if weak else "holds", "charged"))
    found.append(_law_assumption(records, releases, plan))
    if silent:
        text = f"{silent} announced steps were never confirmed, because the run was interrupted; they are charged."
        found.append(Assumption(text, "unverified", "charged"))
    found += _ended_by_rows(records)
    if again := len(intents) - announced:
        text = (
            f"No earlier checkpoint was chosen by what the run had released: {again} steps were made again with fresh "
            f"noise, and are charged. If one was, rely on the whole budget, epsilon = "
            f"{plan.budget.eps:g}."
        )
        found.append(Assumption(text, "unverified"))
    return [*found, *_not_compared(records, plan), *_added_up(records, plan)]


def _added_up(records: Sequence[Record], plan: PrivacyPlan) -> list[Assumption]:
    """Return the assumption behind a total over several runs on one data set."""
    total, unit = noted_total(records), plan.budget.unit_name
    if total is None or total["runs"] < 2:
        return []
    text = (
        f"For the total of all runs on this data set: the content of one {unit} of these data is in at most one {unit} "
        "of the data of each other run that it counts."
    )
    return [Assumption(text, "unverified")]


def _not_compared(records: Sequence[Record], plan: PrivacyPlan) -> list[Assumption]:
    """Return the assumption that the data were the same before a change of the secret, which keys comparisons."""
    changes = [place for place, r in enumerate(records) if r["kind"] == "event" and r.get("name") == SECRET_CHANGED]
    if not any(noise_keys(records[:place]) for place in changes[-1:]):
        return []
    unit = plan.budget.unit_name
    text = (
        f"The content of one {unit} of these data is in at most one {unit} of the data that the run was trained on "
        "before its secret (privacy.secret_file) changed: with another secret nothing shows whether it is the same "
        "data set."
    )
    return [Assumption(text, "unverified")]


def _ended_by_rows(records: Sequence[Record]) -> list[Assumption]:
    """Return the assumption that no private row ended the run: no release covers the fact or time of its end."""
    ends = [(i, r["steps"]) for i, r in enumerate(records) if r["kind"] == "end" and r["reason"] == FAILED]
    if not ends:
        return []
    went_on = any(r["kind"] in (*NOISE_KINDS, "end") for r in records[ends[-1][0] + 1 :])
    where = ", ".join(f"after step {steps}" for _, steps in ends)
    if not went_on:
        text = (
            "No private row ended the run: it ended with a failure while private rows were read or computed "
            f"({where}), and no noise covers the fact or the time of that."
        )
        return [Assumption(text, "refuted", "no_claim")]
    text = (
        "No private row interrupted the run: failures while private rows were read or computed interrupted it "
        f"({where}), and no noise covers the fact or the time of that."
    )
    return [Assumption(text, "refuted", "weights_alone")]


def _law_assumption(records: Sequence[Record], releases: Sequence[Record], plan: PrivacyPlan) -> Assumption:
    text = "Batches were drawn by the planned law, as the sampler itself reports"
    if departed := attempts_with(SAMPLING_DEPARTURE, records):
        where = ", ".join(map(str, sorted(departed)))
        why = f"in attempt {where} the draws departed from it; every unit is charged for every step of that attempt"
        # Without a law, every unit is charged in every step; `judge` explains why that is not a bound here.
        consequence: Consequence = "no_guarantee" if plan.budget.neighbours == "add_or_remove" else "charged"
        return Assumption(f"{text}: {why}.", "refuted", consequence)
    stated = [record["law"] for record in releases if record.get("law") is not None]
    planned = plan.law.to_dict()
    other = sum(law != planned for law in stated)
    if other:
        laws = [SamplingLaw.from_dict(law) for law in stated]
        if not all(plan.holds_under(law, plan.budget.neighbours) for law in laws):
            why = f"{other} steps drew by another law, for which the noise was not planned"
            return Assumption(f"{text}: {why}.", "refuted")
        return Assumption(f"{text}: {other} steps drew by another law, which is charged.", "refuted", "charged")
    if isinstance(plan.law, Shuffle):
        why = "they were shuffled instead, and no amplification is proved for that"
        return Assumption(
            f"Batches were drawn independently, so sampling amplifies privacy: {why}.", "refuted", "charged"
        )
    return Assumption(f"{text}.", "holds" if len(stated) == len(releases) else "unverified", "charged")


def more_before(before: Sequence[int | None]) -> str:
    """Return a clause with the declared maximum units per person of each earlier run; empty without any."""
    return "".join(f", or more than {most} to an earlier run" for most in before if most is not None)


def _declared(plan: PrivacyPlan, before: Sequence[int | None]) -> list[Assumption]:
    if plan.budget.neighbours == "add_or_remove":
        public = (
            "Delta, the sampling rate, the batch cap and the denominator were declared without looking at the data."
        )
    elif plan.budget.neighbours == "zero_out":
        listed = "" if plan.budget.unit in ("image", "record") else " and the list of passages"
        public = f"The number of units{listed} may be public."
    else:
        public = "The number of units may be public."
    several = [] if plan.max_units_per_user is None else [
        f"No user contributed more than {plan.max_units_per_user} units{more_before(before)}; only the user-level "
        "epsilon depends on this."
    ]  # fmt: skip
    return [
        _bound_assumption(plan),
        *([] if plan.noise != "discrete" else [_grid_assumption(plan)]),
        *(Assumption(text, "unverified") for text in (
            *several,
            public,
            "All processing of the rows before the run used each unit's own rows and public data alone: no mean, "
            "vocabulary, filter or trained features of the private rows are in them.",
            "The noise is Gaussian and unpredictable without its secret, and the secret stays secret.",
            "Nothing else computed from the private data was released: no loss, metric or choice of a checkpoint.",
        )),
    ]  # fmt: skip


def _grid_assumption(plan: PrivacyPlan) -> Assumption:
    bound = plan.sensitivity / (1 + ROUNDING_SHARE)
    return Assumption(
        f"The sum of a step as computed, including its additions in floating point, moves by at most "
        f"{bound:.8g}. The rest is integer arithmetic: the sum is rounded to a public grid and moves by at most "
        f"{plan.sensitivity:.8g}, to which the noise multiplier refers, and the noise is a Gaussian rounded to that "
        "grid, drawn exactly.",
        "unverified",
    )


#: The input format of an engine's products, and the exponent b of their assumed error n / 2^b
#: (`lit_dpret.privacy.clipping.arithmetic`).
_PRODUCTS = {
    "ghost": ("float32", 24), "vmap": ("float32", 24), "ghost_tf32": ("TF32", 22), "ghost_bf16": ("bfloat16", 22),
}  # fmt: skip


def _bound_assumption(plan: PrivacyPlan) -> Assumption:
    coupling = plan.coupling
    if plan.mode in (HISTOGRAM, EVOLUTION):
        moved = plan.sensitivity * (2 if plan.budget.neighbours == "replace_one" else 1)
        if plan.mode == HISTOGRAM:
            text = f"The bins are public, and neighbours differ by at most {moved:.6g} in the counts."
        else:
            text = (
                "Which candidates are voted on follows from public data and from earlier noised votes alone, and "
                f"neighbours differ by at most {moved:.6g} in the votes of a generation."
            )
        return Assumption(text, "unverified")
    if coupling is None:
        bound = "the clipping bound"
        if plan.clip_fraction_budget:
            bound = f"{plan.sensitivity:g}, its clipped gradient and its part in the count of clipped units together"
        engine = plan.engine
        if engine in _PRODUCTS:
            inputs, bits = _PRODUCTS[engine]
            engine += (
                f"; its products take {inputs} inputs, norms are bounded from above, and the device is assumed"
                f" to add up n of them with an error of at most n / 2^{bits} of the sum of their sizes"
            )
        return Assumption(f"One unit moves the sum of a step by at most {bound} (engine: {engine}).", "unverified")
    text = f"One unit moves the sum of a step by at most {plan.sensitivity:g}: {coupling.describe(plan.max_grad_norm)}"
    if coupling.claim == "refuted":
        return Assumption(f"{text}. That number is refuted: there are data that exceed it.", "refuted")
    if coupling.claim == "declared":
        text += ". The number rests on bounds that were declared for this loss and are not proved here"
    return Assumption(f"{text}.", "unverified")


def units_before(start: Mapping[str, Any] | None) -> list[tuple[list[Release], int | None]]:
    """Return the runs before a start, the nearest first, with releases and declared units per person."""
    if start is None or not start["releases"]:
        return []
    runs = start.get("units") or [{"max_units_per_user": None, "releases": start["releases"]}]
    return [([release_from_dict(r) for r in run["releases"]], run["max_units_per_user"]) for run in runs]


_NO_CLAIM_OF_ITS_OWN = ("none", "synthetic")
_WORDS_ARE_PUBLIC = (
    "The file of queries that the canaries took their words from is public, as declared: it was compared, word for "
    "word, with the queries of the run's own data alone."
)


def leaks(records: Sequence[Mapping[str, Any]]) -> list[Assumption]:
    """Return the assumptions that a run's ledger refutes or leaves open, in this attempt or an earlier one."""
    written = plans_of(records)
    plans = [plan for plan in written if plan["mode"] not in _NO_CLAIM_OF_ITS_OWN]
    found = []
    if any(plan.get("log_private_loss") for plan in plans):
        logged = dict.fromkeys(event["logged"] for event in events_of(records, PRIVATE_LOG_EVENT))
        names = f" ({', '.join(logged)})" if logged else ""
        found.append(
            f"No loss on private rows was shown: log_private_loss=true logged the training loss of every step{names}."
        )
    if any(plan.get("noise_seed") is not None for plan in plans):
        found.append("No one else can compute the noise: privacy.noise_seed keyed it with a published number.")
    shown = [release_from_dict(event["release"]).label for event in events_of(records, PRIVATE_EVENT)]
    for label in dict.fromkeys(shown):
        found.append(
            f"No metric of private queries was shown: {label} were logged during training, {shown.count(label)} times."
        )
    trusted = dict.fromkeys(text for plan in written for text in plan.get("assumptions") or [])
    if any("words" in (plan.get("planted") or {}) for plan in written):
        trusted[_WORDS_ARE_PUBLIC] = None
    unnamed = dict.fromkeys(event["unit"] for event in events_of(records, UNITS_UNNAMED))
    declared = {(e["data"], e["split"], e.get("of", "queries")) for e in events_of(records, DECLARED_EVENT)}
    return [
        *(Assumption(text, "refuted") for text in found),
        *(Assumption(text, "unverified") for text in trusted),
        *(
            Assumption(
                f"One unit holds all rows of one {unit} and of no other: the training rows do not say whose they are "
                f"({', '.join(NAMES[unit])}).",
                "unverified",
            )
            for unit in unnamed
        ),
        *(
            Assumption(
                f"The {split} {rows} that were evaluated on during training are {data}, as declared.", "unverified"
            )
            for data, split, rows in sorted(declared)
        ),
    ]
