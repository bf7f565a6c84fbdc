"""What a card says of audits, and of how to check the card itself. Neither is a part of the claim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_dpret.cards.page import Block, Bullets, Code, Paragraph, Section

SIGNOFF = (
    "Everything on this card that follows from its ledger can be computed anew, and an edit of the card, the ledger "
    "or a file shows by its SHA-256. A chain that was rewritten whole, ledger, files and all cards, does not show: "
    "that takes a signature by a key of its maker's, in a file of its own beside this card. Without one, the hashes "
    "show that the parts fit each other, and not whose they are."
)

AUDIT_EVENT = "one_run_audit"
"""The record by which a run's ledger registers its audit before the first release."""

NO_GUARANTEE = "absence of evidence is no guarantee"
BOUND = "lower bound on epsilon"
"""The metric of a result whose estimate is such a bound, and whose ceiling is the epsilon of the accounting."""
ALARM = 1 - 1e-4
"""The confidence with which a result has to contradict a claim for anybody to be told so."""


def audit_sections(card: Mapping[str, Any]) -> list[Section]:
    """Pre-registered protocols and results where there are any, and how this card is checked."""
    empirical, sections = card["empirical"], []
    if protocols := empirical.get("pre_registered"):
        text = (
            "Fixed before the first release, by a record in the ledger: whoever runs an audit by one of them did not "
            "choose it by its result. Audits give evidence of leakage; that they find none proves nothing, and they "
            "change nothing about the claim."
        )
        rows = [f"{one['name']}, SHA-256 {one['sha256']}, registered {one['registered']}" for one in protocols]
        blocks: list[Block] = [Paragraph(text), Bullets(rows)]
        sections.append(Section("Audit protocols", blocks))
    if planted := empirical.get("planted"):
        sections.append(Section("Planted canaries", [Paragraph(planted_text(planted))]))
    if results := empirical.get("results"):
        text = (
            "What attacks found. These are measurements of leakage, and no part of the claim: one that finds much "
            "shows a defect, one that finds nothing shows nothing."
        )
        sections.append(Section("Attacks that were run", [Paragraph(text), Bullets(list(result_texts(results)))]))
    if signoff := card.get("signoff"):
        command = f"lit-dpret verify CARD task.public_key=KEY   # {signoff['signature']} is the signature"
        sections.append(Section("Checking this card", [Paragraph(str(signoff["text"])), Code(command)]))
    return sections


def contradicted(card: Mapping[str, Any]) -> bool:
    """Whether a result on the card lies above what the accounting allows, with the confidence of `ALARM`.

    That is a lower bound on epsilon (`BOUND`) above its ceiling, or an interval that lies above it.
    """
    for one in card["empirical"].get("results", []):
        if one["ceiling"] is None or (one["confidence"] or 0) < ALARM:
            continue
        least = one["eps_lower"] if one["metric"] == BOUND else (one["ci"] or [None])[0]
        if least is not None and least > one["ceiling"]:
            return True
    return False


def audit_problems(card: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What audits leave against a card: a contradiction, or a result that is due by the run's ledger and is not there.

    Args:
        card: As it is now, with all its amendments.
        records: Of its ledger, as far as the card was made from them; none where it was not found.
    """
    if contradicted(card):
        return [attacks_sentence(card)]
    events = [record for record in records if record["kind"] == "event" and record.get("name") == AUDIT_EVENT]
    ended = any(record["kind"] == "end" and record.get("reason") == "finished" for record in records)
    if events and ended and not card["empirical"].get("results"):
        return [
            "The ledger registered an audit by canaries before the first release, and its result is not on the card. "
            "Resume the run with the same settings: it judges the canaries again."
        ]
    return []


def attacks_sentence(card: Mapping[str, Any]) -> str:
    """What the statement of a card says of attacks."""
    if not card["empirical"].get("results"):
        return "No attack has been run against this artefact; and where attacks find nothing, that proves nothing."
    if contradicted(card):
        return (
            "AN AUDIT CONTRADICTS THIS CLAIM: an attack listed under empirical found more than the accounting allows, "
            "so the program did not do what its ledger says. Publish nothing before the defect is known."
        )
    return "Attacks that were run are listed under empirical; what they did not find is no guarantee."


def bound_text(eps_lower: float, delta: float | None, confidence: float | None) -> str:
    """A lower bound in the only words in which one is printed.

    >>> bound_text(0.41, 0.0, 0.95)
    'evidence of leakage at least 0.41 at delta=0 (confidence 0.95); absence of evidence is no guarantee'
    """
    at = "" if delta is None else f" at delta={delta:.3g}"
    sure = "a point value without confidence" if confidence is None else f"confidence {confidence:g}"
    return f"evidence of leakage at least {eps_lower:.4g}{at} ({sure}); {NO_GUARANTEE}"


def result_texts(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each entry of ``empirical.results`` as a line."""
    for one in results:
        parts = [f"{one['attack']} (n = {one['n']}, {one['copies']} cop{'y' if one['copies'] == 1 else 'ies'} each)"]
        if one["estimate"] is not None:
            level = "" if one["confidence"] is None else f" at {one['confidence']:g}"
            ci = "" if one["ci"] is None else f" [{one['ci'][0]:.4g}, {one['ci'][1]:.4g}]{level}"
            parts.append(f"{one['metric']} {one['estimate']:.4g}{ci}")
        if one["ceiling"] is not None:
            parts.append(f"no more than {one['ceiling']:.4g} is possible by the accounting")
        if one["eps_lower"] is not None:
            parts.append(bound_text(one["eps_lower"], one["delta"], one["confidence"]))
        if one["assumption"]:
            parts.append(f"it assumes: {one['assumption']}")
        parts.append(
            f"measured on {one['about']}" + (", which was trained on the planted canaries" if one["canaried"] else "")
        )
        yield "; ".join(part.rstrip(".") for part in parts) + "."


def planted_text(planted: Mapping[str, Any]) -> str:
    """What a card says of planted canaries."""
    return (
        f"{planted['canaries']} canaries were planted in the training data of this artefact, or of what it was derived "
        f"from, as at most {planted['units']} units of their own; n counts them. Where an audit tossed coins, "
        "those that showed tails stand there without their text, or, under add_or_remove, not at all, and how many "
        "they were is told to nobody. This is the canaried model. The set was fixed "
        f"before training by its SHA-256, {planted['sha256']}."
    )
