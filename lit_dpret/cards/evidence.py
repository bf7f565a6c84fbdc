"""What audits found, on the card of the artefact that they looked at: beside the claim, never a part of it.

A result may stand on a card, which is released, only where it is post-processing of what is released anyway: computed
from the model and from planted or public data. One that was computed from private rows (scores of real queries, say)
stays in a file of its own, or costs a note (`lit_dpret.cards.notes`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lit_dpret.cards.file import CARD_NAME, card_sha256, checksum, read_card, write_card
from lit_dpret.cards.text import statement
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.ledger.chain import today

About = Literal["this model", "other trainings"]


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """One result of an attack, as it stands in ``empirical.results``.

    Args:
        attack: What was tried, in a phrase.
        n: How many canaries, guesses or trainings it was tried on.
        metric: What ``estimate`` is.
        estimate: The measured value; None where there is a bound alone.
        ci: Its confidence interval, at ``confidence``.
        eps_lower: The lower bound on epsilon; None where the attack gives none.
        delta: That goes with the bound.
        confidence: Of the interval and the bound; None for a point value.
        method: Which estimator gave the bound.
        assumption: What must hold for it.
        copies: How often each canary stood in the data.
        ceiling: What ``estimate`` cannot exceed by the accounting; it is no measurement.
        about: ``this model``, or ``other trainings`` with the same settings.
        canaried: Whether the model that the card is about was trained on the planted canaries.

    Raises:
        ConfigurationError: A number is not finite, or a field is out of its range.
    """

    attack: str
    n: int
    metric: str
    estimate: float | None = None
    ci: tuple[float, float] | None = None
    eps_lower: float | None = None
    delta: float | None = None
    confidence: float | None = None
    method: str | None = None
    assumption: str | None = None
    copies: int = 1
    ceiling: float | None = None
    about: About = "this model"
    canaried: bool = True

    def __post_init__(self) -> None:
        numbers = [self.estimate, *(self.ci or ()), self.eps_lower, self.delta, self.confidence, self.ceiling]
        if any(number is not None and not math.isfinite(number) for number in numbers):
            raise ConfigurationError(f"A result of {self.attack!r} holds a number that is not finite: {numbers}.")
        if self.about not in get_args(About):
            raise ConfigurationError(f"about={self.about!r} is not one of {', '.join(get_args(About))}.")
        if self.n < 1 or self.copies < 1:
            raise ConfigurationError(f"A result of {self.attack!r} needs n={self.n} and copies={self.copies} from 1.")
        if self.eps_lower is not None and self.eps_lower < 0:
            raise ConfigurationError(f"eps_lower={self.eps_lower} must not be negative.")

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON values."""
        facts = asdict(self)
        return facts | {"ci": None if self.ci is None else list(self.ci)}


def with_evidence(card: Mapping[str, Any], results: Sequence[AttackResult]) -> dict[str, Any]:
    """A card about to be written, with these results among its empirical ones.

    Guarantees:
        - The claim's numbers, the assumptions and the ceilings are as they were.
    """
    changed = copy.deepcopy(dict(card))
    changed["empirical"]["results"] += [result.to_dict() for result in results]
    return _restated(changed)


def add_evidence(folder: str | Path, results: Sequence[AttackResult]) -> Path | None:
    """Add results to the card that lies in ``folder``.

    Guarantees:
        - Nothing else of the card changes but the sentence of its statement that says whether attacks were run.
        - The SHA-256 of the card before is kept in ``amendments``, so that cards derived from it are still
          traced to it.

    Args:
        folder: Of the card. A model folder's copy is a card of its own: call this for both.
        results: What was found; nothing is written where there is none.

    Returns:
        The card, or None where the folder has none.

    Raises:
        DataError: The card is malformed or was edited by hand.
        StorageError: It cannot be written.
    """
    path = Path(folder) / CARD_NAME
    if not path.is_file():
        return None
    if not results:
        return path
    card = copy.deepcopy(read_card(path))
    note = {
        "day": today(),
        "sha256_before": card_sha256(path),
        "results": [result.to_dict() for result in results],
    }
    return write_card(amended(card, note), path.parent)


def amended(card: dict[str, Any], note: Mapping[str, Any]) -> dict[str, Any]:
    """The card with the results of a note, and the note."""
    card["empirical"]["results"] = [*card["empirical"]["results"], *note["results"]]
    card["amendments"] = [*card.get("amendments", []), dict(note)]
    return _restated(card)


def before_note(card: Mapping[str, Any]) -> dict[str, Any]:
    """What `amended` was given, if the card's last amendment is a note of results."""
    found = copy.deepcopy(dict(card))
    *kept, last = found["amendments"]
    results = found["empirical"]["results"]
    found["empirical"]["results"] = results[: max(0, len(results) - len(last["results"]))]
    found["amendments"] = kept
    if not kept:
        del found["amendments"]
    return _restated(found)


def planted_by(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The canaries that stood in the training data, by the last plan of a run's ledger; None where there were none."""
    plans = [record for record in records if record.get("kind") == "plan"]
    return dict(plans[-1]["planted"]) if plans and plans[-1].get("planted") else None


def _restated(card: dict[str, Any]) -> dict[str, Any]:
    card["claim"]["statement"] = statement(card)
    card["checksum"] = checksum(card)
    return card
