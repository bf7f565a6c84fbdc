"""The best passages of every train query, in shards, gone on with after an interruption."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lit_dpret.negatives.base import Towers
from lit_dpret.negatives.store import Mined, ShardStore
from lit_dpret.negatives.texts import TrainTexts
from lit_dpret.progress import ProgressLine
from lit_dpret.retrieval.bm25 import BM25
from lit_dpret.retrieval.rescoring import canonical_scores
from lit_dpret.retrieval.rows import TensorRows
from lit_dpret.retrieval.search import MISSING, TopK, lexicographic_rank, search

Ranker = Callable[[range], tuple[TopK, list[Tensor]]]
"""Ranks a range of queries; returns their best passages and the scores of the passages that answer each."""


def mine(
    rank: Callable[[], Ranker],
    texts: TrainTexts,
    *,
    label: str,
    shard_size: int,
    store: ShardStore | None,
    private: bool,
) -> Mined:
    """The best passages of every train query.

    Guarantees:
        - A query's entry is a function of that query and of the passages: the same for any
          ``shard_size`` and however often the work was interrupted.
        - Shards that are there are not mined again, and nothing is made ready where none is missing.

    Args:
        rank: Makes the ranker: an index, or embeddings.
        texts: Public passages and train queries.
        label: What the line of progress starts with.
        shard_size: Queries that are ranked, and written, together.
        store: Where shards are kept; None keeps none.
        private: Tell that it began and ended, and nothing between: a share of the queries after each shard
            of known size would tell how many there are.
    """
    total = len(texts.queries)
    if store is None:
        spans = [range(start, min(start + shard_size, total)) for start in range(0, total, shard_size)]
    else:
        spans = list(store.missing(shard_size))
    parts: list[Mined] = []
    if spans:
        ranker = rank()
        done = total - sum(map(len, spans))
        with ProgressLine(label) as progress:
            if private:
                progress(0, 1)
            for span in spans:
                part = _packed(span, *ranker(span), texts)
                if store is None:
                    parts.append(part)
                else:
                    store.write(span, part)
                done += len(span)
                if not private:
                    progress(done, total)
            if private:
                progress(1, 1)
    if store is None:
        return Mined.join(parts)
    store.tidy()
    return store.read()


def bm25_ranker(texts: TrainTexts, *, depth: int, k1: float, b: float) -> Ranker:
    """By words: every passage that shares one with the query."""
    index = BM25(texts.passages, texts.passage_ids, k1=k1, b=b)
    depth = min(depth, len(texts.passages))

    def rank(span: range) -> tuple[TopK, list[Tensor]]:
        queries = [texts.queries[i] for i in span]
        return index.search_and_score(queries, depth, [texts.positives(i) for i in span])

    return rank


def dense_ranker(texts: TrainTexts, towers: Towers, *, depth: int, store: ShardStore | None) -> Ranker:
    """By the encoders; all queries are encoded at once, so that an embedding does not depend on the shards."""
    folder = None if store is None else store.folder
    passages = towers.embeddings(texts.passages, "passage", folder)
    queries = towers.embeddings(texts.queries, "query", folder)
    tie_rank, depth = lexicographic_rank(texts.passage_ids), min(depth, len(passages))

    def rank(span: range) -> tuple[TopK, list[Tensor]]:
        some = queries[span.start : span.stop]
        answers = [texts.positives(i) for i in span]
        width = max(map(len, answers), default=0)
        filled = torch.tensor([[*a, *[MISSING] * (width - len(a))] for a in answers], dtype=torch.long)
        scores = canonical_scores(some.double(), TensorRows(passages), filled.view(len(answers), width), cosine=False)
        scored = [row[: len(a)] for row, a in zip(scores, answers, strict=True)]
        return search(some, passages, depth, tie_rank=tie_rank, device=towers.device), scored

    return rank


def _packed(span: range, top: TopK, scored: list[Tensor], texts: TrainTexts) -> Mined:
    answers = [texts.positives(i) for i in span]
    return Mined(
        top.indices.numpy().astype(np.int32),
        top.scores.numpy(),
        np.cumsum([0, *map(len, answers)]),
        np.array([place for places in answers for place in places], dtype=np.int32),
        torch.cat([torch.empty(0), *scored]).numpy().astype(np.float32),
    )
