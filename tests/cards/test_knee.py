"""The grid of noise over batch: each cell keeps the budget, and the knee is where the table says it is."""

from __future__ import annotations

from typing import Any

import pytest

from lit_dpret.cards.knee import KNEE_FACTOR, LOOSENESS, batch_sizes, knee_table, least_noise
from lit_dpret.privacy.accounting.accountant import calibrate_noise
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease, Poisson

N, DELTA = 20_000, 1 / 40_000


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return knee_table(n=N, eps=2.0, delta=DELTA, neighbours="zero_out", batch=256, epochs=6.0)


def cells(table: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    return {(cell["batch"], column): cell for column, cell in each(table)}


def each(table: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    width = len(table["epochs"])
    return [(i % width, cell) for i, cell in enumerate(table["cells"])]


@pytest.mark.slow
def test_every_cell_keeps_the_budget_with_hardly_more_noise_than_that_takes(table: dict[str, Any]) -> None:
    for _, cell in each(table)[::7]:
        law = Poisson(sample_rate=cell["batch"] / N)
        release = GaussianRelease(noise_multiplier=cell["noise_multiplier"], law=law, count=cell["steps"])
        assert epsilon([release], delta=DELTA, neighbours="zero_out") <= 2.0
        least = calibrate_noise(eps=2.0, delta=DELTA, neighbours="zero_out", law=law, steps=cell["steps"])
        assert cell["noise_multiplier"] <= (1 + LOOSENESS) * least
        assert cell["noise_to_batch"] == cell["noise_multiplier"] / cell["batch"]


@pytest.mark.parametrize(
    ("eps", "batch", "epochs"),
    [(3.0, 65_536, 3.0), *(pytest.param(eps, 64, 90.0, marks=pytest.mark.slow) for eps in (0.5, 16.0))],
)
def test_cells_at_the_corners_are_as_close_under_replace_one(eps: float, batch: int, epochs: float) -> None:
    law, promise = Poisson(sample_rate=batch / 532_000), {"delta": 0.5 / 532_000, "neighbours": "replace_one"}
    steps = round(epochs / law.sample_rate)
    found = least_noise(rate=law.sample_rate, steps=steps, eps=eps, start=1.0, **promise)
    assert found is not None and found <= (1 + LOOSENESS) * calibrate_noise(law=law, steps=steps, eps=eps, **promise)
    assert epsilon([GaussianRelease(noise_multiplier=found, law=law, count=steps)], **promise) <= eps


def test_the_floor_is_what_as_many_steps_without_sampling_would_need(table: dict[str, Any]) -> None:
    cell = cells(table)[256, table["epochs"].index(6.0)]
    unsampled = calibrate_noise(eps=2.0, delta=DELTA, neighbours="zero_out", law=FullBatch(), steps=cell["steps"])
    assert cell["noise_to_batch"] / cell["over_floor"] == pytest.approx(unsampled / N, rel=2e-3)


def test_the_knee_is_the_smallest_batch_within_the_factor_of_the_floor(table: dict[str, Any]) -> None:
    assert table["factor"] == KNEE_FACTOR
    found = cells(table)
    for column, knee in enumerate(table["knees"]):
        near = [
            batch
            for batch in table["batches"]
            if (over := found[batch, column]["over_floor"]) is not None and over <= KNEE_FACTOR
        ]
        assert knee["batch"] == (min(near) if near else None)
        assert knee["epochs"] == table["epochs"][column]


def test_larger_batches_and_fewer_passes_have_less_noise_for_their_size(table: dict[str, Any]) -> None:
    found = cells(table)
    for column in range(len(table["epochs"])):
        ratios = [r for b in table["batches"] if (r := found[b, column]["noise_to_batch"]) is not None]
        assert ratios == sorted(ratios, reverse=True)
    ratios = [found[256, column]["noise_to_batch"] for column in range(len(table["epochs"]))]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize(("n", "batch"), [(532_000, 1024), (12_889, 256), (2000, 40), (100, 50), (40, 1), (9, 9)])
def test_batch_sizes_are_doublings_of_the_planned_one(n: int, batch: int) -> None:
    sizes = batch_sizes(n, batch)
    assert batch in sizes and sizes == sorted(set(sizes)) and len(sizes) <= 10
    assert all(size == batch or (8 <= size <= n / 2 and isinstance(size, int)) for size in sizes)
    assert all(max(size, batch) % min(size, batch) == 0 for size in sizes)
