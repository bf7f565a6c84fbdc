"""Writing on a card, after it was made, what was computed from the private data since.

A score of a finished artefact against the private queries (BLEU, a share of copied queries) changes nothing about
the artefact, so its claim stays; but the score itself is covered by no noise, and who is shown both is told more
than the claim says. The card is the place where a reader looks for that, so it is amended there: nothing of it is
taken back, and the SHA-256 of the card before is kept, because cards of what was derived from it name that one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.cards.evidence import amended
from lit_dpret.cards.file import CARD_NAME, card_sha256, checksum, read_card, write_card
from lit_dpret.errors import DataError
from lit_dpret.privacy.ledger.chain import today


def note_not_covered(folder: str | Path, what: str, *, computed: str) -> Path | None:
    """Add to the card of ``folder`` that something computed from private data is not covered by it.

    Guarantees:
        - When it returns, the card on the disk says so under what is not covered, and as a caution beside its claim.
        - The claim, the assumptions and everything else on the card are as they were.
        - Each call is recorded in ``amendments``, with the SHA-256 of the card before it; equal texts stand once
          in the lists that people read.

    Args:
        folder: Where the card lies.
        what: What is let out, with the artefact it is about, as the subject of a sentence.
        computed: From what, as the end of a sentence.

    Returns:
        The card, or None where the folder has none: then there is no claim that could be misread.

    Raises:
        DataError: The card is malformed or was edited by hand.
        StorageError: It cannot be written.
    """
    path = Path(folder) / CARD_NAME
    if not path.is_file():
        return None
    before, card = card_sha256(path), copy.deepcopy(read_card(path))
    note = {
        "day": today(),
        "sha256_before": before,
        "not_covered": f"{what}, computed from {computed}: whoever is shown these numbers is told more than the claim "
        "covers.",
        "caution": f"{what} was computed from {computed} after this card was made. Those numbers are not covered.",
    }
    return write_card(_amended(card, [note]), path.parent)


def with_notes(card: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """A card about to be written, with the notes of the one that it will replace in ``folder``.

    Guarantees:
        - Making the card of an artefact anew, as a resumed run does, forgets nothing that was noted on it, nor
          the results of attacks on these very files.

    Args:
        card: The new card.
        folder: Where it is going. A card of another artefact there, or none, leaves it as it is.
    """
    path = Path(folder) / CARD_NAME
    if not path.is_file():
        return dict(card)
    try:
        old = read_card(path)
    except DataError:  # about to be replaced; it can be trusted in nothing
        return dict(card)
    same = all(old["subject"].get(name) == card["subject"].get(name) for name in ("artifact_type", "name"))
    notes = [note for note in old.get("amendments", []) if note not in card.get("amendments", [])]
    if old["subject"]["sha256"] != card["subject"]["sha256"]:  # other weights: what attacks found is not about them
        notes = [note for note in notes if "results" not in note]
    return _amended(copy.deepcopy(dict(card)), notes) if same and notes else dict(card)


def _amended(card: dict[str, Any], notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The card with these notes, each text once in the lists that people read."""
    for note in notes:
        if "results" in note:
            card = amended(card, note)
            continue
        added_to = []
        for name, text in (("not_covered", note["not_covered"]), ("cautions", note["caution"])):
            if text not in card[name]:
                card[name].append(text)
                added_to.append(name)
        card["amendments"] = [*card.get("amendments", []), {**note, "added_to": added_to}]
    card["checksum"] = checksum(card)
    return card
