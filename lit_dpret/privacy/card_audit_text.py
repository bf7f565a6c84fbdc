"""What a card says of audits, and of how to check the card itself. Neither is a part of the claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_dpret.privacy.page import Block, Bullets, Code, Paragraph, Section

SIGNOFF = (
    "Everything on this card that follows from its ledger can be computed anew, and an edit of the card, the ledger "
    "or a file shows by its SHA-256. A chain that was rewritten whole, ledger, files and all cards, does not show: "
    "that takes a signature by a key of its maker's, in a file of its own beside this card. Without one, the hashes "
    "show that the parts fit each other, and not whose they are."
)


def audit_sections(card: Mapping[str, Any]) -> list[Section]:
    """Pre-registered protocols and results where there are any, and how this card is checked."""
    empirical, sections = card["empirical"], []
    if protocols := empirical.get("pre_registered"):
        text = (
            "Fixed before the first release, by a record in the ledger: whoever runs an audit by one of them did not "
            "choose it by its result. Audits give evidence of leakage; that they find none proves nothing, and they "
            "change nothing about the claim."
        )
        rows = [
            f"{one['name']}, SHA-256 {one['sha256']}, registered {one['registered'][:16].replace('T', ' ')} UTC"
            for one in protocols
        ]
        blocks: list[Block] = [Paragraph(text), Bullets(rows)]
        sections.append(Section("Audit protocols", blocks))
    if signoff := card.get("signoff"):
        command = f"lit-dpret verify CARD task.public_key=KEY   # {signoff['signature']} is the signature"
        sections.append(Section("Checking this card", [Paragraph(str(signoff["text"])), Code(command)]))
    return sections
