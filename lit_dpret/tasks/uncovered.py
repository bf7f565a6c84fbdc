"""Evaluations of finished artefacts on queries: the kind of the queries must be declared, and is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from lit_dpret.cards.amendments import note_not_covered
from lit_dpret.cards.file import CARD_NAME, check_dataset_card, read_card
from lit_dpret.cards.lineage import Lineage
from lit_dpret.cards.start import model_folder
from lit_dpret.errors import ConfigurationError, LedgerError
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger
from lit_dpret.privacy.noise import KeyedStream, default_secret_file, load_secret, published_secret
from lit_dpret.report.page import INTERNAL, render, write_short
from lit_dpret.tasks.parts import Parts, say

_ROUNDS = "seed*/*/silos/*/*/attempt-*"
"""Where a run of silos in one process keeps the ledgers of their rounds, beside the encoder that it saves."""

Whose = Literal["public", "synthetic", "private"]

Owner = Literal["public", "private"]
"""Whose texts an attack is on, where synthetic ones are not a case of their own."""

DECLARED = (
    "That the {what} are public is declared (task.whose=public), and nothing checks it: if they are not, this page is "
    "as private as they are."
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
    """Write the report of an attack from the template ``NAME.md``, and print it; return its JSON.

    Where ``facts["internal"]`` it is ``internal_NAME``, for the owner of ``of``, the attacked texts, alone.
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
            f"{knob}=private: {measured} of private queries is let out without noise, and no guarantee covers it. "
            "Set task.card_entry=true to have it computed and written on the card as not covered; or compare with "
            "public queries."
        )
    if card_entry and whose != "private":
        raise ConfigurationError(f"task.card_entry=true is for {knob}=private; with {knob}={whose} nothing leaks.")
    return whose


def refuse_training_data(data: Any, folder: str | Path | None, *, knob: str) -> None:
    """Refuse queries declared public that are an artefact's private training queries, if detectable.

    It is seen where the ledger of the training lies with the artefact or beside it, or near it and is the one that the
    artefact's card names, also through other cards, or is that of a silo whose federation saved the artefact; where the
    secret that keys its fingerprint of the data is in the default place, and
    the datamodule groups its rows as it did then. Anything else is taken on trust.

    Args:
        data: The datamodule, set up.
        folder: The artefact that is measured; None, or a name that is not a folder, where there is none.
        knob: The setting that declares the queries public.

    Raises:
        ConfigurationError: They are that training's own data.
    """
    if folder is None or not Path(folder).is_dir() or not hasattr(data, "data_fingerprint"):
        return
    inside = Path(folder).resolve()
    beside = [path for place in ("*", _ROUNDS) for path in sorted(inside.parent.glob(f"{place}/{LEDGER_NAME}"))]
    places = (inside, inside.parent)
    for path in dict.fromkeys([*(place / LEDGER_NAME for place in places), *beside, *_named_by_cards(places)]):
        plans = [r for r in _records(path) if r.get("kind") == "plan" and r.get("mode") not in ("none", "synthetic")]
        if any(_is_data_of(plan, data) for plan in plans):
            raise ConfigurationError(
                f"{knob}=public, but this is the data set that {path.parent.name} was trained on privately, according "
                f"to its ledger, and its other splits are of the same log. Set {knob}=private, or use a data set that "
                "holds public queries alone."
            )


def _named_by_cards(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the ledgers that the cards in ``folders`` name: of a derived artefact, the one that its claim is about."""
    for card in (folder / CARD_NAME for folder in folders):
        if card.is_file() and (facts := read_card(card))["ledger"]:
            lineage = Lineage()
            lineage.look_near(card)
            if (found := lineage.ledger(facts, card)) is not None:
                yield found


def _records(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        return PrivacyLedger.read(path).records if path.is_file() else []
    except LedgerError:  # it may be another run's, and is nobody's claim here
        return []


def _is_data_of(plan: Mapping[str, Any], data: Any) -> bool:
    place, seed = default_secret_file(), plan.get("noise_seed")
    if "data_fingerprint" not in plan or (seed is None and not place.expanduser().exists()):
        return False
    try:
        secret = load_secret(None) if seed is None else published_secret(int(seed))
    except ConfigurationError:  # no secret that a run would take either
        return False
    stream = KeyedStream(secret, str(plan["run_id"]), secure_rng=bool(plan.get("secure_rng")))
    if stream.tag("secret") != plan.get("secret_tag"):
        return False
    found = data.data_fingerprint(bytes.fromhex(stream.tag("data-fingerprint")))
    return found in (plan["data_fingerprint"], plan.get("unplanted_fingerprint"))


def declare(folder: Path | None, whose: Whose | None, *, measured: str, where: str) -> str | None:
    """Write on the card in ``folder`` that numbers about private queries will be computed.

    Returns:
        What to say beside the numbers; None where the queries are not private.
    """
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
    """Find copies of the card of ``folder``: a run keeps one with its model, and a model one above."""
    found = [model_folder(folder)]
    above = folder.resolve().parent
    if (folder / CARD_NAME).is_file() and (above / CARD_NAME).is_file():
        own, other = (read_card(place)["subject"] for place in (folder, above))
        if own == other:
            found.append(above)
    return found


def check_synthetic(data: Any, split: str) -> None:
    """Refuse a ``split`` declared synthetic that does not match a privacy card.

    Raises:
        ConfigurationError: It has no such card, or the split holds the real queries of its ``evaluation``.
        DataError: The card does not describe the files.
    """
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
