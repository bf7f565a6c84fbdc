"""Evaluations of finished artefacts on queries: the kind of the queries must be declared, and is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from lit_dpret.cards.amendments import note_not_covered
from lit_dpret.cards.file import CARD_NAME, check_dataset_card, read_card
from lit_dpret.cards.lineage import training_behind
from lit_dpret.cards.start import model_folder
from lit_dpret.errors import ConfigurationError
from lit_dpret.report.page import INTERNAL, render, write_short
from lit_dpret.tasks.parts import Parts, say

Whose = Literal["public", "synthetic", "private"]

Owner = Literal["public", "private"]
"""The owner of the attacked texts, where synthetic texts are not a separate case."""

DECLARED = (
    "The {what} are declared public (task.whose=public), and nothing checks that: if they are not, this page is as "
    "private as they are."
)

NO_CARD = "there is no privacy card to say so"


def require_owner(whose: Owner | None, why: str) -> None:
    """Refuse to start without ``task.whose``."""
    if whose not in get_args(Owner):
        raise ConfigurationError(f"task.whose={whose}: {why}, so declare their kind: public or private.")


def model_of(source: str | Path) -> str | Path:
    """Return the model folder of a run or model; a name, such as ``minilm``, is returned unchanged."""
    return model_folder(source) if Path(source).is_dir() else source


def tell_attack(parts: Parts, name: str, title: str, facts: dict[str, Any], *, of: str) -> Path:
    """Write the report of an attack from the template ``NAME.md``, and print it; return the path of its JSON.

    If ``facts["internal"]``, only the owner can read it, as ``internal_NAME``; ``of`` names the attacked texts.
    """
    facts["command"] = parts.command
    internal = INTERNAL.format(what=of) if facts["internal"] else ""
    lines = [*([] if internal else [DECLARED.format(what=of), ""]), *render(f"{name}.md", facts).splitlines()]
    written = write_short(parts.run_dir, name, title, facts, lines, internal=internal)
    say(*written.lines)
    return written.files[0]


def check_declared(whose: Whose | None, card_entry: bool, *, knob: str, measured: str) -> Whose:
    """Refuse undeclared queries, or private ones without consent to the consequences."""
    if whose is None or whose not in get_args(Whose):
        raise ConfigurationError(
            f"{knob}={whose}: {measured} is a statement about queries, so declare their kind: {knob}=public, synthetic "
            "or private. Private ones also need task.card_entry=true."
        )
    if whose == "private" and not card_entry:
        raise ConfigurationError(
            f"{knob}=private: {measured} of private queries is published without noise, and no guarantee covers it. "
            "Set task.card_entry=true to compute it and mark it on the card as not covered; or compare with public "
            "queries."
        )
    if card_entry and whose != "private":
        raise ConfigurationError(f"task.card_entry=true is for {knob}=private; with {knob}={whose} nothing leaks.")
    return whose


def refuse_training_data(data: Any, folder: str | Path | None, *, knob: str) -> None:
    """Refuse queries declared public that ``folder`` was privately trained on, as far as `training_behind` can tell."""
    if folder is None or not Path(folder).is_dir():
        return
    if (found := training_behind(Path(folder), data)) is not None:
        run, _ = found
        raise ConfigurationError(
            f"{knob}=public, but this is the data set that {run} was trained on privately, according "
            f"to its ledger, and its other splits come from the same log. Set {knob}=private, or use a data set "
            "of public queries only."
        )


def declare(folder: Path | None, whose: Whose | None, *, measured: str, where: str) -> str | None:
    """Note on the card that numbers from private queries follow; return the text to show with them, or None."""
    if whose != "private":
        return None
    marked = NO_CARD
    places = [] if folder is None else [folder, *_copies(folder)]
    for place in dict.fromkeys(places):
        card = note_not_covered(place, f"{measured} of {places[0].resolve().name}", computed="private queries")
        marked = marked if card is None else f"{card.name} says so"
    return (
        f"These numbers were computed from private queries. No guarantee covers them ({marked}): keep {where} private."
    )


def _copies(folder: Path) -> list[Path]:
    """Find copies of the card of ``folder``: a run keeps one with its model, and a model one in its parent folder."""
    found = [model_folder(folder)]
    above = folder.resolve().parent
    if (folder / CARD_NAME).is_file() and (above / CARD_NAME).is_file():
        own, other = (read_card(place)["subject"] for place in (folder, above))
        if own == other:
            found.append(above)
    return found


def check_synthetic(data: Any, split: str) -> None:
    """Refuse a ``split`` declared synthetic that does not match a privacy card."""
    if not hasattr(data, "privacy_card_path"):
        raise ConfigurationError(
            f"Declared synthetic, but {type(data).__name__} reads data without a privacy card. Use "
            "datamodule=synthetic, or declare the kind of the queries."
        )
    if split != "train" and getattr(data, "evaluation", None) is not None:
        raise ConfigurationError(
            f"Declared synthetic, but the {split} queries of {type(data).__name__} come from its evaluation, which "
            "holds real ones. Use the split train, or declare the kind of the queries."
        )
    check_dataset_card(data.privacy_card_path)
