"""Audits on a privacy card: results of attacks, what they say of the claim, and their text.

Findings are shown next to the claim, never in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_dpret.audit.statistics.evidence import bound_text
from lit_dpret.cards.blocks import Block, Bullets, Code, Paragraph, Section
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.privacy.ledger.run_ledger import events_of

AUDIT_EVENT = "one_run_audit"
"""The ledger event by which a run registers its audit before the first release."""

BOUND = "lower bound on epsilon"
"""The metric of a result whose estimate is a lower bound, and whose ceiling is the epsilon of the accounting."""
ALARM = 1 - 1e-4
"""The confidence at which a result is reported as contradicting a claim."""


def audit_sections(card: Mapping[str, Any]) -> list[Section]:
    """Return sections on registered protocols and results, if any, and on how this card is checked."""
    empirical, sections = card["empirical"], []
    if protocols := empirical.get("pre_registered"):
        text = (
            "These were fixed before the first release, by a record in the ledger, so an audit that follows one of "
            "them was not chosen by its result. Audits give evidence of leakage; that they find none proves nothing, "
            "and the claim does not depend on them."
        )
        rows = [f"{one['name']}, SHA-256 {one['sha256']}, registered {one['registered']}" for one in protocols]
        blocks: list[Block] = [Paragraph(text), Bullets(rows)]
        sections.append(Section("Audit protocols", blocks))
    if planted := empirical.get("planted"):
        sections.append(Section("Planted canaries", [Paragraph(planted_text(planted))]))
    if results := empirical.get("results"):
        text = (
            "These results measure leakage and are not part of the claim. One above what the accounting allows shows a "
            "defect; one that finds nothing proves nothing."
        )
        sections.append(Section("Attacks that were run", [Paragraph(text), Bullets(list(result_texts(results)))]))
    if signoff := card.get("signoff"):
        command = f"lit-dpret verify CARD task.public_key=KEY   # {signoff['signature']} is the signature"
        sections.append(Section("Checking this card", [Paragraph(str(signoff["text"])), Code(command)]))
    return sections


def contradicted(card: Mapping[str, Any]) -> bool:
    """Return whether a bound on epsilon, or an interval, lies above its ceiling with the confidence of `ALARM`."""
    for one in card["empirical"].get("results", []):
        if one["ceiling"] is None or (one["confidence"] or 0) < ALARM:
            continue
        least = one["eps_lower"] if one["metric"] == BOUND else (one["ci"] or [None])[0]
        if least is not None and least > one["ceiling"]:
            return True
    return False


def audit_problems(card: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return audits' objections to a card: a contradiction, or a missing result that its ledger announced."""
    if contradicted(card):
        return [attacks_sentence(card)]
    events = events_of(records, AUDIT_EVENT)
    ended = any(record["kind"] == "end" and record["reason"] == "finished" for record in records)
    if events and ended and not card["empirical"].get("results"):
        return [
            "The ledger registered an audit by canaries before the first release, but its result is not on the card. "
            "Resume the run with the same settings (resume=true): it then judges the canaries again."
        ]
    return []


def attacks_sentence(card: Mapping[str, Any]) -> str:
    """Return the statement's sentence on attacks."""
    if not card["empirical"].get("results"):
        what = "No attack on this artefact is recorded on this card"
        if card["mechanism"].get("kind") == "post_processing":
            what = "Attacks on what this artefact was made from are recorded on the cards of its parents, not here"
        return f"{what}. An attack that finds nothing proves nothing."
    if contradicted(card):
        return (
            "AN AUDIT CONTRADICTS THIS CLAIM: an attack listed under empirical found more than the accounting allows, "
            "so the program did not do what its ledger says. Publish nothing until the defect is found."
        )
    return "Attacks that were run are listed under empirical; that they found no more is no guarantee."


def result_texts(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each entry of ``empirical.results`` as a line."""
    for one in results:
        parts = [f"{one['attack']} (n = {one['n']}, {one['copies']} cop{'y' if one['copies'] == 1 else 'ies'} each)"]
        if one["estimate"] is not None:
            level = "" if one["confidence"] is None else f" at {one['confidence']:g}"
            ci = "" if one["ci"] is None else f" [{one['ci'][0]:.4g}, {one['ci'][1]:.4g}]{level}"
            parts.append(f"{one['metric']} {one['estimate']:.4g}{ci}")
        if one["ceiling"] is not None:
            parts.append(f"the accounting allows at most {show_epsilon(one['ceiling'])}")
        if one["eps_lower"] is not None:
            parts.append(bound_text(one["eps_lower"], one["delta"], one["confidence"]))
        if one["assumption"]:
            parts.append(f"it assumes: {one['assumption']}")
        parts.append(
            f"measured on {one['about']}" + (", which was trained on the planted canaries" if one["canaried"] else "")
        )
        yield "; ".join(part.rstrip(".") for part in parts) + "."


def planted_text(planted: Mapping[str, Any]) -> str:
    """Describe planted canaries."""
    return (
        f"{planted['canaries']} canaries were planted in the training data of this artefact, or of what it was derived "
        f"from, as at most {planted['units']} separate units, which n includes. If an audit flipped a coin for "
        "each, those with tails were planted blank (under add_or_remove they were left out, and under replace_one "
        "another secret took their place). This is the canaried model: it was not trained again without them. "
        f"The set was fixed before training by its SHA-256, {planted['sha256']}."
        + (f" Their words come from {planted['words']}." if "words" in planted else "")
    )
