from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_dpret.encoders.contract import POOLINGS, get_pooling
from lit_dpret.errors import ConfigurationError


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor]:
    """Right padding, left padding, a hole, one token, no token, no padding."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [0, 1, 0, 0, 0], [0] * 5, [1] * 5])
    return torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0)), mask


def by_hand(name: str, row: Tensor, mask: Tensor) -> Tensor:
    held = row[mask.bool()]
    if not len(held):
        return torch.zeros(row.shape[-1])
    return {"mean": held.mean(dim=0), "cls": held[0], "max": held.amax(dim=0)}[name]


@pytest.mark.parametrize("name", POOLINGS)
def test_each_row_is_pooled_over_its_own_tokens(name: str, tokens: tuple[Tensor, Tensor]) -> None:
    hidden, mask = tokens
    pooled = get_pooling(name)(hidden, mask)
    for row in range(len(hidden)):
        assert torch.allclose(pooled[row], by_hand(name, hidden[row], mask[row]), atol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", POOLINGS)
def test_what_stands_outside_the_mask_changes_nothing(name: str, tokens: tuple[Tensor, Tensor], poison: float) -> None:
    hidden, mask = tokens
    poisoned = hidden.masked_fill(~mask.bool()[..., None], poison).requires_grad_()
    pooled = get_pooling(name)(poisoned, mask)
    assert torch.equal(pooled, get_pooling(name)(hidden, mask))
    pooled.sum().backward()  # type: ignore[no-untyped-call]
    assert poisoned.grad is not None and poisoned.grad.isfinite().all()
    assert poisoned.grad[~mask.bool()].eq(0).all()


def test_the_mean_of_half_precision_is_summed_in_float32_and_rounded_once() -> None:
    hidden = torch.randn(200, 51, 1, generator=torch.Generator().manual_seed(1)).bfloat16() + 1
    rounded_twice = hidden.sum(dim=1) / 51
    wanted = hidden.float().mean(dim=1).bfloat16()
    assert not torch.equal(rounded_twice, wanted)
    pooled = get_pooling("mean")(hidden, torch.ones(200, 51, dtype=torch.long))
    assert pooled.dtype == torch.bfloat16
    assert torch.equal(pooled, wanted)


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pooling='median' is not one of mean, cls, max"):
        get_pooling("median")
