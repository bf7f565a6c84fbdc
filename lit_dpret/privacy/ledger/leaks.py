"""What a run is known to have let out besides its releases, read off its ledger for the card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_dpret.privacy.ledger.facts import Assumption
from lit_dpret.privacy.unit_owners import NAMES

PRIVATE_EVENT = "private_evaluation"
"""The event before metrics of private queries are let out; it holds a ``NonPrivateRelease``."""

PRIVATE_LOG_EVENT = "private_log"
"""The event before a number that nobody declares public is first logged, under ``log_private_loss``."""

DECLARED_EVENT = "declared_evaluation"
"""The event that says whose queries a run was evaluated on, as its settings declare."""

UNITS_UNNAMED = "units_unnamed"
"""The event that says that the training rows do not name the query, user or image that they are of."""

_NO_CLAIM_OF_ITS_OWN = ("none", "synthetic")


def leaks(records: Sequence[Mapping[str, Any]]) -> list[Assumption]:
    """The assumptions that a run's ledger shows to be false or leaves open, in this attempt or an earlier one."""
    plans = [r for r in records if r["kind"] == "plan" and r.get("mode") not in _NO_CLAIM_OF_ITS_OWN]
    found = []
    if any(plan.get("log_private_loss") for plan in plans):
        logged = dict.fromkeys(r["logged"] for r in records if r.get("name") == PRIVATE_LOG_EVENT)
        names = f" ({', '.join(logged)})" if logged else ""
        found.append(
            f"No loss on private rows was shown: log_private_loss=true logged the training loss of every step{names}."
        )
    if any(plan.get("noise_seed") is not None for plan in plans):
        found.append("Nobody else can compute the noise: privacy.noise_seed keyed it with a published number.")
    events = [record for record in records if record["kind"] == "event"]
    shown = [event["release"]["label"] for event in events if event.get("name") == PRIVATE_EVENT]
    for label in dict.fromkeys(shown):
        found.append(
            f"No metric of private queries was shown: {label} were logged during training, {shown.count(label)} times."
        )
    trusted = dict.fromkeys(text for r in records if r["kind"] == "plan" for text in r.get("assumptions") or [])
    unnamed = dict.fromkeys(e["unit"] for e in events if e.get("name") == UNITS_UNNAMED)
    declared = {(e["data"], e["split"]) for e in events if e.get("name") == DECLARED_EVENT}
    return [
        *(Assumption(text, holds=False, consequence="no_guarantee") for text in found),
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
                f"The {split} queries that were evaluated on during training are {data}, as declared.", "unverified"
            )
            for data, split in sorted(declared)
        ),
    ]
