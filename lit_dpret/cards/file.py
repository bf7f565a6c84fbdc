"""Card files: written atomically, validated on reading, named by SHA-256, and compared with the files next to them.

Readers trust a card. One that cannot be a valid claim is therefore rejected, and so is one next to files other than
those it lists: otherwise an edited query would be published under a claim that was never made for it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from lit_dpret.cards.text import card_html, card_markdown
from lit_dpret.errors import ConfigurationError, DataError, LedgerError, schema_problem
from lit_dpret.files import CARD_NAME as CARD_NAME
from lit_dpret.files import file_sha256, meant, notes_near, query_places, write_whole
from lit_dpret.privacy.budget import Neighbours, Unit
from lit_dpret.privacy.ledger.chain import canonical_json
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.settings import is_number, require_choice

SCHEMA = "lit-dpret/privacy-card/1"
SIGNATURE_NAME = "privacy_card.sig"
PROVENANCE, README = "provenance", "README.md"
MODEL_FOLDER = "model"
"""The subfolder where a run saves its model."""
CARD_FILES = (CARD_NAME, "privacy_card.md", "privacy_card.html", SIGNATURE_NAME)

ArtifactType = Literal["weights", "dataset", "index", "histogram"]


def subject_of(
    artifact_type: ArtifactType, name: str, files: Iterable[str | Path] = (), *, root: str | Path | None = None
) -> dict[str, Any]:
    """Describe an artefact by its type, its name, and the SHA-256 of each file, named relative to ``root``."""
    require_choice("artifact_type", artifact_type, get_args(ArtifactType))
    digests = {}
    for file in sorted(Path(file) for file in files):
        label = file.relative_to(root).as_posix() if root is not None else file.name
        digests[label] = file_sha256(file)
    return {"artifact_type": artifact_type, "name": name, "sha256": digests}


def write_card(card: Mapping[str, Any], folder: str | Path) -> Path:
    """Write ``privacy_card.json``, ``.md`` and ``.html``, each atomically; return the path of the JSON."""
    path = Path(folder) / CARD_NAME
    texts = {
        path: card_json(card),
        path.with_suffix(".md"): card_markdown(card),
        path.with_suffix(".html"): card_html(card),
    }
    for target, text in texts.items():
        write_whole(target, text)
    return path


def card_json(card: Mapping[str, Any]) -> str:
    """Return the content of ``privacy_card.json``."""
    return json.dumps(card, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def text_sha256(card: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the file that `write_card` writes for a card."""
    return hashlib.sha256(card_json(card).encode()).hexdigest()


def read_card(path: str | Path) -> dict[str, Any]:
    """Read a card, from its file or folder, and validate its claim.

    Raises:
        DataError: It is missing, not a card of this schema, was edited after it was made, or claims a
            guarantee without a finite epsilon, a delta, a unit and neighbours.
    """
    path = card_path(path)
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = meant(path.parent if path.name == CARD_NAME else path, CARD_NAME)
        raise DataError(f"There is no readable privacy card at {path}: {error.strerror}.{hint}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}. Name a folder with a card, or its {CARD_NAME}.") from error
    if problem := malformed(card):
        raise DataError(f"{path} cannot be used as a privacy card: {problem}")
    return dict(card)


def card_sha256(path: str | Path) -> str:
    """Return the SHA-256 of the card's file, by which a derived card names it."""
    return file_sha256(card_path(path))


def checksum(card: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the card without this field: it detects accidental edits, not forgery."""
    body = {key: value for key, value in card.items() if key != "checksum"}
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def malformed(card: Any) -> str | None:
    """Return why ``card`` is invalid, or None."""
    if not isinstance(card, Mapping):
        return f"it is a {type(card).__name__}, not an object."
    if problem := schema_problem(card.get("schema"), SCHEMA):
        return problem
    try:
        if card["checksum"] != checksum(card):
            return "its content does not match its checksum. It was edited."
        claim, ledger = card["claim"], card["ledger"]
        if claim["guarantee"] not in ("dp", "none", "not_proved"):
            return f"claim.guarantee={claim['guarantee']!r} is not a known guarantee."
        if claim["guarantee"] == "dp":
            _check_claim(claim)
        elif claim["epsilon"] is not None:
            return f"it carries an epsilon although its guarantee is {claim['guarantee']!r}."
        if not isinstance(ledger["records"], int) or not isinstance(ledger["head"], str):
            return "its ledger block is malformed."
        # By type: 0 equals False wherever cards are compared, and would remove the banner from the page.
        if any(type(one["holds"]) is not bool and one["holds"] != "unverified" for one in card["assumptions"]):
            return "the holds of one of its assumptions is not true, false or 'unverified'."
        for name in ("sha256", "name"):
            card["subject"][name]
    except DataError as error:
        return str(error)
    except (KeyError, TypeError, AttributeError, LedgerError) as error:
        return f"a field is missing or malformed ({error})."
    return None


def _check_claim(claim: Mapping[str, Any]) -> None:
    epsilon, delta, users = claim["epsilon"], claim["delta"], claim.get("user_level_epsilon")
    if not (is_number(epsilon) and math.isfinite(epsilon) and epsilon >= 0):
        raise DataError(f"claim.epsilon={epsilon!r} is not a finite number of at least 0.")
    if not (is_number(delta) and 0 < delta < 1):
        raise DataError(f"claim.delta={delta!r} is not between 0 and 1.")
    if users is not None and not (is_number(users) and users >= 0):
        raise DataError(f"claim.user_level_epsilon={users!r} is not a number of at least 0.")
    if claim["unit"] not in get_args(Unit) or claim["neighbours"] not in get_args(Neighbours):
        raise DataError(f"claim.unit={claim['unit']!r} with claim.neighbours={claim['neighbours']!r} is unknown.")


def card_path(path: str | Path) -> Path:
    """Return the card's file, given it or its folder."""
    path = Path(path)
    return path / CARD_NAME if path.is_dir() else path


def check_dataset_card(path: Path | None) -> None:
    """Refuse data that do not match their privacy card, file by file."""
    if path is None:
        raise DataError(
            "Synthetic data need their privacy card, and this folder has none. Use the folder that task=synthesize "
            "wrote.",
            trap="T27",
        )
    subject = read_card(path)["subject"]
    if subject["artifact_type"] != "dataset" or not subject["sha256"]:
        raise DataError(
            f"{path} is the card of {subject['artifact_type']} {subject['name']!r}, not of the data set next to it: "
            "its claim does not cover these queries. Use the folder that task=synthesize wrote.",
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


def card_of_data(data: Any, split: str = "train") -> Path | None:
    """Return the privacy card of a split's queries: the DataModule's own, or one next to its files.

    A card next to a separately given corpus is not the card of the queries. Nor is the card of a synthetic set that of
    the real queries in its ``evaluation``.
    """
    if split != "train" and (other := getattr(data, "evaluation", None)) is not None:
        return card_of_data(other, split)
    if (own := getattr(data, "privacy_card_path", None)) is not None:
        return Path(own)
    return next((card for given in query_places(data) if (card := card_beside(given)) is not None), None)


def refuse_another_claim(data: Any, what: str = "a card of this run would state only another one") -> None:
    """Refuse data whose queries have a privacy card, for a new claim; ``what`` completes the message."""
    if (path := card_of_data(data)) is not None:
        raise ConfigurationError(
            f"These data carry a privacy card ({path}): they were derived from private ones with their own epsilon, "
            f"and {what}. Pass the private queries themselves; for training, privacy=synthetic with "
            f"datamodule=synthetic datamodule.folder={path.parent} inherits their claim at no further cost.",
            trap="T27",
        )


def card_beside(given: str | Path) -> Path | None:
    """Return the privacy card of the data set in this folder, or next to this file."""
    # A run's own card, of weights, may be next to a log; it says nothing about the log.
    cards = (card for card in notes_near(given, CARD_NAME) if read_card(card)["subject"]["artifact_type"] == "dataset")
    return next(cards, None)


def check_artefact(folder: Path, card: Mapping[str, Any]) -> None:
    """Refuse a model or data folder that does not match its card, file by file (`described_files`)."""
    if card["subject"]["artifact_type"] == "dataset":
        check_dataset_card(folder / CARD_NAME)
        return
    listed = card["subject"]["sha256"]
    for name in sorted(described_files(folder) | set(listed)):
        there = (folder / name).is_file()
        if not there or name not in listed or file_sha256(folder / name) != listed[name]:
            raise DataError(
                f"{folder / name} is not among the files that {CARD_NAME} describes, or does not match it: the card "
                "describes something else. Use the run's folder, unchanged."
            )


def described_files(folder: Path) -> set[str]:
    """Return the files of a folder that its card has to describe, by their paths in it.

    Those are all files except hidden files, the ledger, the card itself, and what an export adds for readers: its page
    and the cards of its ancestors.
    """
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    begins, known = ("privacy_card.", f"{PROVENANCE}/"), (LEDGER_NAME, README)
    return {name for name in names if not (name.startswith(begins) or name in known or "/." in f"/{name}")}


def card_names(path: Path, card: Mapping[str, Any]) -> set[str]:
    """Return every SHA-256 that other cards may use for this one: its own, and those before amendments."""
    return {card_sha256(path), *(str(note["sha256_before"]) for note in card.get("amendments", []))}


def names_behind(path: Path, card: Mapping[str, Any]) -> set[str]:
    """Return every SHA-256 of this card and its ancestors: the artefacts that its claim covers."""
    return card_names(path, card) | {str(parent["sha256"]) for parent in card["parents"]}


def card_above(folder: Path) -> Path | None:
    """Return a card in a folder above that lists files of ``folder``, which is then part of another artefact."""
    inner = folder.resolve()
    for place in list(inner.parents)[:3]:
        for root in (place, place / "model"):
            if not inner.is_relative_to(root) or not (place / CARD_NAME).is_file():
                continue
            prefix = "" if inner == root else f"{inner.relative_to(root).as_posix()}/"
            if any(name.startswith(prefix) for name in read_card(place)["subject"]["sha256"]):
                return place / CARD_NAME
    return None
