from __future__ import annotations

import pytest
import torch

from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval.runs import Ranking
from lit_dpret.retrieval.search import MISSING, TopK
from lit_dpret.retrieval.self_matches import without_self_matches


def test_a_query_loses_the_passage_of_its_own_id_and_another_its_last() -> None:
    top = TopK(
        torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [9.0, float("-inf"), float("-inf")]]),
        torch.tensor([[0, 1, 2], [2, 0, 1], [2, MISSING, MISSING]]),
    )
    kept = without_self_matches(Ranking(query_ids=["a", "elsewhere", "c"], passage_ids=["a", "b", "c"], top=top))
    assert kept.to_run() == {"a": {"b": 2.0, "c": 1.0}, "elsewhere": {"c": 3.0, "a": 2.0}, "c": {}}
    assert kept.top.indices.tolist() == [[1, 2], [2, 0], [MISSING, MISSING]]


def test_a_ranking_of_one_passage_has_none_to_lose() -> None:
    top = TopK(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ConfigurationError, match="first 1 passages"):
        without_self_matches(Ranking(query_ids=["q"], passage_ids=["a"], top=top))
