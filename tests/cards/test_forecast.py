"""The forecast of a plan: its noise under other laws and relations, and the grid of noise over batch with its knee."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from lit_dpret.cards.forecast import UNITS, epsilon_matrix, epsilon_over_steps, user_levels
from lit_dpret.cards.knee import KNEE_FACTOR, LOOSENESS, batch_sizes, knee_table, least_noise
from lit_dpret.privacy.accounting.accountant import calibrate_noise
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    Poisson,
    Shuffle,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.plan import PrivacyPlan

N, DELTA, STEPS, NOISE = 4000, 1e-5, 60, 1.1
TRUNCATED = TruncatedPoisson(sample_rate=0.02, cap=105, n=N)
BUDGET = PrivacyBudget(eps=3.0, delta=DELTA)
PLAN = PrivacyPlan(
    budget=BUDGET, law=TRUNCATED, steps=STEPS, noise_multiplier=NOISE, max_grad_norm=1.0, sensitivity=1.0,
    denominator=80.0, physical_batch_size=16, n_public=N,
)  # fmt: skip


def steps_of(law: Any, count: int = STEPS) -> GaussianRelease:
    return GaussianRelease(noise_multiplier=NOISE, law=law, count=count)


def of(law: Any, neighbours: Any, accountant: Any = "pld", steps: int = STEPS) -> float:
    return epsilon([steps_of(law, steps)], delta=DELTA, neighbours=neighbours, accountant=accountant)


@pytest.mark.costly
def test_each_cell_is_the_epsilon_of_that_law_and_relation() -> None:
    rows = epsilon_matrix(PLAN)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    matrix = {(row["sampling"], row["neighbours"]): row for row in rows}
    poisson, shuffle = Poisson(sample_rate=0.02), Shuffle(batch_size=80, n=N)
    for relation in ("zero_out", "add_or_remove", "replace_one"):
        assert matrix["truncated_poisson", relation]["epsilon"] == of(TRUNCATED, relation)
        assert matrix["poisson", relation]["epsilon"] == of(poisson, relation)
    for relation in ("zero_out", "replace_one"):
        assert matrix["shuffle", relation]["epsilon"] == of(shuffle, relation)
    assert not matrix["shuffle", "zero_out"]["amplified"] and matrix["poisson", "zero_out"]["amplified"]
    refused = {key for key, row in matrix.items() if row["accountant"] is None}  # which no library judges
    assert refused == {("fixed_size", "zero_out"), ("fixed_size", "add_or_remove"), ("shuffle", "add_or_remove")}
    for key in refused:
        assert matrix[key]["epsilon"] is None and f"sampling={key[0]}" in matrix[key]["why"]
    fixed = matrix["fixed_size", "replace_one"]
    assert fixed["epsilon"] == of(FixedSize(batch_size=80, n=N), "replace_one", "rdp") and fixed["accountant"] == "rdp"


@pytest.mark.slow
def test_every_level_is_the_group_epsilon_of_its_law_and_the_roomy_cap_keeps_nearly_that_of_poisson() -> None:
    levels = user_levels(PLAN)
    kinds = ["truncated_poisson", "truncated_poisson", "fixed_size", "shuffle"]
    assert [column["sampling"] for column in levels["columns"]] == kinds
    assert levels["roomy_cap"] > TRUNCATED.cap
    roomy = TruncatedPoisson(sample_rate=0.02, cap=levels["roomy_cap"], n=N)
    for column, law in zip(levels["columns"], (TRUNCATED, roomy, None, Shuffle(batch_size=80, n=N)), strict=True):
        assert [row["units"] for row in column["rows"]] == list(UNITS)
        for row in column["rows"]:
            if law is None:
                assert row["epsilon"] is None and "fixed_size" in row["why"]
                continue
            value = group_epsilon([steps_of(law)], delta=DELTA, units=row["units"])
            assert row["epsilon"] == (value if math.isfinite(value) else None)
            assert ("why" in row) == (row["epsilon"] is None)
            if law is roomy:
                plain = group_epsilon([steps_of(Poisson(sample_rate=0.02))], delta=DELTA, units=row["units"])
                assert row["epsilon"] == pytest.approx(plain, rel=1e-3)


@pytest.mark.costly
def test_where_units_are_private_only_what_needs_no_number_of_them_is_told() -> None:
    private = replace(
        PLAN, law=Poisson(sample_rate=0.02), n_public=None, budget=replace(BUDGET, neighbours="add_or_remove")
    )
    assert {row["sampling"] for row in epsilon_matrix(private)} == {"poisson"}
    [column] = user_levels(private)["columns"]
    assert all(row["epsilon"] is not None for row in column["rows"])
    everyone = replace(PLAN, law=FullBatch(), noise_multiplier=30.0)
    assert {row["sampling"] for row in epsilon_matrix(everyone)} == {"full_batch"}


def test_under_replace_one_several_sampled_units_are_refused_by_name() -> None:
    columns = user_levels(
        replace(PLAN, law=Poisson(sample_rate=0.02), budget=replace(BUDGET, neighbours="replace_one"))
    )["columns"]
    found = {column["sampling"]: column["rows"] for column in columns}
    assert found["poisson"][0]["epsilon"] == of(Poisson(sample_rate=0.02), "replace_one")
    assert all(row["epsilon"] is None and "poisson under" in row["why"] for row in found["poisson"][1:])
    assert all(row["epsilon"] is not None for row in found["shuffle"][:2])


def test_lines_rise_to_the_planned_steps_and_never_run_below_the_claim() -> None:
    lines = {(line["sampling"], line["neighbours"]): line["points"] for line in epsilon_over_steps(PLAN)}
    assert set(lines) == {(kind, r) for kind in ("poisson", "shuffle") for r in ("zero_out", "replace_one")}
    for (kind, relation), points in lines.items():
        counts, values = zip(*points, strict=True)
        assert counts[-1] == STEPS and list(counts) == sorted(counts) and list(values) == sorted(values)
        law: Any = Poisson(sample_rate=0.02) if kind == "poisson" else Shuffle(batch_size=80, n=N)
        for count, value in (points[0], points[-1]):
            assert 0.999999 * of(law, relation, steps=count) <= value <= 1.05 * of(law, relation, steps=count)


PUBLIC, HALF = 20_000, 1 / 40_000


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return knee_table(n=PUBLIC, eps=2.0, delta=HALF, neighbours="zero_out", batch=256, epochs=6.0)


def cells(table: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    width = len(table["epochs"])
    return {(cell["batch"], i % width): cell for i, cell in enumerate(table["cells"])}


@pytest.mark.slow
def test_every_cell_keeps_the_budget_with_hardly_more_noise_than_that_takes(table: dict[str, Any]) -> None:
    for cell in table["cells"][::7]:
        law = Poisson(sample_rate=cell["batch"] / PUBLIC)
        release = GaussianRelease(noise_multiplier=cell["noise_multiplier"], law=law, count=cell["steps"])
        assert epsilon([release], delta=HALF, neighbours="zero_out") <= 2.0
        least = calibrate_noise(eps=2.0, delta=HALF, neighbours="zero_out", law=law, steps=cell["steps"])
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


@pytest.mark.costly
def test_the_floor_is_what_as_many_steps_without_sampling_would_need(table: dict[str, Any]) -> None:
    cell = cells(table)[256, table["epochs"].index(6.0)]
    unsampled = calibrate_noise(eps=2.0, delta=HALF, neighbours="zero_out", law=FullBatch(), steps=cell["steps"])
    assert cell["noise_to_batch"] / cell["over_floor"] == pytest.approx(unsampled / PUBLIC, rel=2e-3)


def test_the_knee_is_the_smallest_batch_within_the_factor_of_the_floor(table: dict[str, Any]) -> None:
    assert table["factor"] == KNEE_FACTOR
    found, columns = cells(table), range(len(table["epochs"]))
    for column, knee in zip(columns, table["knees"], strict=True):
        over = {batch: found[batch, column]["over_floor"] for batch in table["batches"]}
        near = [batch for batch, factor in over.items() if factor is not None and factor <= KNEE_FACTOR]
        assert (knee["batch"], knee["epochs"]) == (min(near, default=None), table["epochs"][column])
        ratios = [r for b in table["batches"] if (r := found[b, column]["noise_to_batch"]) is not None]
        assert ratios == sorted(ratios, reverse=True), "larger batches have less noise for their size"
    ratios = [found[256, column]["noise_to_batch"] for column in columns]
    assert ratios == sorted(ratios), "and so do fewer passes"


@pytest.mark.parametrize(("n", "batch"), [(532_000, 1024), (2000, 40), (40, 1), (9, 9)])
def test_batch_sizes_are_doublings_of_the_planned_one(n: int, batch: int) -> None:
    sizes = batch_sizes(n, batch)
    assert batch in sizes and sizes == sorted(set(sizes)) and len(sizes) <= 10
    assert all(size == batch or (8 <= size <= n / 2 and isinstance(size, int)) for size in sizes)
    assert all(max(size, batch) % min(size, batch) == 0 for size in sizes)
