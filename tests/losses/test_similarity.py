from __future__ import annotations

import pytest
import torch

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses.similarity import SIMILARITIES, cosine, dot, get_similarity


def test_every_score_is_that_of_its_own_pair() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, passages = torch.randn(4, 7, generator=generator), torch.randn(5, 7, generator=generator)
    for row in range(4):
        for column in range(5):
            assert dot(queries, passages)[row, column] == pytest.approx(
                float(queries[row] @ passages[column]), abs=1e-5
            )
            angle = torch.cosine_similarity(queries[row], passages[column], dim=0)
            assert cosine(queries, passages)[row, column] == pytest.approx(float(angle), abs=1e-6)


def test_cosine_ignores_length_and_dot_does_not() -> None:
    queries, passages = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0], [4.0, 2.0]])
    assert torch.allclose(*cosine(queries, passages)[0])
    assert dot(queries, passages).tolist() == [[4.0, 8.0]]


def test_a_zero_embedding_scores_zero_and_has_a_finite_gradient() -> None:
    queries = torch.zeros(1, 3, requires_grad=True)
    scores = cosine(queries, torch.ones(2, 3))
    assert scores.tolist() == [[0.0, 0.0]]
    scores.sum().backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None and queries.grad.isfinite().all()


def test_a_similarity_is_found_by_name_and_a_wrong_name_is_refused() -> None:
    assert [get_similarity(name) for name in SIMILARITIES] == list(SIMILARITIES.values())
    with pytest.raises(ConfigurationError, match="similarity='euclid' is not one of dot, cosine"):
        get_similarity("euclid")
