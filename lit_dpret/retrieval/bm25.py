"""BM25, the lexical baseline of every dense retriever.

Scoring is bm25s with Lucene's formula and the values of the published BEIR and MS MARCO baselines (Anserini's: k1 0.9,
b 0.4). Stemming is on, as in those baselines; it can change nDCG by two points, so state it with a result. The ranking
has the same form and tie rule as dense search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bm25s
import Stemmer
import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError, first_line
from lit_dpret.retrieval.search import MISSING, TopK, lexicographic_rank, require_positive, top_k_of


@dataclass(frozen=True, kw_only=True)
class BM25Settings:
    """The settings that, besides the texts, determine a score."""

    k1: float = 0.9  # how slowly repetitions of a word stop counting; at least 0
    b: float = 0.4  # how much a long passage is discounted, in [0, 1]
    stemmer: str | None = "english"  # the Snowball stemmer's language, or None to compare words as they are
    stopwords: str | None = "en"  # the language whose stop words are ignored, such as ``en``; None ignores none

    def __post_init__(self) -> None:
        if self.k1 < 0 or not 0 <= self.b <= 1:
            raise ConfigurationError(f"bm25.k1={self.k1} must be at least 0 and bm25.b={self.b} in [0, 1].")
        if self.stemmer is not None and self.stemmer not in Stemmer.algorithms():
            raise ConfigurationError(f"bm25.stemmer={self.stemmer!r} is not one of {', '.join(Stemmer.algorithms())}.")
        try:
            bm25s.tokenize(["a"], stopwords=self.stopwords, show_progress=False)
        except ValueError as error:
            raise ConfigurationError(f"bm25.stopwords={self.stopwords!r}: {first_line(error)}") from error


class BM25:
    """An index over passages, searched by words; ``settings`` are those of `BM25Settings`.

    Without ``passage_ids`` the earlier passage wins a tie.

    Example:
        >>> index = BM25(["how to file a claim", "flood insurance in winter"], ["p1", "p2"])
        >>> index.search(["Floods?"], k=2).indices
        tensor([[ 1, -1]])
    """

    def __init__(
        self,
        passages: Sequence[str],
        passage_ids: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        how = BM25Settings(**settings)
        if passage_ids is not None and len(passage_ids) != len(passages):
            raise DataError(f"Got {len(passages)} passages, but {len(passage_ids)} ids.")
        self._words: dict[str, Any] = {
            "stopwords": how.stopwords,
            "stemmer": None if how.stemmer is None else Stemmer.Stemmer(how.stemmer),
            "show_progress": False,
        }
        tokens: Any = bm25s.tokenize(list(passages), **self._words)
        if not tokens.vocab:
            raise DataError(f"None of {len(passages)} passages holds a word that BM25 could index.")
        self._index: Any = bm25s.BM25(method="lucene", k1=how.k1, b=how.b)
        self._index.index(tokens, show_progress=False)
        self._tie_rank = torch.arange(len(passages)) if passage_ids is None else lexicographic_rank(passage_ids)

    def search(self, queries: Sequence[str], k: int) -> TopK:
        """Return the ``k`` best passages of every query, padded with `MISSING` if fewer share a word with it."""
        return self.search_and_score(queries, k, [()] * len(queries))[0]

    def search_and_score(
        self, queries: Sequence[str], k: int, wanted: Sequence[Sequence[int]]
    ) -> tuple[TopK, list[Tensor]]:
        """Return `search`, and each query's scores of its ``wanted`` passages; 0 without a shared word."""
        require_positive(k=k)
        scores = torch.full((len(queries), k), float("-inf"))
        indices = torch.full((len(queries), k), MISSING, dtype=torch.long)
        scored = [torch.zeros(len(places)) for places in wanted]
        words: Any = bm25s.tokenize(list(queries), return_ids=False, **self._words)
        for row, tokens in enumerate(words):
            known = self._index.get_tokens_ids(tokens)
            if not known:
                continue
            all_scores = torch.from_numpy(self._index.get_scores_from_ids(known))
            found = top_k_of(all_scores, k, self._tie_rank)
            hits = int((found.scores > 0).sum())
            scores[row, :hits], indices[row, :hits] = found.scores[0, :hits], found.indices[0, :hits]
            scored[row] = all_scores[torch.tensor(wanted[row], dtype=torch.long)]
        return TopK(scores, indices), scored
