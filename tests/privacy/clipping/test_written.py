"""Unit gradients that are written out and kept: exact like the others, bounded, and chosen by their size."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lit_dpret.privacy.clipping import contributions, ghost, make_engine
from lit_dpret.privacy.clipping.contributions import Dense, Lookup, Outer, Written, are_small
from lit_dpret.privacy.clipping.units import UnitRows

Patch = pytest.MonkeyPatch
WAYS = pytest.mark.parametrize("room", [0.0, math.inf], ids=["never", "always"])


@pytest.fixture(autouse=True)
def taken(monkeypatch: Patch) -> list[int]:
    """Counts the gradients that were written out."""
    found = []
    plain = contributions.write_out

    def counted(*arguments: Any) -> list[Written]:
        found.append(1)
        return plain(*arguments)

    monkeypatch.setattr(ghost, "write_out", counted)
    return found


@WAYS
def test_norms_and_sum_are_exact_whichever_way_is_taken(
    room: float, any_case: Any, lib: SimpleNamespace, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(contributions, "ROOM", room)
    lib.check_exact(any_case)


@WAYS
@pytest.mark.parametrize("name", ["t5_tied_relu", "bert", "siamese", "two_linears_with_one_weight"])
def test_units_of_several_rows_masks_and_the_other_clip_function(
    room: float, name: str, lib: SimpleNamespace, monkeypatch: Patch, taken: list[int]
) -> None:
    monkeypatch.setattr(contributions, "ROOM", room)
    case = lib.case(name)
    count = case.count
    ids, mask = torch.arange(count) // 2, torch.arange(count) != 1
    lib.check_exact(case, unit_ids=ids, mask=mask)
    lib.check_exact(case, unit_ids=ids.flip(0), mask=mask, clip="automatic")
    assert bool(taken) == (room > 0)


def test_what_takes_less_room_than_its_parts_is_written_out(lib: SimpleNamespace, taken: list[int]) -> None:
    rows = UnitRows.build(torch.arange(3), torch.ones(3, dtype=torch.bool))

    def small(positions: int) -> bool:
        use = Outer(torch.zeros(3, positions, 8), torch.zeros(3, positions, 16))
        return are_small([[use]], [torch.Size((16, 8))], rows)

    assert not small(4) and small(5) and small(6), "16 x 8 against 24 for each position, and a quarter of room"
    shared = torch.zeros(3, 4, 8)
    uses = [[Outer(shared, torch.zeros(3, 4, 8))] for _ in range(3)]
    assert not are_small(uses, [torch.Size((8, 8))] * 3, rows), "the inputs are held once"
    mixed = [[Outer(shared, torch.zeros(3, 50, 8)), Lookup(torch.zeros(3, 5).long(), torch.zeros(3, 5, 8))]]
    assert not are_small(mixed, [torch.Size((8, 8))], rows)
    assert not are_small([[Dense(torch.zeros(3, 8))]], [torch.Size((8,))], rows)


def test_a_masked_unit_takes_no_room() -> None:
    use = Outer(torch.zeros(3, 2, 8), torch.zeros(3, 2, 16))
    for mask, expected in (([True, True, True], False), ([True, False, False], True)):
        rows = UnitRows.build(torch.arange(3), torch.tensor(mask))
        assert are_small([[use]], [torch.Size((16, 8))], rows) is expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_unit_is_left_out_of_the_written_sum(value: float, lib: SimpleNamespace, monkeypatch: Patch) -> None:
    monkeypatch.setattr(contributions, "ROOM", math.inf)
    model = nn.Linear(5, 4, bias=False).double()
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    x[1, 0, 0] = value
    case = lib.Case(model, lambda b: model(b["x"]).sin().sum((1, 2)), {"x": x})
    lib.check_dropped(case, 1, bound=1e6)


@WAYS
def test_several_physical_batches_add_up(room: float, lib: SimpleNamespace, monkeypatch: Patch) -> None:
    monkeypatch.setattr(contributions, "ROOM", room)
    case = lib.case("t5_tied_relu")
    whole = make_engine("ghost", case.module, max_grad_norm=0.5)
    case.run(whole)
    parts = make_engine("ghost", case.module, max_grad_norm=0.5)
    for unit in range(case.count):
        case.run(parts, mask=torch.arange(case.count) == unit)
    assert lib.difference(parts.take(), whole.take()) < 1e-10


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_in_bf16_a_written_contribution_is_within_the_bound_in_fp32(
    weights: torch.dtype, lib: SimpleNamespace, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(contributions, "ROOM", math.inf)
    lib.check_low_precision(lib.case("bert"), weights=weights)
