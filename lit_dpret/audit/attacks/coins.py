"""Decide by a fair coin for each query whether it is trained on, so that members and others have one distribution.

Others from another split may differ in more than membership. The coins (``task=fit task.membership_coins=true``) come
from the operating system and do not depend on the data: removing one query changes no other query's coin. Anyone with
the file knows which queries were trained on, so only its owner can read it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lit_dpret.errors import DataError
from lit_dpret.files import read_json, write_whole

COINS_NAME = "membership_coins.json"
SCHEMA = "lit-dpret/membership-coins/1"


@dataclass(frozen=True, repr=False)
class Coins:
    """The queries that were trained on, by id."""

    heads: Mapping[str, bool]

    def __repr__(self) -> str:
        return f"Coins({len(self.heads)} queries)"

    @classmethod
    def toss(cls, query_ids: Iterable[str]) -> Coins:
        """Toss a fair coin for each query, from the operating system."""
        heads = {query: bool(secrets.randbits(1)) for query in query_ids}
        if len(set(heads.values())) < 2:
            raise DataError(f"{len(heads)} queries are too few to hold some of them out by coins. Give more queries.")
        return cls(heads)

    @property
    def trained_on(self) -> frozenset[str]:
        return frozenset(query for query, head in self.heads.items() if head)

    def write(self, folder: Path) -> Path:
        """Write ``membership_coins.json``, readable only by its owner; raise `StorageError` on failure."""
        return write_whole(
            folder / COINS_NAME, json.dumps({"schema": SCHEMA, "heads": dict(self.heads)}) + "\n", owner_only=True
        )

    @classmethod
    def read(cls, folder: Path) -> Coins:
        path = folder / COINS_NAME
        facts = read_json(path, SCHEMA)
        heads = facts.get("heads")
        if not isinstance(heads, dict) or not heads or not all(isinstance(head, bool) for head in heads.values()):
            raise DataError(f"{path} does not state for each query whether it was trained on. Restore the file.")
        return cls(heads)
