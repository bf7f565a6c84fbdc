from __future__ import annotations

import torch

from lit_dpret.retrieval.runs import Ranking, without_self_matches
from lit_dpret.retrieval.search import MISSING, TopK


def test_a_query_loses_the_passage_of_its_own_id_and_another_its_last() -> None:
    top = TopK(
        torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [9.0, float("-inf"), float("-inf")]]),
        torch.tensor([[0, 1, 2], [2, 0, 1], [2, MISSING, MISSING]]),
    )
    kept = without_self_matches(Ranking(query_ids=["a", "elsewhere", "c"], passage_ids=["a", "b", "c"], top=top), 2)
    assert kept.to_run() == {"a": {"b": 2.0, "c": 1.0}, "elsewhere": {"c": 3.0, "a": 2.0}, "c": {}}
    assert kept.top.indices.tolist() == [[1, 2], [2, 0], [MISSING, MISSING]]


def test_where_all_passages_were_ranked_the_row_ends_in_a_filler() -> None:
    top = TopK(torch.tensor([[2.0, 1.0]]), torch.tensor([[0, 1]]))
    kept = without_self_matches(Ranking(query_ids=["a"], passage_ids=["a", "b"], top=top), 5)
    assert kept.top.indices.tolist() == [[1, MISSING]]
