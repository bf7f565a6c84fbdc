"""What one record can do: proved suprema against golden numbers, searches, each other and real encoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from pair_cases import LOSSES, draw
from torch import Tensor

from lit_dpret.losses import (
    KernelPairLoss,
    NullMassSoftmaxPairLoss,
    PairwiseLoss,
    SigmoidPairLoss,
    SoftmaxPairLoss,
    SpreadoutPairLoss,
    SymmetricSoftmaxPairLoss,
)
from lit_dpret.losses.pairs.base import Relation
from lit_dpret.losses.pairs.declared import find_worst_case, movement_factors

EACH = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
RELATIONS = pytest.mark.parametrize("relation", ["add_or_remove", "replace_one"])


# Golden numbers: design/logit-dp.md C.1, found there by a real encoder and by search.


@pytest.mark.parametrize(
    ("temperature", "wanted", "limit"),
    [
        (1.0, [9.2, 11.9, 13.9, 15.2, 16.0, 16.4, 16.7], 16.8),
        (0.5, [14.4, 25.5, 41.5, 60.5, 78.4, 91.9, 105.7], 111.0),
        (0.2, [16.0, 32.0, 63.9, 127.6, 254.5, 506.2, 1957.2], 44_100.0),
        (0.1, [16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 2048.0], 2 * (1 + math.exp(20))),
        (0.01, [16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 2048.0], 2 * (1 + math.exp(200))),
    ],
)
def test_softmax_has_the_golden_table_of_suprema(temperature: float, wanted: list[float], limit: float) -> None:
    loss = SoftmaxPairLoss(temperature=temperature)
    sizes = [8, 16, 32, 64, 128, 256, 1024]
    found = [temperature * loss.sensitivity(n, relation="add_or_remove") for n in sizes]
    assert found == pytest.approx(wanted, abs=0.051)
    assert temperature * loss.sensitivity(10**90, relation="add_or_remove") == pytest.approx(limit, rel=3e-3)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 32])
def test_the_papers_constant_is_theirs_smaller_and_says_that_it_is_no_guarantee(n: int) -> None:
    paper, ours = SoftmaxPairLoss(temperature=1.0, sensitivity_from="paper"), SoftmaxPairLoss(temperature=1.0)
    printed = 2 * (1 + (n - 2) * math.exp(2) / (math.exp(2) + n - 1))
    assert paper.sensitivity(n, relation="add_or_remove") == pytest.approx(printed)
    largest, least = math.exp(2) / (math.exp(2) + n - 1), 1 / (1 + (n - 1) * math.exp(2))
    missing = ours.sensitivity(n, relation="add_or_remove") - printed
    assert missing == pytest.approx(2 * (largest - least)) and missing > 0
    assert not paper.guaranteed and paper.claim == "refuted"
    assert ours.guaranteed and ours.claim == "proved"


@pytest.mark.parametrize(
    ("module", "says_so", "claim"),
    [
        ("lit_dpret.losses.pairs.softmax", True, "proved"),
        ("lit_dpret.losses.pairs.softmax", False, "declared"),
        ("somebody.losses", True, "declared"),
        ("lit_dpret.losses.pairs_of_somebody", True, "declared"),
    ],
)
def test_a_bound_is_proved_for_a_class_of_the_package_that_says_so_itself(
    module: str, says_so: bool, claim: str
) -> None:
    names = {"__module__": module} | ({"proved": True} if says_so else {})
    subclass: Any = type("Changed", (SoftmaxPairLoss,), names)
    assert subclass(temperature=1.0).claim == claim


@pytest.mark.parametrize("n", [1, 2, 9, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01])
def test_separate_losses_and_null_mass_stay_within_bounds_free_of_the_temperature(n: int, temperature: float) -> None:
    t, n0, k, m = temperature, 16, 1.5, n - 1
    sigmoid = SigmoidPairLoss(temperature=t, bias=-3.0, negative_weight=k, n0=n0)
    kernel = KernelPairLoss(temperature=t, negative_weight=k, n0=n0)
    null = NullMassSoftmaxPairLoss(temperature=t, negative_weight=k, n0=n0)
    spread = SpreadoutPairLoss(n0=n0)
    assert sigmoid.sensitivity(n, relation="add_or_remove") <= (1 + 2 * k * m / (n0 - 1)) / t
    assert kernel.sensitivity(n, relation="add_or_remove") == pytest.approx((1 + 2 * k * m / n0) / t)
    tightest = (1 + m * k / (m * k + n0) + k * m / n0) / t
    assert null.sensitivity(n, relation="add_or_remove") <= tightest <= (2 + k * m / n0) / t
    assert spread.sensitivity(n, relation="add_or_remove") == pytest.approx(4 * m / (n0 - 1))


def test_spreadout_has_lemma_4_6_for_the_papers_normaliser_and_less_for_a_fixed_one() -> None:
    realised, fixed = SpreadoutPairLoss(normaliser="realised"), SpreadoutPairLoss(n0=32)
    assert [realised.sensitivity(n, relation="add_or_remove") for n in (1, 2, 3, 32)] == [0.0, 4.0, 6.0, 6.0]
    assert [realised.sensitivity(n, relation="replace_one") for n in (1, 2, 3, 32)] == [0.0, 8.0, 8.0, 8.0]
    assert fixed.sensitivity(32, relation="add_or_remove") == pytest.approx(4.0)


@RELATIONS
def test_null_mass_tends_to_softmax_as_negatives_outweigh_the_constant(relation: Relation) -> None:
    for temperature in (1.0, 0.3):
        loss = NullMassSoftmaxPairLoss(temperature=temperature, negative_weight=1e12, n0=8)
        wanted = SoftmaxPairLoss(temperature=temperature).sensitivity(8, relation=relation)
        assert loss.sensitivity(8, relation=relation) == pytest.approx(wanted, rel=1e-6)


@EACH
@RELATIONS
def test_sensitivities_grow_with_n(loss: PairwiseLoss, relation: Relation) -> None:
    sizes = [*range(1, 200), 1000, 10_000, 10**9]
    found = [loss.sensitivity(n, relation=relation) for n in sizes]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(found))


@pytest.mark.like(3)
@EACH
@RELATIONS
@pytest.mark.parametrize("n", [1, 2, 4])
def test_no_table_moves_the_gradient_further_and_one_moves_it_as_far(
    loss: PairwiseLoss, relation: Relation, n: int
) -> None:
    claimed = loss.sensitivity(n, relation=relation)
    found = find_worst_case(loss, n, relation=relation, restarts=8, steps=40).movement
    assert found <= claimed * (1 + 1e-9)
    assert found >= 0.99 * claimed


@pytest.mark.like(3)
@EACH
@RELATIONS
def test_no_embeddings_move_the_gradient_further_and_some_move_it_as_far(
    loss: PairwiseLoss, relation: Relation
) -> None:
    claimed = loss.sensitivity(3, relation=relation)
    found = find_worst_case(loss, 3, relation=relation, dim=2, restarts=12, steps=120).movement
    assert found <= claimed * (1 + 1e-9)
    assert found >= 0.99 * claimed


@pytest.mark.parametrize("n", [8, 400])
@pytest.mark.parametrize(
    "loss",
    [
        SoftmaxPairLoss(temperature=1.0),
        SoftmaxPairLoss(temperature=0.02),
        NullMassSoftmaxPairLoss(temperature=0.2, n0=400),
        SigmoidPairLoss(temperature=0.1, n0=400),
    ],
)
def test_in_float32_the_worst_table_stays_within_a_hundred_thousandth(loss: PairwiseLoss, n: int) -> None:
    table = torch.full((n, n), -1.0)
    table[:-1, -1] = table[-1, :-1] = 1.0
    moved = movement_factors(loss.coefficients(table).double(), loss.coefficients(table[:-1, :-1]).double())
    assert float(moved.abs().sum()) <= loss.sensitivity(n, relation="add_or_remove") * (1 + 1e-5)


# The premise of the searches: gradients that are plus or minus one unit vector are the worst.


@EACH
@RELATIONS
def test_the_sum_of_absolute_factors_is_the_longest_movement_over_all_gradients(
    loss: PairwiseLoss, relation: Relation
) -> None:
    table, other, rest = draw(4, 4), draw(4, 4, seed=1), slice(0, 3)
    other[rest, rest] = table[rest, rest]
    before = loss.coefficients(table)
    after = loss.coefficients(other if relation == "replace_one" else table[rest, rest])
    longest = float(movement_factors(before, after).abs().sum())

    def movement(old: Tensor, new: Tensor) -> float:
        """|G - G'| for gradients of shape (4, 4, dim) before and after, the survivors' the same."""
        total = torch.einsum("ij,ijd->d", before, old)
        return float((total - torch.einsum("ij,ijd->d", after, new[: len(after), : len(after)])).norm())

    axis = torch.nn.functional.normalize(draw(6, seed=2), dim=0)
    worst = movement_factors(before, after).sign().unsqueeze(-1) * axis
    worst[3], worst[:, 3] = before[3].sign()[:, None] * axis, before[:, 3].sign()[:, None] * axis
    new = worst.clone()
    if relation == "replace_one":
        new[3], new[:, 3] = -after[3].sign()[:, None] * axis, -after[:, 3].sign()[:, None] * axis
    assert movement(worst, new) == pytest.approx(longest)
    for seed in range(20):
        old = torch.nn.functional.normalize(draw(4, 4, 6, seed=seed), dim=-1)
        new = torch.nn.functional.normalize(draw(4, 4, 6, seed=100 + seed), dim=-1)
        new[rest, rest] = old[rest, rest]
        assert movement(old, new) <= longest * (1 + 1e-12)


# Masks: an entry ij depends on the records i and j, so survivors keep theirs.


@pytest.mark.like(3)
@EACH
@RELATIONS
@pytest.mark.parametrize("n", [2, 5])
def test_masks_never_let_one_record_do_more(loss: PairwiseLoss, relation: Relation, n: int) -> None:
    """From the worst tables, with random masks and from random corners of the range."""
    claimed, rest = loss.sensitivity(n, relation=relation), slice(0, n - 1)
    worst = find_worst_case(loss, n, relation=relation, restarts=4, steps=20)
    end = loss.high if loss.high < math.inf else 50.0
    for seed in range(30):
        mask, new_mask = draw(n, n, seed=seed) > 0.5, draw(n, n, seed=1000 + seed) > 0.5
        corner, new_corner = end * draw(n, n, seed=seed + 7).sign(), end * draw(n, n, seed=seed + 8).sign()
        for table, new in ((worst.table, worst.replaced), (corner, new_corner)):
            before = loss.coefficients(table, mask)
            if relation == "add_or_remove" or new is None:
                after = loss.coefficients(table[rest, rest], mask[rest, rest])
            else:
                new, new_mask = new.clone(), new_mask.clone()
                new[rest, rest], new_mask[rest, rest] = table[rest, rest], mask[rest, rest]
                after = loss.coefficients(new, new_mask)
            assert float(movement_factors(before, after).abs().sum()) <= claimed * (1 + 1e-9)


# Real encoders: autograd gradients, clipped, summed, one record changed.


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
