"""The contract of an encoder: what determines an embedding besides weights and vocabulary; and pooling.

In pooling, the mask says which positions hold a token. Values at other positions never affect the result, not even a
NaN. A text without any token becomes the zero vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_dpret.settings import require_choice

Side = Literal["query", "passage"]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything besides weights and vocabulary that determines an embedding."""

    pooling: str = "mean"  # ``mean``, ``cls`` or ``max``
    normalise: bool = True  # whether embeddings are scaled to length 1
    query_max_length: int = 512  # maximal number of tokens of a query, special tokens included
    passage_max_length: int = 512  # maximal number of tokens of a passage
    query_prefix: str = ""  # put before every query; it includes any space at its end
    passage_prefix: str = ""  # put before every passage
    lower_case: bool = False  # whether texts are lower-cased first, in addition to what the tokenizer does

    def prefix(self, side: Side) -> str:
        """Return the prefix of texts on this side."""
        return self.query_prefix if side == "query" else self.passage_prefix

    def max_length(self, side: Side) -> int:
        """Return the maximal number of tokens of a text on this side."""
        return self.query_max_length if side == "query" else self.passage_max_length


Pooling = Callable[[Tensor, Tensor], Tensor]


def mean(token_embeddings: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens of each text, ``(rows, tokens, dim)`` to ``(rows, dim)``; zeros without tokens.

    Half-precision input is summed in float32 and rounded once, at the end.
    """
    held = mask.bool().unsqueeze(-1)
    wide = torch.promote_types(token_embeddings.dtype, torch.float32)
    total = token_embeddings.masked_fill(~held, 0.0).sum(dim=1, dtype=wide)
    count = held.sum(dim=1, dtype=wide).clamp(min=1.0)
    return (total / count).to(token_embeddings.dtype)


def cls(token_embeddings: Tensor, mask: Tensor) -> Tensor:
    """Return the vector of the first token, on whichever side the padding is; shapes as for `mean`."""
    held = mask.bool()
    first = held.to(torch.int32).argmax(dim=1)
    index = first.view(-1, 1, 1).expand(-1, 1, token_embeddings.shape[-1])
    picked = token_embeddings.gather(1, index).squeeze(1)
    return picked.masked_fill(~held.any(dim=1, keepdim=True), 0.0)


def max(token_embeddings: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value of every dimension over the tokens; shapes as for `mean`."""
    held = mask.bool().unsqueeze(-1)
    largest = token_embeddings.masked_fill(~held, float("-inf")).amax(dim=1)
    return largest.masked_fill(~held.any(dim=1), 0.0)


POOLINGS: dict[str, Pooling] = {"mean": mean, "cls": cls, "max": max}


def get_pooling(name: str) -> Pooling:
    """Return the pooling of that name."""
    require_choice("pooling", name, POOLINGS)
    return POOLINGS[name]
