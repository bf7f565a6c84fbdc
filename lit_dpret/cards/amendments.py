"""Amendments of a finished card: audit results, and notes on what its claim does not cover.

A score against private queries does not change the artefact, but no noise covers it, so the card is amended with a
note. Cards of derived artefacts name the earlier version of the card by its SHA-256, so each amendment keeps that
hash. Removing the amendments must restore that file byte for byte; otherwise something else was changed too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lit_dpret.cards.file import CARD_NAME, README, card_sha256, checksum, read_card, text_sha256, write_card
from lit_dpret.cards.text import statement
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.files import write_whole
from lit_dpret.privacy.ledger.chain import today

About = Literal["this model", "other trainings"]

_PRIVACY_HEADING = "\n## Privacy\n"
_ATTACKED = "After the card was made, attacks were run; the privacy card says what they found."


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """One result of an attack, an entry of ``empirical.results``."""

    attack: str  # the attack, in a phrase
    n: int  # the number of canaries, guesses or trainings that were attacked
    metric: str  # the name of the quantity in ``estimate``
    estimate: float | None = None  # the measured value; None where there is only a bound
    ci: tuple[float, float] | None = None  # its confidence interval, at ``confidence``
    eps_lower: float | None = None  # the lower bound on epsilon, at ``delta``; None where the attack gives none
    delta: float | None = None
    confidence: float | None = None  # of the interval and the bound; None for a point value
    method: str | None = None  # the estimator that gave the bound, which holds under ``assumption``
    assumption: str | None = None
    copies: int = 1  # how often each canary occurred in the data
    ceiling: float | None = None  # the largest ``estimate`` that the accounting allows; not a measurement
    about: About = "this model"  # ``this model``, or ``other trainings`` with the same settings
    canaried: bool = True  # whether the model that the card describes was trained on the planted canaries

    def __post_init__(self) -> None:
        numbers = [self.estimate, *(self.ci or ()), self.eps_lower, self.delta, self.confidence, self.ceiling]
        if any(number is not None and not math.isfinite(number) for number in numbers):
            raise ConfigurationError(f"A result of {self.attack!r} holds a number that is not finite: {numbers}.")
        if self.n < 1 or self.copies < 1:
            raise ConfigurationError(
                f"A result of {self.attack!r} has n={self.n}, copies={self.copies}; both start at 1."
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ci": None if self.ci is None else list(self.ci)}


def add_evidence(folder: str | Path, results: Sequence[AttackResult]) -> Path | None:
    """Add results to the card in ``folder``; return its path, or None if the folder has no card.

    A model folder's copy is a separate card: call this for both.
    """
    if not results:
        path = Path(folder) / CARD_NAME
        return path if path.is_file() else None
    return _noted(folder, {"results": [result.to_dict() for result in results]}, _ATTACKED)


def _noted(folder: str | Path, content: Mapping[str, Any], caution: str) -> Path | None:
    path = Path(folder) / CARD_NAME
    if not path.is_file():
        return None
    before, card = card_sha256(path), read_card(path)
    write_card(amended(card, [{"day": today(), "sha256_before": before, **content}]), path.parent)
    _tell_readers(path.parent, before, card_sha256(path), caution)
    return path


def restated(card: dict[str, Any]) -> dict[str, Any]:
    """Return the card with its statement and checksum updated."""
    card["claim"]["statement"] = statement(card)
    card["checksum"] = checksum(card)
    return card


def amended(card: Mapping[str, Any], notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the card with further notes: attack results, or texts, each text at most once."""
    found = copy.deepcopy(dict(card))
    for note in notes:
        if "results" in note:
            found["empirical"]["results"] += note["results"]
            added = dict(note)
        else:
            added = {**note, "added_to": []}
            for name, text in (("not_covered", note["not_covered"]), ("cautions", note["caution"])):
                if text not in found[name]:
                    found[name].append(text)
                    added["added_to"].append(name)
        found["amendments"] = [*found.get("amendments", []), added]
        if "results" in note:
            restated(found)
    found["checksum"] = checksum(found)
    return found


def note_not_covered(folder: str | Path, what: str, *, computed: str) -> Path | None:
    """Note on the card of ``folder`` that its claim does not cover a value computed from private data.

    The note appears under ``not_covered`` and as a caution; equal texts appear once.

    Args:
        folder: The card's folder. Without a card, no claim could be misread, and nothing happens.
        what: What was published and for which artefact, as the subject of a sentence.
        computed: What it was computed from, as the end of a sentence.
    """
    note = {
        "not_covered": f"{what}, computed from {computed}: anyone who sees these numbers learns more than the claim "
        "covers.",
        "caution": f"{what} was computed from {computed} after this card was made. Those numbers are not covered.",
    }
    return _noted(folder, note, note["caution"])


def _tell_readers(folder: Path, before: str, after: str, caution: str) -> None:
    """Write a caution into the card's ``README.md``, which a hub shows, and update the SHA-256 of the card there.

    A page that does not name this card belongs to something else: a run folder may be a project folder.
    """
    page = folder / README
    if not page.is_file() or before not in (text := page.read_text(encoding="utf-8")):
        return
    head, heading, rest = text.replace(before, after).partition(_PRIVACY_HEADING)
    told = "" if caution in rest else f"\n**{caution}**\n"
    write_whole(page, head + (heading or _PRIVACY_HEADING) + told + rest)


def with_notes(card: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """Copy the notes of the card in ``folder`` to the card that will replace it, as on a resume.

    The folder may have been renamed in between, so names are not compared. Attack results are kept only if the files
    are identical.
    """
    path = Path(folder) / CARD_NAME
    if not path.is_file():
        return dict(card)
    try:
        old = read_card(path)
    except DataError:  # it is about to be replaced, and nothing on it can be trusted
        return dict(card)
    if old["subject"]["artifact_type"] != card["subject"]["artifact_type"]:
        return dict(card)
    notes = [note for note in old.get("amendments", []) if note not in card.get("amendments", [])]
    if old["subject"]["sha256"] != card["subject"]["sha256"]:  # the attack results are about other weights
        notes = [note for note in notes if "results" not in note]
    return amended(card, notes) if notes else dict(card)


def versions(card: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the card, then its versions before each amendment, the newest first.

    It ends at the first version whose file does not have the SHA-256 that its amendment recorded.
    """
    current: dict[str, Any] | None = dict(card)
    while current is not None:
        yield current
        current = _before(current)


def names_before_evidence(card: Mapping[str, Any]) -> set[str]:
    """Return the SHA-256 of a card, and of its versions before audit results were added."""
    found = set()
    for version in versions(card):
        found.add(text_sha256(version))
        notes = version.get("amendments")
        if not notes or "results" not in notes[-1]:
            break
    return found


def _before(card: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the card without its last amendment; None if there is none, or if more than its texts was changed."""
    if not card.get("amendments"):
        return None
    found = copy.deepcopy(dict(card))
    last = found["amendments"].pop()
    if not found["amendments"]:
        del found["amendments"]
    if "results" in last:
        results = found["empirical"]["results"]
        found["empirical"]["results"] = results[: max(0, len(results) - len(last["results"]))]
        restated(found)
    else:
        for name in last.get("added_to", ()):
            found[name] = found[name][:-1]
        found["checksum"] = checksum(found)
    return found if text_sha256(found) == last.get("sha256_before") else None
