"""Evaluate answer sentence selection at both levels of the paper: sentences and passages.

A passage gets the score of its best sentence (paper 004, equation 9). So *any-hit* measures (``success@k``, MRR) can
only rise from sentences to passages, although R@20 falls in the paper's Table 1. *Per-relevant* ``recall@k`` has no
such order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dpret.errors import DataError
from lit_dpret.retrieval.bm25 import BM25
from lit_dpret.retrieval.metrics import Metric, Qrels, Values, gains_of_indices, ideal_gains
from lit_dpret.retrieval.search import MISSING, TopK, lexicographic_rank, search

# Returns the best k sentences of every query.
Searcher = Callable[[int], TopK]

METRICS = ("mrr@10", "success@1", "success@20", "success@100", "recall@20", "recall@100")
LEVELS = ("sentence", "passage")


@dataclass(frozen=True)
class Levels:
    """One ranking at both levels."""

    sentences: TopK  # indices into the list of sentences, (queries, depth)
    passages: TopK  # indices into the list of passages, (queries, depth)


def rank_levels(searcher: Searcher, passage_of: Tensor, *, depth: int = 100) -> Levels:
    """Return the first ``depth`` sentences and the first ``depth`` passages of every query.

    The number of retrieved sentences is doubled until every query has that many passages, or no more sentences.

    Guarantees:
        - The passages are those of the full ranking of sentences, in the order of each passage's best sentence.
    """
    total, asked = len(passage_of), min(depth, len(passage_of))
    most = len(torch.unique(passage_of))
    while True:
        top = searcher(asked)
        passages = collapse(top, passage_of, depth)
        enough = (passages.indices != MISSING).sum(dim=1) >= min(depth, most)
        exhausted = (top.indices == MISSING).any(dim=1)
        if asked >= total or bool((enough | exhausted).all()):
            return Levels(TopK(top.scores[:, :depth], top.indices[:, :depth]), passages)
        asked = min(total, 2 * asked)


def collapse(top: TopK, passage_of: Tensor, depth: int) -> TopK:
    """Turn a ranking of sentences into one of passages by best sentence; ``depth`` columns, padded with `MISSING`."""
    queries = len(top.indices)
    owner = passage_of[top.indices.clamp(min=0)].masked_fill(top.indices == MISSING, MISSING)
    scores = torch.full((queries, depth), float("-inf"))
    places = torch.full((queries, depth), MISSING, dtype=torch.long)
    for row in range(queries):
        seen = dict.fromkeys(owner[row].tolist())
        seen.pop(MISSING, None)
        first = torch.tensor(list(seen), dtype=torch.long)[:depth]
        if not len(first):
            continue
        at = (owner[row].unsqueeze(0) == first.unsqueeze(1)).to(torch.int8).argmax(dim=1)
        places[row, : len(first)], scores[row, : len(first)] = first, top.scores[row][at]
    return TopK(scores, places)


class SentenceCollection:
    """The sentences of one client, in tie-breaking order, with their passages."""

    def __init__(self, sentences: Mapping[str, str], passage_of: Mapping[str, str]) -> None:
        if not sentences:
            raise DataError("There are no sentences to select answers from.")
        self.sentence_ids = list(sentences)
        self.texts = list(sentences.values())
        self.passage_ids = list(dict.fromkeys(passage_of[sid] for sid in self.sentence_ids))
        place = {pid: at for at, pid in enumerate(self.passage_ids)}
        self.passage_of = torch.tensor([place[passage_of[sid]] for sid in self.sentence_ids])
        self._owner = {sid: passage_of[sid] for sid in self.sentence_ids}
        self.tie_rank = lexicographic_rank(self.sentence_ids)

    def dense(self, query_embeddings: Tensor, sentence_embeddings: Tensor, *, depth: int = 100) -> Levels:
        """Rank by the dot product; embeddings ``(queries, dim)`` and ``(sentences, dim)``."""
        return rank_levels(
            lambda k: search(query_embeddings, sentence_embeddings, k, tie_rank=self.tie_rank),
            self.passage_of,
            depth=depth,
        )

    def bm25(self, queries: Sequence[str], *, depth: int = 100) -> Levels:
        """Rank by BM25, the paper's first baseline."""
        index = BM25(self.texts, self.sentence_ids)
        return rank_levels(lambda k: index.search(queries, k), self.passage_of, depth=depth)

    def passage_qrels(self, qrels: Qrels) -> dict[str, dict[str, int]]:
        """Return judgements of passages; each passage gets the best grade of its sentences."""
        found: dict[str, dict[str, int]] = {}
        for query, judged in qrels.items():
            of_query = found.setdefault(query, {})
            for sid, grade in judged.items():
                pid = self._owner.get(sid)
                if pid is not None:
                    of_query[pid] = max(grade, of_query.get(pid, grade))
        return found

    def measure(
        self, levels: Levels, query_ids: Sequence[str], qrels: Qrels, metrics: Sequence[str] = METRICS
    ) -> dict[str, Values]:
        """Return the values of all queries, ``(queries,)``, under names like ``sentence/mrr@10``."""
        found: dict[str, Values] = {}
        sides = (
            ("sentence", levels.sentences, self.sentence_ids, qrels),
            ("passage", levels.passages, self.passage_ids, self.passage_qrels(qrels)),
        )
        for level, top, ids, judged in sides:
            gains = gains_of_indices(top.indices.numpy(), query_ids, ids, judged)
            ideal = ideal_gains(query_ids, judged)
            for name in metrics:
                found[f"{level}/{Metric.parse(name)}"] = Metric.parse(name)(gains, ideal)
        return found
