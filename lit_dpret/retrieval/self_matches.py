"""Queries that are passages themselves: ArguAna's arguments, Quora's questions.

A query of such a collection has the id of a passage with the same text, which every system finds first and no
judgement calls relevant. BEIR leaves it out of the ranking. It must not be left out elsewhere: in SciFact query
``"1"`` and passage ``"1"`` would have nothing to do with each other.
"""

from __future__ import annotations

import torch

from lit_dpret.retrieval.runs import Ranking
from lit_dpret.retrieval.search import MISSING, TopK


def without_self_matches(ranking: Ranking, k: int) -> Ranking:
    """The first ``k`` columns of the ranking without any passage that has its query's id.

    Rank to ``k + 1`` before: each row loses its self-match, or else its last passage. Where the ranking is not that
    deep because there are no more passages, a row that lost one ends in a filler.
    """
    scores, indices = ranking.top
    position = {name: place for place, name in enumerate(ranking.passage_ids)}
    own = torch.tensor([position.get(name, MISSING - 1) for name in ranking.query_ids], dtype=torch.long)
    hit = indices == own.unsqueeze(1)
    kept = hit.to(torch.int8).argsort(dim=1, stable=True)[:, :k]
    filled = TopK(
        scores.masked_fill(hit, float("-inf")).gather(1, kept), indices.masked_fill(hit, MISSING).gather(1, kept)
    )
    return Ranking(query_ids=ranking.query_ids, passage_ids=ranking.passage_ids, top=filled)
