"""Recognise the private training data behind an artefact, by the fingerprints in the ledgers near it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.cards.file import CARD_NAME, read_card
from lit_dpret.cards.lineage import Lineage
from lit_dpret.errors import ConfigurationError, LedgerError
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger
from lit_dpret.privacy.noise import KeyedStream, default_secret_file, load_secret, published_secret

_ROUNDS = "seed*/*/silos/*/*/attempt-*"
"""Where a run of silos in one process keeps the ledgers of their rounds, beside the encoder that it saves."""


def training_behind(folder: Path, data: Any) -> str | None:
    """Return the name of a private training behind an artefact whose data set this is; None if none is recognised.

    It is recognised where the ledger of the training lies with the artefact or beside it, or near it and is the one
    that the artefact's card names, also through other cards, or is that of a silo whose federation saved the artefact;
    where the secret that keys its fingerprint of the data is in the default place, and ``data``, a datamodule after its
    set-up, groups its rows as it did then.
    """
    if not hasattr(data, "data_fingerprint"):
        return None
    inside = folder.resolve()
    beside = [path for place in ("*", _ROUNDS) for path in sorted(inside.parent.glob(f"{place}/{LEDGER_NAME}"))]
    places = (inside, inside.parent)
    for path in dict.fromkeys([*(place / LEDGER_NAME for place in places), *beside, *_named_by_cards(places)]):
        plans = [r for r in _records(path) if r.get("kind") == "plan" and r.get("mode") not in ("none", "synthetic")]
        if any(_is_data_of(plan, data) for plan in plans):
            return path.parent.name
    return None


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
