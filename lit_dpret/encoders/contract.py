"""What decides an embedding besides weights and vocabulary, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["query", "passage"]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything besides weights and vocabulary that decides an embedding.

    Args:
        pooling: ``mean``, ``cls`` or ``max``.
        normalise: Whether embeddings are scaled to length 1.
        query_max_length: Tokens of a query that are read, special tokens among them.
        passage_max_length: The same for a passage.
        query_prefix: Put before every query, with its own space at the end.
        passage_prefix: Put before every passage.
        lower_case: Whether texts are lower-cased first, whatever the tokenizer does by itself.
    """

    pooling: str = "mean"
    normalise: bool = True
    query_max_length: int = 512
    passage_max_length: int = 512
    query_prefix: str = ""
    passage_prefix: str = ""
    lower_case: bool = False

    def prefix(self, side: Side) -> str:
        """What is put before a text of this side."""
        return {"query": self.query_prefix, "passage": self.passage_prefix}[side]

    def max_length(self, side: Side) -> int:
        """How many tokens of a text of this side are read."""
        return {"query": self.query_max_length, "passage": self.passage_max_length}[side]
