"""The privacy of an encoder that was not trained here: training leaves traces in folders and in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_dpret.cards.card import read_card
from lit_dpret.cards.file import CARD_NAME, check_artefact
from lit_dpret.cards.start import traces_of_training
from lit_dpret.cards.text import NOT_PROVED, WITHOUT_PRIVACY, privacy_line
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.ledger.trained import runs_behind

PUBLIC = "no private data"
UNKNOWN = "no privacy card: what the encoder was trained on is not known"


def refuse_trained(make: Any, argument: str, knob: str) -> None:
    """Refuse a model factory whose folder shows earlier training: the card of its system would omit the cost.

    A factory that names no folder is checked when its model is trained.
    """
    given = getattr(make, "keywords", {}).get(argument)
    if not isinstance(given, (str, Path)):
        return
    if (trace := next(traces_of_training(given), None)) is not None:
        raise ConfigurationError(
            f"{knob}: {trace[0]} shows that a run trained {given} (privacy={trace[1]}), and the card of this row "
            "would omit that cost. Use a public model, or leave such rows out of task.only.",
            trap="T30",
        )


def privacy_of_encoder(encoder: str | Path | None, model: Any = None) -> str:
    """Return the privacy of a row whose encoder, already built as ``model`` or not, was not trained here."""
    place = None if encoder is None else Path(encoder).expanduser()
    found = set() if encoder is None else {privacy for _, privacy in traces_of_training(encoder)}
    found |= set() if model is None else {run.privacy for run in runs_behind(model)}
    if not found:  # finding no trace of ours does not exclude training by other programs
        return PUBLIC if str(encoder) in ("minilm", "public_t5") else UNKNOWN
    if place is not None and (place / CARD_NAME).is_file():
        card = read_card(place)
        check_artefact(place, card)
        return privacy_line(card)
    # If a card describes more than these weights, it is unknown which claim applies to them.
    return WITHOUT_PRIVACY if found == {"none"} else NOT_PROVED
