"""Whether a folder is the artefact that a privacy card speaks of.

A card is believed because of the run that made it, so it must not be believed beside other files: an edited
query or other weights under a good card would go out with a claim that nobody made for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.cards.file import CARD_NAME, card_sha256, file_sha256, read_card
from lit_dpret.errors import DataError
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME


def check_dataset_card(path: Path | None) -> None:
    """Refuse data that its privacy card does not describe, file by file.

    Raises:
        DataError: The card is missing, is not one of a data set, or lists other contents than the
            folder's queries, judgements and passages.
    """
    if path is None:
        raise DataError(
            "privacy=synthetic trains on data that carries a privacy card, and this folder has none.", trap="T27"
        )
    subject = read_card(path)["subject"]
    if subject["artifact_type"] != "dataset" or not subject["sha256"]:
        raise DataError(
            f"{path} is the card of {subject['artifact_type']} {subject['name']!r}, not of the data set it lies with: "
            "its claim says nothing about these queries. Take the folder that task=synthesize wrote.",
            trap="T27",
        )
    folder = path.parent
    read = [p for pattern in ("queries.*", "corpus.*", "qrels/train.*") for p in folder.glob(pattern)]
    for name in {p.relative_to(folder).as_posix() for p in read} | set(subject["sha256"]):
        file = folder / name
        if not file.is_file() or file_sha256(file) != subject["sha256"].get(name):
            raise DataError(
                f"{file} is not the file that {path.name} describes; its claim does not cover it.", trap="T27"
            )


def check_artefact(folder: Path, card: Mapping[str, Any]) -> None:
    """Refuse a folder of a model or a data set that is not what the card in it describes.

    Guarantees:
        - Every file of the folder is listed on the card with its SHA-256, hidden ones, the ledger and the
          card itself aside, and every listed file is there.

    Raises:
        DataError: A file was changed, added or taken away, or the card lists none.
    """
    if card["subject"]["artifact_type"] == "dataset":
        check_dataset_card(folder / CARD_NAME)
        return
    listed = card["subject"]["sha256"]
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    aside = {name for name in names if name.startswith("privacy_card.") or name == LEDGER_NAME or "/." in f"/{name}"}
    for name in sorted((names - aside) | set(listed)):
        if name not in names or name not in listed or file_sha256(folder / name) != listed[name]:
            raise DataError(
                f"{folder / name} is not among the files that {CARD_NAME} describes, or not as it describes it: the "
                "card is of something else. Take the folder that the run wrote, as it wrote it."
            )


def card_names(path: Path, card: Mapping[str, Any]) -> set[str]:
    """Every SHA-256 by which others may name this card: its own, and those from before it was amended."""
    return {card_sha256(path), *(str(note["sha256_before"]) for note in card.get("amendments", []))}


def card_above(folder: Path) -> Path | None:
    """A card further up that lists files of ``folder``: a part of an artefact, taken without what is said of it."""
    inner = folder.resolve()
    for place in list(inner.parents)[:3]:
        for root in (place, place / "model"):
            if not inner.is_relative_to(root) or not (place / CARD_NAME).is_file():
                continue
            prefix = "" if inner == root else f"{inner.relative_to(root).as_posix()}/"
            if any(name.startswith(prefix) for name in read_card(place)["subject"]["sha256"]):
                return place / CARD_NAME
    return None
