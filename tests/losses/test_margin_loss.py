"""Margin-MSE against its formula by hand, and whose rows it looks at."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lit_dpret.errors import ConfigurationError
from lit_dpret.losses import MarginMSELoss

ROWS, EACH, DIM = 4, 3, 5


def batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = (ROWS, DIM), (ROWS, DIM), (ROWS, EACH, DIM), (ROWS, EACH)
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_the_loss_is_the_mean_squared_error_of_the_margins(similarity: str) -> None:
    queries, own, others, margins = batch()
    found = MarginMSELoss(temperature=0.5, similarity=similarity)(queries, own, others, margins)
    for i in range(ROWS):
        q, p = queries[i], own[i]
        if similarity == "cosine":
            q, p = F.normalize(q, dim=0), F.normalize(p, dim=0)
        errors = []
        for j in range(EACH):
            n = F.normalize(others[i, j], dim=0) if similarity == "cosine" else others[i, j]
            errors.append((float((q @ p - q @ n) / 0.5) - float(margins[i, j])) ** 2)
        assert float(found[i]) == pytest.approx(sum(errors) / EACH, rel=1e-12)


def test_what_is_masked_counts_for_nothing_and_a_row_without_labels_has_no_gradient() -> None:
    queries, own, others, margins = batch()
    mask = torch.zeros(ROWS, EACH, dtype=torch.bool)
    mask[0, 1] = mask[2] = True
    margins[0, 1] = math.nan
    queries.requires_grad_()
    loss = MarginMSELoss(similarity="dot")
    found = loss(queries, own, others, margins, mask)
    kept = [0, 2]
    alone = loss(queries[:1], own[:1], others[:1, kept], margins[:1, kept])
    assert found[0].item() == pytest.approx(alone.item(), rel=1e-12) and found[2].item() == 0
    found.sum().backward()
    assert queries.grad is not None and bool(torch.isfinite(queries.grad).all())
    assert float(queries.grad[2].abs().sum()) == 0 < float(queries.grad[0].abs().sum())


def test_margins_that_do_not_fit_are_refused() -> None:
    queries, own, others, margins = batch()
    with pytest.raises(ConfigurationError, match=r"margins of shape \(4, 2\)"):
        MarginMSELoss()(queries, own, others, margins[:, :2])
    with pytest.raises(ConfigurationError, match=r"negatives of shape \(4, 5\)"):
        MarginMSELoss()(queries, own, others[:, 0], margins)
    margins[3, 0] = math.inf
    with pytest.raises(ConfigurationError, match="not a finite number"):
        MarginMSELoss()(queries, own, others, margins)
    with pytest.raises(ConfigurationError, match="temperature=0"):
        MarginMSELoss(temperature=0.0)
