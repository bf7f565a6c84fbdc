"""Find the cards and ledgers that a card names, and compare a derived card with its parent's.

A card holds hashes but no paths, so its files are searched for next to the card, in the folders around it, and where
the user says. A file counts as found if it has the SHA-256 that was asked for; its location proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from lit_dpret.cards.amendments import versions
from lit_dpret.cards.check import TOLERANCE
from lit_dpret.cards.file import CARD_NAME, card_sha256, read_card, text_sha256
from lit_dpret.cards.text import charges_every_unit
from lit_dpret.cards.tuning import hides_earlier_tuning
from lit_dpret.errors import ConfigurationError, DataError, LedgerError, LitDpretError
from lit_dpret.files import write_whole
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.ledger.judgement import claimed_releases, every_unit_in_every_step
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, plans_of

LEVELS = 3
"""How many folders up a search starts, counting the card's own, and how many levels down it goes from each."""

_MOST_FOLDERS = 5000


@dataclass(frozen=True)
class FoundCard:
    """A card on disk: its current content, and the version that was ``named`` if it was amended since."""

    path: Path
    card: dict[str, Any]
    named: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return str(self.card["subject"]["name"])


class Lineage:
    """The cards and ledgers near given cards, and in ``folders``, which are searched first and to any depth.

    ``within`` limits the search near cards to one folder. ``damaged`` lists the files found that are not valid cards
    or were edited.
    """

    def __init__(self, folders: Iterable[str | Path] = (), *, within: Path | None = None) -> None:
        self._within = None if within is None else within.resolve()
        self._given = [Path(folder).expanduser() for folder in folders]
        for folder in self._given:
            if not folder.exists():
                raise DataError(f"task.parents: {folder} does not exist.")
        self.damaged: list[Path] = []
        self._near: list[Path] = []
        self._cards: dict[Path, dict[str, FoundCard]] = {}
        self.read = cache(PrivacyLedger.read)  # several checks of one card read its ledger

    def look_near(self, card: Path) -> None:
        """Also search around this card from now on."""
        folder = card.resolve().parent
        for _ in range(LEVELS):
            if folder not in self._near and folder not in (folder.parent, Path.home()) and self._may_look(folder):
                self._near.append(folder)
            folder = folder.parent

    def _may_look(self, place: Path) -> bool:
        return self._within is None or place.resolve().is_relative_to(self._within)

    def card(self, sha256: str) -> FoundCard | None:
        """Return the card that has or had (before an amendment) this SHA-256; None if it is not found."""
        for path in self._files(CARD_NAME):
            if (found := self._read(path).get(sha256)) is not None:
                return found
        return None

    def ledger(self, card: Mapping[str, Any], beside: Path) -> Path | None:
        """Return the ledger that a card names: one that contains its head, or one at a run's usual path."""
        ledger = card["ledger"]
        name = Path(str(ledger["name"])).name
        head = f'"hash":"{ledger["head"]}"'.encode()  # as in a record; a run that started there also names this head
        places = (beside.parent, beside.resolve().parent.parent)
        usual = [path for folder in places if self._may_look(path := folder / name)]
        for path in chain(usual, self._files(name)):  # lazy: folders are walked only as far as needed
            try:
                if head in path.read_bytes():
                    return path
            except OSError:
                continue
        if card["mechanism"].get("kind") == "post_processing":  # a ledger next to it is its own run's, not its parent's
            return None
        return next((path for path in usual if path.is_file()), None)

    def _read(self, path: Path) -> dict[str, FoundCard]:
        """Return a card by its SHA-256 and by those before its amendments; empty if the card is damaged."""
        if path not in self._cards:
            try:
                card, *before = versions(read_card(path))
                found = {card_sha256(path): FoundCard(path, card)}
                found |= {text_sha256(one): FoundCard(path, card, named=one) for one in before}
            except DataError:
                self.damaged.append(path)
                found = {}
            self._cards[path] = found
        return self._cards[path]

    def _files(self, name: str) -> Iterator[Path]:
        seen: set[Path] = set()
        for folder in self._given:
            if folder.is_file() and folder.suffix != Path(name).suffix:
                continue
            for path in [folder] if folder.is_file() else _below(folder, name, depth=None):
                if path not in seen:
                    seen.add(path)
                    yield path
        for folder in self._near:
            for path in _below(folder, name, depth=LEVELS):
                if path not in seen and self._may_look(path):
                    seen.add(path)
                    yield path


def _below(folder: Path, name: str, *, depth: int | None) -> Iterator[Path]:
    """Yield files of this name, down to ``depth`` levels; skip hidden folders and links to folders."""
    for visited, (place, inner, files) in enumerate(os.walk(folder)):
        if name in files:
            yield Path(place) / name
        level = len(Path(place).relative_to(folder).parts)
        deep = depth is not None and (level >= depth or visited > _MOST_FOLDERS)
        inner[:] = [] if deep else sorted(one for one in inner if not one.startswith("."))


def copy_lineage(card: Path, folder: Path, near: Path | None = None) -> None:
    """Copy the files needed to verify ``card``: its ancestors' cards, and the ledger of epsilon.

    Each ancestor gets a numbered folder. The search starts around ``near``, by default the card itself.
    """
    lineage = Lineage()
    for number, met in _ancestors(lineage, read_card(card), near or card):
        into = folder / str(number)
        write_whole(into / CARD_NAME, met.path.read_bytes())
        derived = met.card["mechanism"].get("kind") == "post_processing"
        if not derived and (ledger := lineage.ledger(met.card, met.path)) is not None:
            write_whole(into / ledger.name, ledger.read_bytes())


def refuse_told_failures(card: Path, what: str, alone: str) -> None:
    """Refuse to hand on a card if it, or an ancestor's, says that a failure over private rows interrupted its run.

    Card and ledger reveal that failure, which no noise covers. ``what`` names the artefact, with its setting;
    ``alone`` names what may be handed on without a card.
    """
    own = FoundCard(card, read_card(card))
    told = [
        met.path.parent
        for met in [own, *(met for _, met in _ancestors(Lineage(), own.card, card))]
        if any(one["holds"] is False and one["consequence"] == "weights_alone" for one in met.card["assumptions"])
    ]
    if told:
        raise DataError(
            f"{what}: a failure over private rows interrupted the run in {told[-1]}. Its ledger and the cards after it "
            "reveal that, which no noise covers, so they must not be handed on, and an export would include them. "
            f"Hand on {alone} without card, ledger and README, or repeat the run in another folder and use that."
        )


def _ancestors(lineage: Lineage, card: Mapping[str, Any], place: Path) -> Iterator[tuple[int, FoundCard]]:
    for number, parent in enumerate(card["parents"], start=1):
        lineage.look_near(place)
        if (met := lineage.card(str(parent["sha256"]))) is not None:
            place = met.path
            yield number, met


_OWN_WORDS = ("output_released", "statement")
_PASSED_ON = ("accounting", "pretraining", "randomness", "ledger")
_ATTACKS = {"pre_registered": "pre-registered protocols", "ceilings": "ceilings of attacks", "planted": "canaries"}
_TUNING = "It leaves out how the settings of its parent were chosen."


def link_problems(
    child: Mapping[str, Any], parent: Mapping[str, Any], ancestors: Sequence[Mapping[str, Any]], ledger: Path | None
) -> list[str]:
    """Return the errors of a card, given its nearest parent's card and the other cards that it names.

    Without the parent's ``ledger``, the cost of the start is not compared.
    """
    problems = []
    if list(ancestors) != parent["parents"]:
        problems.append("The cards that it names after its parent are not those that its parent names.")
    if child["mechanism"].get("kind") == "post_processing":
        return problems + _better_than_parent(child, parent)
    if hides_earlier_tuning(child["tuning"], parent["tuning"], composed=True):
        problems.append(_TUNING)
    return problems + ([] if ledger is None else _other_start(child, parent, ledger))


def passed_on(child: Mapping[str, Any], parent: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Return the entries of a derived card that `link_problems` compares with its parent's."""
    if child["claim"]["guarantee"] != "dp":
        return {("claim", "guarantee"), ("parents",)}
    lists = {
        (name, str(index))
        for name in ("assumptions", "not_covered")
        for index, entry in enumerate(child[name])
        if entry in parent[name]
    }
    return (
        {("claim", name) for name in child["claim"] if name not in _OWN_WORDS}
        | {(name,) for name in (*_PASSED_ON, "parents")}
        | {("empirical", name) for name in _ATTACKS}
        | lists
    )


def _better_than_parent(child: Mapping[str, Any], parent: Mapping[str, Any]) -> list[str]:
    ours, theirs = child["claim"], parent["claim"]
    if ours["guarantee"] != "dp":  # it claims nothing, which is never too much
        return [] if ours["guarantee"] == theirs["guarantee"] or theirs["guarantee"] == "dp" else [
            f"It says that the guarantee is {ours['guarantee']!r}, its parent {theirs['guarantee']!r}."
        ]  # fmt: skip
    names = [name for name in {**ours, **theirs} if name not in _OWN_WORDS and ours.get(name) != theirs.get(name)]
    problems = [f"It says {name} = {ours.get(name)!r}, its parent {theirs.get(name)!r}." for name in names]
    if any(one not in child["assumptions"] for one in parent["assumptions"]):
        problems.append("It leaves out assumptions of its parent.")
    if any(one["holds"] is False and one not in parent["assumptions"] for one in child["assumptions"]):
        problems.append("One of its own assumptions does not hold, so it cannot claim what its parent claims.")
    if any(text not in child["not_covered"] for text in parent["not_covered"]):
        problems.append("It leaves out what its parent does not cover.")
    if hides_earlier_tuning(child["tuning"], parent["tuning"], composed=False):
        problems.append(_TUNING)
    for name in _PASSED_ON:
        if child[name] != parent[name]:
            problems.append(f"Its {name} block is not its parent's.")
    for name, what in _ATTACKS.items():
        if (child["empirical"].get(name) or None) != (parent["empirical"].get(name) or None):
            problems.append(f"Its {what} are not its parent's.")
    return problems


def _other_start(child: Mapping[str, Any], parent: Mapping[str, Any], ledger: Path) -> list[str]:
    stated = ((child["accounting"] or {}).get("init_from") or {}).get("epsilon_of_start")
    if stated is None:
        return []
    claim, accounting = child["claim"], child["accounting"]
    try:
        releases = claimed_releases(PrivacyLedger.read(ledger).records)
        if charges_every_unit(parent):
            releases = every_unit_in_every_step(releases)
        fresh = epsilon(
            releases, delta=claim["delta"], neighbours=claim["neighbours"], accountant=accounting["accountant"]
        )
    except LitDpretError as error:
        return [f"The cost of its start cannot be recomputed from the ledger of that run: {error}"]
    if abs(stated - fresh) <= TOLERANCE * max(1.0, fresh):
        return []
    return [f"It says that its start cost epsilon = {stated:.6g}, but the ledger of that run gives {fresh:.6g}."]


_ROUNDS = "seed*/*/silos/*/*/attempt-*"
"""Where silos simulated in one process keep the ledgers of their rounds, next to the encoder that the run saves."""


def training_behind(folder: Path, data: Any) -> tuple[str, str] | None:
    """Return name and unit of the private training on ``data`` behind an artefact; None if none is recognised.

    The training is recognised only if all of these hold:
        - Its ledger is in the artefact's folder or next to it, is named by the artefact's card (directly or through
          other cards) and near it, or belongs to a silo whose federation saved the artefact.
        - The secret that keys its fingerprint of the data is in the default place.
        - ``data``, a datamodule after its set-up, groups its rows as it did then.
    """
    if not hasattr(data, "data_fingerprint"):
        return None
    inside = folder.resolve()
    beside = [path for place in ("*", _ROUNDS) for path in sorted(inside.parent.glob(f"{place}/{LEDGER_NAME}"))]
    places = (inside, inside.parent)
    for path in dict.fromkeys([*(place / LEDGER_NAME for place in places), *beside, *_named_by_cards(places)]):
        plans = [plan for plan in plans_of(_records(path)) if plan["mode"] not in ("none", "synthetic")]
        if (plan := next((plan for plan in plans if _is_data_of(plan, data)), None)) is not None:
            return path.parent.name, str(plan["plan"]["budget"]["unit"])
    return None


def _named_by_cards(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the ledgers that the cards in ``folders`` name; for a derived artefact, the ledger of its claim."""
    for card in (folder / CARD_NAME for folder in folders):
        if card.is_file() and (facts := read_card(card))["ledger"]:
            lineage = Lineage()
            lineage.look_near(card)
            if (found := lineage.ledger(facts, card)) is not None:
                yield found


def _records(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        return PrivacyLedger.read(path).records if path.is_file() else []
    except LedgerError:  # it may be another run's, and no claim rests on it here
        return []


def _is_data_of(plan: Mapping[str, Any], data: Any) -> bool:
    # Imported here because it needs torch, and verification imports this file.
    from lit_dpret.privacy.noise import KeyedStream, default_secret_file, load_secret, published_secret

    place, seed = default_secret_file(), plan.get("noise_seed")
    if "data_fingerprint" not in plan or (seed is None and not place.expanduser().exists()):
        return False
    try:
        secret = load_secret(None) if seed is None else published_secret(int(seed))
    except ConfigurationError:  # a run would not accept this secret either
        return False
    stream = KeyedStream(secret, str(plan["run_id"]), secure_rng=bool(plan.get("secure_rng")))
    if stream.tag("secret") != plan.get("secret_tag"):
        return False
    found = data.data_fingerprint(bytes.fromhex(stream.tag("data-fingerprint")))
    return found in (plan["data_fingerprint"], plan.get("unplanted_fingerprint"))
