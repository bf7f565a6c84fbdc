"""Finding the cards and ledgers that a card names. A card holds hashes and no paths, so they are looked for.

Where a run or a pipeline leaves them: beside the card, in the folders around it, and in whatever folder
the user names. What is found is what has the SHA-256 that was asked for; where it lay proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.file import CARD_NAME, card_sha256, read_card
from lit_dpret.cards.history import text_sha256, versions
from lit_dpret.errors import DataError

LEVELS = 3
"""How many folders up a search starts (the card's own is the first), and how deep it goes from each."""

_MOST_FOLDERS = 5000


@dataclass(frozen=True)
class FoundCard:
    """A card on the disk.

    Args:
        path: Its file.
        card: What stands in it now.
        named: What stood in it when it was named, if it was amended since.
    """

    path: Path
    card: dict[str, Any]
    named: dict[str, Any] | None = None


class Lineage:
    """The cards and ledgers within reach of some cards.

    Args:
        folders: Where to look first, to any depth; files are taken as they are.

    Attributes:
        damaged: Files that were met on the way and are no cards, or were edited.

    Raises:
        DataError: One of them does not exist.
    """

    def __init__(self, folders: Iterable[str | Path] = ()) -> None:
        self._given = [Path(folder).expanduser() for folder in folders]
        for folder in self._given:
            if not folder.exists():
                raise DataError(f"task.parents: {folder} does not exist.")
        self.damaged: list[Path] = []
        self._near: list[Path] = []
        self._cards: dict[Path, dict[str, FoundCard]] = {}

    def look_near(self, card: Path) -> None:
        """Look around this card too from now on."""
        folder = card.resolve().parent
        for _ in range(LEVELS):
            if folder not in self._near and folder not in (folder.parent, Path.home()):
                self._near.append(folder)
            folder = folder.parent

    def card(self, sha256: str) -> FoundCard | None:
        """The card with this SHA-256, now or before it was amended; None where it is not within reach."""
        for path in self._files(CARD_NAME):
            if (found := self._read(path).get(sha256)) is not None:
                return found
        return None

    def ledger(self, card: Mapping[str, Any], beside: Path) -> Path | None:
        """The ledger that a card names: one that holds its head, else one of its name where a run leaves it.

        Args:
            card: The card.
            beside: The card's file.
        """
        ledger = card["ledger"]
        name, head = Path(str(ledger["name"])).name, str(ledger["head"]).encode()
        usual = [folder / name for folder in (beside.parent, beside.resolve().parent.parent)]
        for path in (*usual, *self._files(name)):
            try:
                if head in path.read_bytes():
                    return path
            except OSError:
                continue
        if card["mechanism"].get("kind") == "post_processing":  # a ledger beside it is its own run's, not its parent's
            return None
        return next((path for path in usual if path.is_file()), None)

    def _read(self, path: Path) -> dict[str, FoundCard]:
        """A card by its SHA-256, and by those that it had before it was amended; nothing if it is damaged."""
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
                if path not in seen:
                    seen.add(path)
                    yield path


def _below(folder: Path, name: str, *, depth: int | None) -> Iterator[Path]:
    """Files of this name, down to ``depth`` folders; hidden folders and links to folders are passed over."""
    for visited, (place, inner, files) in enumerate(os.walk(folder)):
        if name in files:
            yield Path(place) / name
        level = len(Path(place).relative_to(folder).parts)
        deep = depth is not None and (level >= depth or visited > _MOST_FOLDERS)
        inner[:] = [] if deep else sorted(one for one in inner if not one.startswith("."))
