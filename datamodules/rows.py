"""Row and split: the types that readers, DataModules and modules share.

Everything in a row beyond the passage's text is private, so its ``repr`` shows neither query nor passage.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

#: The values of `lit_dpret.privacy.budget.Unit` that rows of texts can be grouped by.
TextUnit = Literal["query", "pair", "user"]

SPLITS = ("train", "dev", "test")
SPLIT_NAMES = {"train": "train", "dev": "dev", "valid": "dev", "validation": "dev", "test": "test"}


@dataclass(frozen=True, slots=True)
class Row:
    """One training pair."""

    query_id: str  # id of the query; if the data gave none, derived from its position, never from its text
    query: str = field(repr=False)  # the query's text, in the form given to the model
    passage_id: str = field(repr=False)  # id of the passage paired with it in this row
    passage: str = field(repr=False)  # that passage's text (title and text joined)
    # Ids of all passages known to answer this query *inside this row's privacy unit*: the whole query under
    # ``unit="query"``, this row alone under ``unit="pair"``. A loss may mask by them without reading other units' data.
    positives: frozenset[str] = field(repr=False)


def stable_hash(*parts: str) -> bytes:
    """Return the SHA-256 of ``parts``, the same in every process and on every machine.

    The parts are length-prefixed, so ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
