"""From embeddings or words to a scored ranking; the same few lines for every task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from lit_dpret.retrieval.bm25 import BM25
from lit_dpret.retrieval.runs import EvaluationResult, Ranking, evaluate
from lit_dpret.retrieval.search import SearchStream, TopK, lexicographic_rank, search

Qrels = Mapping[str, Mapping[str, int]]


def rank_embeddings(
    query_ids: Sequence[str],
    query_embeddings: Tensor,
    passage_ids: Sequence[str],
    passage_embeddings: Tensor,
    *,
    k: int = 100,
    find: Callable[..., TopK] = search,
) -> Ranking:
    """The ``k`` nearest passages of every query by dot product, as ``find`` finds them."""
    top = find(
        query_embeddings,
        passage_embeddings,
        min(k, len(passage_ids)),
        tie_rank=lexicographic_rank(passage_ids),
    )
    return Ranking(query_ids=query_ids, passage_ids=passage_ids, top=top)


def score_embeddings(
    query_ids: Sequence[str],
    query_embeddings: Tensor,
    passage_ids: Sequence[str],
    passage_embeddings: Tensor,
    qrels: Qrels,
    *,
    k: int = 100,
    find: Callable[..., TopK] = search,
) -> EvaluationResult:
    """Rank and judge against the full qrels."""
    ranking = rank_embeddings(query_ids, query_embeddings, passage_ids, passage_embeddings, k=k, find=find)
    return evaluate(ranking, qrels)


def rank_stream(
    query_ids: Sequence[str],
    query_embeddings: Tensor,
    passage_ids: Sequence[str],
    pieces: Iterable[Tensor],
    *,
    k: int = 100,
    device: str | None = None,
) -> Ranking:
    """The ``k`` nearest of passages whose embeddings come piece by piece and are not kept."""
    stream = SearchStream(
        query_embeddings, min(k, len(passage_ids)), tie_rank=lexicographic_rank(passage_ids), device=device
    )
    for piece in pieces:
        stream.add(piece)
    return Ranking(query_ids=query_ids, passage_ids=passage_ids, top=stream.result())


def score_bm25(
    queries: Mapping[str, str], passages: Mapping[str, str], qrels: Qrels, *, k: int = 100
) -> EvaluationResult:
    """BM25 (k1 0.9, b 0.4, English stop words and stems) over the same passages."""
    passage_ids = list(passages)
    index = BM25([passages[name] for name in passage_ids], passage_ids)
    top = index.search(list(queries.values()), min(k, len(passage_ids)))
    return evaluate(Ranking(query_ids=list(queries), passage_ids=passage_ids, top=top), qrels)
