"""The privacy card: the claim of a run, computed from what the run did.

Its epsilon is recomputed from the ledger, never copied from a configuration. An artefact made from a private artefact
without touching the private data again inherits the claim. The fields follow Ponomareva et al., "How to DP-fy ML"
(2023), section 5.3, and tier 3 of the OpenDP deployments registry.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.cards.amendments import restated
from lit_dpret.cards.audits import contradicted
from lit_dpret.cards.check import verify_card
from lit_dpret.cards.claim import NOTHING_CLAIMED, claim_facts, tuning_gaps, uncovered, without_numbers
from lit_dpret.cards.file import (
    CARD_NAME,
    SCHEMA,
    SIGNATURE_NAME,
    card_path,
    card_sha256,
    read_card,
    subject_of,
    write_card,
)
from lit_dpret.cards.provenance import (
    environment_facts,
    gaps_of_start,
    package_versions,
    start_assumptions,
    start_parents,
)
from lit_dpret.cards.recomputed import decided_blocks, registered_facts
from lit_dpret.cards.tuning import tuning_facts, tuning_of_run, with_earlier_tuning
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import file_sha256
from lit_dpret.privacy.budget import LARGE_DELTA, LARGE_EPSILON, USUAL_DELTA, show_delta, show_epsilon
from lit_dpret.privacy.ledger.assumptions import Assumption, derived_assumptions
from lit_dpret.privacy.ledger.chain import today
from lit_dpret.privacy.ledger.dataset_ledger import sweep_of
from lit_dpret.privacy.ledger.judgement import Judged, plan_of
from lit_dpret.privacy.ledger.run_ledger import charged_releases
from lit_dpret.privacy.ledger.siblings import siblings_of

__all__ = [
    "CARD_NAME",
    "SCHEMA",
    "Assumption",
    "build_card",
    "card_sha256",
    "inherit_card",
    "read_card",
    "subject_of",
    "verify_card",
    "write_card",
]


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Facts on a card that no ledger contains."""

    # ``optimizer``, ``trainable_parameters``, …; they cannot replace facts that the ledger holds.
    mechanism: Mapping[str, Any] = field(default_factory=dict)
    # ``{"data": none|public|synthetic|private|unknown, "n_trials", "note"}``; to state the cost of a search, also
    # ``{"method": "random_stopping", "mean_runs", "runs_law"}``.
    tuning: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] | None = None  # how a synthetic set was decoded and filtered
    environment: Mapping[str, Any] | None = None  # from `environment_facts`
    output_released: Sequence[str] = ()  # what has been released, in words; the default is what usually is
    assumptions: Sequence[Assumption] = ()  # assumptions in addition to those that the ledger decides


@dataclass(frozen=True, kw_only=True)
class RunFacts(CardFacts):
    """Facts on the card of a run on private data that no ledger contains."""

    pretraining: Mapping[str, Any] = field(default_factory=dict)  # ``{"model", "overlap_check"}``


_USUALLY_RELEASED = ("the final weights", "every checkpoint on the way")

# How a card is checked, and what only a signature can prove.
SIGNOFF = {
    "signature": SIGNATURE_NAME,
    "text": "Everything on this card that follows from its ledger can be recomputed, and SHA-256 hashes show an edit "
    "of the card, the ledger or a file. They do not show that a chain was completely rewritten (ledger, files and all "
    "cards): that takes a signature by its maker's key, in a separate file next to this card. Without one, the hashes "
    "show that the parts fit each other, not whose they are.",
}


def build_card(
    ledger_records: Sequence[Mapping[str, Any]], subject: Mapping[str, Any], facts: RunFacts | None = None
) -> dict[str, Any]:
    """Build the card of an artefact computed from private data.

    Guarantees:
        - ``claim.epsilon`` is the accountant's answer to `claimed_releases` of the records; no argument can lower it.
        - It is null, under a red banner, if any release was made without noise (``guarantee`` is ``none``) or an
          assumption that the proof needs is false (``not_proved``).
        - An assumption with ``holds`` false always leaves a banner.

    Raises:
        LedgerError: The records contradict each other, or hold no plan record.
        ConfigurationError: ``tuning.data`` is not a known word, or the run trained on synthetic data.
    """
    facts = facts or RunFacts()
    recorded, last = plan_of(ledger_records)
    if last.get("mode") == "synthetic":
        raise ConfigurationError(
            "A run on synthetic data has no separate claim: inherit_card inherits its data's card."
        )
    known = derived_assumptions(ledger_records, recorded) if recorded is not None else []
    began = facts.pretraining.get("model")
    known += [*start_assumptions(ledger_records, began), *facts.assumptions]
    judged = Judged.by(ledger_records, known)
    claim = claim_facts(judged, facts.output_released or _USUALLY_RELEASED)
    blocks = decided_blocks(judged, began)
    tuned = tuning_of_run(facts.tuning, judged)
    stated = blocks["mechanism"]
    told = registered_facts(ledger_records)
    gaps = uncovered(claim, (blocks["accounting"] or {}).get("groups", ()), tuned, blocks["randomness"])
    card: dict[str, Any] = {
        "schema": SCHEMA,
        "created": today(),
        "subject": dict(subject),
        "claim": claim,
        "mechanism": {**stated, **{k: v for k, v in facts.mechanism.items() if stated.get(k) is None}},
        "accounting": blocks["accounting"],
        "assumptions": [assumption.to_dict() for assumption in judged.assumptions],
        "tuning": tuned,
        "pretraining": {**facts.pretraining, **blocks["pretraining"]},
        "generation": dict(facts.generation or {}),
        "randomness": blocks["randomness"],
        "empirical": {"pre_registered": told.pop("pre_registered"), "results": [], **blocks["empirical"], **told},
        "not_covered": [*gaps, *(gaps_of_start(ledger_records, gaps) if claim["guarantee"] == "dp" else ())],
        "ledger": blocks["ledger"],
        "parents": start_parents(ledger_records),
        **_made_with(facts.environment),
    }
    return restated(card | said(card))


def inherit_card(
    parent_path: str | Path,
    subject: Mapping[str, Any],
    facts: CardFacts | None = None,
    *,
    description: str,
    parent_ledger: str | Path | None = None,
    ledger_records: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Build the card of an artefact computed only from another artefact and public data.

    Guarantees:
        - The claim is the parent's, never better. If the parent has no guarantee, or an audit contradicts its claim,
          the new card has no guarantee either.
        - The card names the parent, and the parent's parents, by the SHA-256 of their cards.

    Args:
        parent_path: The parent's ``privacy_card.json``, or the folder that holds it.
        subject: From `subject_of`.
        facts: Facts about the new artefact; a false assumption among them removes the guarantee.
        description: What was done with the parent, in a phrase.
        parent_ledger: The parent's ledger; by default the file that the parent names, next to its
            card. If it exists, the parent's arithmetic is checked; if not, the card says so.
        ledger_records: Records of the run that made the new artefact; a release among them is refused.

    Raises:
        DataError: The parent is missing, malformed, edited, contradicts its ledger, or describes
            files that differ from those next to it.
        ConfigurationError: The new run made its own releases.
    """
    facts = facts or CardFacts()
    parent_path = card_path(parent_path)
    parent = read_card(parent_path)
    folder = parent_path.parent
    if charged_releases(ledger_records):
        raise ConfigurationError(
            f"{subject['name']} was trained with its own releases: it is not post-processing of {parent_path}. "
            "Its claim must be composed of both; build_card on one ledger with all releases does that."
        )
    for name, digest in parent["subject"]["sha256"].items():
        if (folder / name).exists() and file_sha256(folder / name) != digest:
            raise DataError(f"{folder / name} is not the file that {parent_path} describes: their SHA-256 differ.")
    ledger_path = Path(parent_ledger) if parent_ledger else folder / str((parent["ledger"] or {}).get("name"))
    checked = ledger_path.is_file()
    if checked and not parent_ledger and parent["mechanism"].get("kind") == "post_processing":
        # The ledger next to an inherited card may be that of the run that made the artefact, not the claim's.
        checked = str((parent["ledger"] or {}).get("head")).encode() in ledger_path.read_bytes()
    if checked and (problems := verify_card(parent, ledger_path)):
        raise DataError(f"{parent_path} does not agree with its ledger {ledger_path}: {problems[0]}")
    if parent_ledger and not checked:
        raise DataError(f"The parent's ledger {ledger_path} does not exist.")
    known = [
        Assumption("Only public data and what the parent released went into this computation.", "unverified"),
        Assumption("The parent's epsilon follows from the parent's ledger.", "holds" if checked else "unverified"),
        *facts.assumptions,
    ]
    if contradicted(parent):
        known.insert(
            2, Assumption(f"An audit of {parent['subject']['name']} does not contradict its claim.", "refuted")
        )
    claim = copy.deepcopy(dict(parent["claim"]))
    claim["output_released"] = list(facts.output_released) or [str(subject["name"])]
    accounting, ceilings = copy.deepcopy(parent["accounting"]), copy.deepcopy(parent["empirical"].get("ceilings"))
    pretraining = copy.deepcopy(dict(parent["pretraining"]))
    if claim["guarantee"] == "dp" and any(assumption.refuted for assumption in known):
        claim |= {"guarantee": "not_proved", "epsilon": None, "curve": [], "user_level_epsilon": None}
        accounting, ceilings = without_numbers(accounting), None
        pretraining.pop("start", None)
    delta = claim["delta"] if claim["guarantee"] == "dp" else None
    tuned = tuning_facts(facts.tuning, None, sweep_of(ledger_records), delta, siblings_of(ledger_records))
    planted = parent["empirical"].get("planted")
    whole = with_earlier_tuning(
        tuned, parent["tuning"], str(parent["subject"]["name"]), composed=False, proved=claim["guarantee"] == "dp"
    )
    left_out = [f"{subject['name']}: {gap}" for gap in tuning_gaps(tuned)]
    left_out += [gap for gap in parent["not_covered"] if gap not in left_out]  # it may have the same name
    if claim["guarantee"] != "dp":
        left_out = [NOTHING_CLAIMED]
    card: dict[str, Any] = {
        "schema": SCHEMA,
        "created": today(),
        "subject": dict(subject),
        "claim": claim,
        "mechanism": {**facts.mechanism, "kind": "post_processing", "mode": "synthetic", "description": description},
        "accounting": accounting,
        "assumptions": [*(a.to_dict() for a in known), *copy.deepcopy(list(parent["assumptions"]))],
        "tuning": whole,
        "pretraining": pretraining,
        "generation": dict(facts.generation or parent["generation"]),
        "randomness": copy.deepcopy(dict(parent["randomness"])),
        "empirical": {
            "pre_registered": copy.deepcopy(parent["empirical"].get("pre_registered", [])),
            "results": [],
            "ceilings": ceilings,
            **({} if planted is None else {"planted": copy.deepcopy(planted)}),
        },
        "not_covered": left_out,
        "ledger": copy.deepcopy(parent["ledger"]),
        "parents": [
            {"name": parent["subject"]["name"], "sha256": card_sha256(parent_path), "schema": parent["schema"]},
            *copy.deepcopy(list(parent["parents"])),
        ],
        **_made_with(facts.environment),
    }
    return restated(card | said(card))


def _made_with(environment: Mapping[str, Any] | None) -> dict[str, Any]:
    environment = dict(environment or environment_facts())
    return {"package_versions": package_versions(), "environment": environment, "signoff": dict(SIGNOFF)}


def said(card: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the ``banners`` and ``cautions`` derived from a card's facts."""
    claim = card["claim"]
    banners, cautions = [], []
    if claim["guarantee"] == "none":
        banners.append(
            "NO PRIVACY GUARANTEE. Epsilon is infinite: private data went into this without enough noise. "
            "Do not publish it."
        )
    elif claim["guarantee"] == "not_proved":
        banners.append("PRIVACY NOT PROVED. A step of the proof is false, so no epsilon is printed. Do not publish it.")
    alone = "the weights" if card["subject"]["artifact_type"] == "weights" else "the published files"
    for assumption in card["assumptions"]:
        if assumption["holds"] is False:
            ending = {
                "charged": "The epsilon on this card takes that into account.",
                "no_amplification": "The epsilon on this card therefore charges every unit for every step.",
                "no_guarantee": "Nothing is proved without it.",
                "no_claim": "Nothing is claimed for what the run left.",
                "weights_alone": f"Epsilon covers {alone} alone: publish neither the ledger nor this card.",
            }[assumption["consequence"]]
            banners.append(f"An assumption does not hold: {assumption['text']} {ending}")
    if claim["guarantee"] == "dp":
        # The claim does not include the choice.
        if card["tuning"]["data"] in ("private", "unknown", "synthetic") or not card["tuning"]["accounted"]:
            cautions.append(card["tuning"]["text"])
        start = (card["accounting"] or {}).get("init_from") or {}
        for n, whose in ((card["mechanism"].get("n_public"), ""), (start.get("n_public"), " of the run before it")):
            if n and claim["delta"] >= 1 / n:
                cautions.append(
                    f"delta = {show_delta(claim['delta'])} is not below 1/n{whose}: it would allow one unit to be "
                    "published."
                )
        if claim["delta"] > LARGE_DELTA:
            same = [epsilon for epsilon, delta in claim["curve"] if math.isclose(delta, USUAL_DELTA)]
            at_that = f", at which epsilon is {show_epsilon(same[0])}" if same else ""
            cautions.append(
                f"delta = {show_delta(claim['delta'])} is large: with a probability of up to that, a unit is not "
                f"protected at all. {show_delta(USUAL_DELTA)} is usual{at_that}."
            )
        if claim["epsilon"] > LARGE_EPSILON:
            factor = show_epsilon(claim["epsilon"])
            cautions.append(
                f"The odds of a guess about one unit may change by a factor of e^{factor}, which is hardly any "
                "protection."
            )
    return {"banners": banners, "cautions": cautions}
