"""What a card said before it was amended, proved by the hash that the amendment kept.

Cards of derived artefacts name their parent's card by SHA-256. A parent that was amended afterwards has
another one; taking the notes and results off again gives back the file that was named, byte for byte, or the notes
are not all that was changed.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from lit_dpret.cards.evidence import before_note
from lit_dpret.cards.file import card_json, checksum


def text_sha256(card: Mapping[str, Any]) -> str:
    """SHA-256 of the file that ``write_card`` makes of a card."""
    return hashlib.sha256(card_json(card).encode()).hexdigest()


def versions(card: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The card, then what it was before each amendment, the newest first.

    Guarantees:
        - An earlier version is given only if its file has the SHA-256 that the amendment recorded; the first
          one that cannot be restored so ends the sequence.
    """
    current: dict[str, Any] | None = dict(card)
    while current is not None:
        yield current
        current = _before(current)


def names_before_evidence(card: Mapping[str, Any]) -> set[str]:
    """SHA-256 of a card, and of what it was before results of audits were added to it.

    Guarantees:
        - A name is given only for what `versions` restored, byte for byte, by taking results off again: between any
          two of the cards that are named, the claim, its ledger and its files are the same.
    """
    found = set()
    for version in versions(card):
        found.add(text_sha256(version))
        notes = version.get("amendments")
        if not notes or "results" not in notes[-1]:
            break
    return found


def _before(card: Mapping[str, Any]) -> dict[str, Any] | None:
    """The card without its last amendment; None where there is none, or more than its texts was changed."""
    if not card.get("amendments"):
        return None
    *kept, last = card["amendments"]
    if "results" in last:
        found = before_note(card)
    else:
        found = copy.deepcopy(dict(card))
        for name in last.get("added_to", ()):
            found[name] = found[name][:-1]
        found["amendments"] = kept
        if not kept:
            del found["amendments"]
        found["checksum"] = checksum(found)
    return found if text_sha256(found) == last.get("sha256_before") else None
