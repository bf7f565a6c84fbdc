"""Real encoders under the losses over pairs: autograd gradients, clipped, summed, one record changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pair_cases import LOSSES
from torch import Tensor

from lit_dpret.losses import PairwiseLoss, SoftmaxPairLoss, SymmetricSoftmaxPairLoss
from lit_dpret.losses.pairs.base import Relation

Batch = tuple[Tensor, Tensor]
Encoder = Callable[[Tensor, Tensor], Tensor]

SIZES = pytest.mark.parametrize("n", [2, 3, 5, 8, 32])
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.5, 0.2])


def clipped_sum(loss: PairwiseLoss, encoder: Encoder, weights: Tensor, batch: Batch, bound: float = 1.0) -> Tensor:
    """sum_ij c_ij clip(grad S_ij), every gradient by autograd: what a private step would release."""

    def table(at: Tensor) -> Tensor:
        return encoder(at, batch[0]) @ encoder(at, batch[1]).T

    gradients = torch.func.jacfwd(table)(weights)  # (n, n, weights)
    norms = gradients.norm(dim=-1, keepdim=True)
    clipped = gradients * (bound / norms.clamp(min=1e-300)).clamp(max=1.0)
    return torch.einsum("ij,ijw->w", loss.coefficients(table(weights)), clipped)


def turning(weights: Tensor, rows: Tensor) -> Tensor:
    """A shared two-dimensional encoder: an angle, and how fast the one weight turns it."""
    angles = rows[:, 0] + weights * rows[:, 1]
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def worst_batch(n: int, relation: Relation) -> tuple[Batch, Batch]:
    """Neighbours that attain the supremum up to the offset: C.1 of the design.

    Queries i < n at the angle pi, passages at 0, and the last record the other way round. A small
    offset between queries and passages gives every pair a slope, and fast turning a large one.
    """
    offset, pace = 1e-4, 1e4
    half_turn = torch.full((n,), torch.pi, dtype=torch.float64)
    half_turn[-1] = 0.0
    speeds = torch.full((n,), pace, dtype=torch.float64)
    queries = torch.stack([half_turn + offset, -speeds], dim=1)
    passages = torch.stack([torch.pi - half_turn - offset, speeds], dim=1)
    if relation == "add_or_remove":
        return (queries, passages), (queries[:-1], passages[:-1])
    new_queries, new_passages = queries.clone(), passages.clone()
    new_queries[-1, 1], new_passages[-1, 1] = 3 * pace, -3 * pace  # the same embeddings, the opposite slopes
    return (queries, passages), (new_queries, new_passages)


def attained(loss: PairwiseLoss, n: int, relation: Relation) -> float:
    weights = torch.zeros(1, dtype=torch.float64)
    before, after = worst_batch(n, relation)
    return float((clipped_sum(loss, turning, weights, before) - clipped_sum(loss, turning, weights, after)).norm())


@SIZES
@TEMPERATURES
@pytest.mark.parametrize("relation", ["add_or_remove", "replace_one"])
def test_a_real_encoder_attains_the_softmax_sensitivity_to_four_digits(
    n: int, temperature: float, relation: Relation
) -> None:
    for loss in (SoftmaxPairLoss(temperature=temperature), SymmetricSoftmaxPairLoss(temperature=temperature)):
        claimed = loss.sensitivity(n, relation=relation)
        found = attained(loss, n, relation)
        assert found <= claimed * (1 + 1e-9)
        assert found == pytest.approx(claimed, rel=1e-4)


def perceptron(weights: Tensor, rows: Tensor) -> Tensor:
    """A shared encoder of 3 inputs, 4 hidden units and 2 outputs of length 1."""
    hidden = (rows @ weights[:12].view(3, 4)).tanh()
    return torch.nn.functional.normalize(hidden @ weights[12:].view(4, 2), dim=1)


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].similarity == "cosine"])
def test_on_random_batches_of_a_small_network_one_record_moves_the_sum_by_no_more(name: str) -> None:
    loss = LOSSES[name]
    for seed in range(10):
        draw = torch.Generator().manual_seed(seed)
        weights = torch.randn(20, generator=draw, dtype=torch.float64)
        queries, passages = 3 * torch.randn(2, 5, 3, generator=draw, dtype=torch.float64)
        full = clipped_sum(loss, perceptron, weights, (queries, passages), bound=0.1)
        fewer = clipped_sum(loss, perceptron, weights, (queries[:-1], passages[:-1]), bound=0.1)
        assert 0 < (full - fewer).norm() <= 0.1 * loss.sensitivity(5, relation="add_or_remove")
