"""DP centroids: what one unit can move, by trying all neighbours; and what they are worth."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_dpret.federated.centroids import CentroidPlan, dp_centroids, table_of

VALUES = st.floats(-3, 3, allow_nan=False)
ROW = st.lists(VALUES, min_size=2, max_size=2)


def neighbours(
    rows: list[list[float]], others: list[list[float]], units: list[int]
) -> list[tuple[int, Tensor, list[int]]]:
    """Every way to empty a unit (weight 1) or to put other rows in its place (weight 2)."""
    found = []
    for unit in set(units):
        left = [row for row, whose in zip(rows, units, strict=True) if whose != unit]
        names = [whose for whose in units if whose != unit]
        found.append((1, torch.tensor(left, dtype=torch.float64).reshape(-1, 2), names))
        for other in others:
            found.append(
                (2, torch.tensor([*left, other, other, other], dtype=torch.float64), [*names, unit, unit, unit])
            )
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5), st.lists(ROW, min_size=1, max_size=3), st.booleans(),
       st.sampled_from([0.3, 1.5]), st.integers(0, 5))  # fmt: skip
def test_no_neighbour_moves_the_table_further_than_the_sensitivity_says(
    rows: list[list[float]], others: list[list[float]], normalise: bool, radius: float, seed: int
) -> None:
    plan = CentroidPlan(count=3, normalise=normalise, radius=radius, seed=seed)
    units = [i // 2 for i in range(len(rows))]
    centroids = plan.start(2)
    table = table_of(torch.tensor(rows, dtype=torch.float64), centroids, plan, units)
    for times, other, whose in neighbours(rows, others, units):
        moved = float((table - table_of(other, centroids, plan, whose)).norm())
        assert moved <= times * plan.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("count", [5, 26, 27, 40])
def test_rows_between_two_centroids_fall_to_one_of_them_whoever_else_is_there(count: int) -> None:
    plan, coins = CentroidPlan(count=2), torch.Generator().manual_seed(count)
    side = torch.randn(6, generator=coins, dtype=torch.float64)
    rows = torch.randn(count, 6, generator=coins, dtype=torch.float64)
    rows -= (rows @ side / (side @ side))[:, None] * side
    centroids = torch.stack([side, -side])
    table = table_of(rows, centroids, plan)
    for gone in range(count):
        left = torch.cat([rows[:gone], rows[gone + 1 :]])
        assert float((table - table_of(left, centroids, plan)).norm()) <= plan.sensitivity * (1 + 1e-9)


def test_the_sensitivity_is_reached_and_not_stated_larger_than_it_is() -> None:
    plan = CentroidPlan(count=2)
    rows = torch.tensor([[5.0, 0.0], [7.0, 0.0], [0.0, 1.0]])
    full = table_of(rows, plan.start(2), plan, ["a", "a", "b"])
    gone = table_of(rows[2:], plan.start(2), plan, ["b"])
    assert float((full - gone).norm()) == pytest.approx(plan.sensitivity) == pytest.approx(math.sqrt(2))


def test_a_row_that_is_not_finite_counts_for_nothing() -> None:
    plan = CentroidPlan(count=2)
    rows = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [float("inf"), 1.0]])
    assert torch.equal(table_of(rows, plan.start(2), plan), table_of(rows[:1], plan.start(2), plan))


def test_only_what_was_noised_comes_out_and_it_is_asked_for_once_an_iteration() -> None:
    plan = CentroidPlan(count=4, iterations=3)
    asked: list[float] = []

    def nothing(table: Tensor, sensitivity: float) -> Tensor:
        asked.append(sensitivity)
        return torch.zeros_like(table)

    one = dp_centroids(torch.randn(50, 6), plan, nothing)
    two = dp_centroids(torch.randn(3, 6), plan, nothing)
    assert torch.equal(one, two) and asked == [plan.sensitivity] * 6


def test_without_noise_clusters_are_found_and_with_it_centroids_are_nearer_than_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(4, 16, generator=generator), dim=-1)
    rows = centres.repeat_interleave(100, 0) + 0.05 * torch.randn(400, 16, generator=generator)
    plan = CentroidPlan(count=12, iterations=4)

    def nearness(centroids: Tensor) -> float:
        """How near the nearest centroid is to each centre, as a cosine, on average."""
        return float((F.normalize(centroids.float(), dim=-1) @ centres.T).max(0).values.mean())

    exact = nearness(dp_centroids(rows, plan, lambda table, _: table))
    noisy = nearness(dp_centroids(rows, plan, lambda t, c: t + 2 * c * torch.randn(t.shape, generator=generator)))
    assert exact > 0.98 and noisy > 0.8 > nearness(plan.start(16)) + 0.1
