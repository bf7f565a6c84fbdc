"""One canary: texts with a gap, a secret that fills it, and the others that could have.

The secret was drawn uniformly from the candidates, by a coin that has nothing to do with training; ranks and
exposure mean nothing otherwise. A canary has no owner: planting it takes nothing from anybody's privacy, but the
model that is trained on it is another model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lit_dpret.datamodules.records import Row

Kind = Literal["digits", "own_passage", "random_passage", "echo", "new_token"]
Side = Literal["query", "passage", "both"]

OWN_ID = "canary:"
"""Passages that a canary brings along have ids that begin like this; they stand in no list of passages."""


@dataclass(frozen=True, kw_only=True)
class Canary:
    """A planted pair.

    Args:
        name: Its own among the canaries of a run; ``kind-side-copies-number`` as the suite makes them.
        kind: What the pair looks like around its secret; `CanarySuite` lists the kinds.
        side: Where the secret stands.
        query: The query without the secret.
        passage_id: Of its passage: one of the data where the passage is theirs and unchanged, else its own.
        passage: The passage without the secret.
        candidates: All secrets that could have been planted.
        secret: The one that was drawn from them.
        copies: How often the pair stands in the training data; each copy is a unit.
        included: Whether it was planted at all, by a coin where the suite tosses one.
    """

    name: str
    kind: Kind
    side: Side
    query: str = field(repr=False)
    passage_id: str = field(repr=False)
    passage: str = field(repr=False)
    candidates: tuple[str, ...] = field(repr=False)
    secret: str = field(repr=False)
    copies: int = 1
    included: bool = True

    def query_with(self, secret: str) -> str:
        """The query as it stands, or would stand, with this secret."""
        return self.query if self.side == "passage" else f"{self.query} {secret}".strip()

    def passage_with(self, secret: str) -> str:
        """The passage with this secret."""
        return self.passage if self.side == "query" else f"{self.passage} {secret}".strip()

    def units(self) -> Iterator[tuple[Row, ...]]:
        """What is trained on: a unit for each copy, without a row where the coin left the canary out."""
        query, passage = self.query_with(self.secret), self.passage_with(self.secret)
        for copy in range(self.copies):
            row = Row(f"{OWN_ID}{self.name}:{copy}", query, self.passage_id, passage, frozenset((self.passage_id,)))
            yield (row,) if self.included else ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, the secret among them."""
        return asdict(self)


@dataclass(frozen=True)
class CanarySet:
    """The canaries of one training, and what they were made from.

    Args:
        canaries: In the order in which they are planted.
        settings: Of the suite, as JSON values.
        nonce: Random, so that the hash that a ledger and a card give of the set lets nobody test a guess at a secret.
    """

    canaries: tuple[Canary, ...]
    settings: dict[str, Any]
    nonce: str = field(repr=False)

    def units(self) -> list[tuple[Row, ...]]:
        """The units of all copies; their number does not depend on coins."""
        return [unit for canary in self.canaries for unit in canary.units()]
