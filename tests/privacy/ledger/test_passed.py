"""Fingerprints of the values that weights have after each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.privacy.ledger.passed import Passed, held_by, passed_in

RUN = frozenset({"a run"})


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_dpret.privacy.ledger.passed._noted", [])


def steps(weight: Tensor, count: int = 3) -> list[Tensor]:
    """Noise a weight in place, as a run does; return its values after each step."""
    passed, found = Passed(["a run"], [weight]), []
    for _ in range(count):
        with torch.no_grad():
            weight += torch.randn_like(weight)
        passed.note([weight])
        found.append(weight.detach().clone())
    return found


@pytest.mark.parametrize("shape", [(3,), (16,), (64, 3), (700, 11)])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_every_step_is_known_and_other_values_are_not(shape: tuple[int, ...], kind: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(shape, dtype=kind))
    begun = weight.detach().clone()
    for value in steps(weight):
        assert passed_in(value) == passed_in(value.float()) == RUN
        assert passed_in(value + torch.randn_like(value)) == passed_in(value.reshape(1, *shape)) == frozenset()
    assert passed_in(begun) == passed_in(begun.half()) == frozenset()


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_copy_of_lower_precision_is_known(kind: torch.dtype) -> None:
    for value in steps(nn.Parameter(torch.randn(40, 5))):
        assert passed_in(value.to(kind)) == passed_in(value.to(kind).float()) == RUN


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_zeros_and_ones_are_everybodys(constant: float) -> None:
    passed = Passed(["a run"], [])
    passed.note([torch.full((40,), constant), torch.ones(40) + 1e-4 * torch.randn(40)])
    assert not passed_in(torch.full((40,), constant)) and not passed_in(torch.ones(40).bfloat16())


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_what_one_step_of_adam_makes_of_a_short_constant_is_everybodys(constant: float) -> None:
    passed = Passed(["run"], [])
    moved = constant + 0.01 * torch.tensor([1.0, -1.0, 0.0, 1.0] * 4)
    passed.note([moved, moved.repeat(2)])
    assert not passed_in(moved) and not passed_in(moved.half())
    assert passed_in(moved.repeat(2)) == {"run"}, "thirty-two signs are not coincidence"


def test_values_are_read_anew_where_a_weight_is_a_transposed_one_or_has_moved() -> None:
    for value in steps(nn.Parameter(torch.randn(8, 5).t())):
        assert passed_in(value) == RUN
    weight, passed = nn.Parameter(torch.randn(8)), Passed(["a run"], [])
    passed.note([weight])
    weight.data = torch.randn(8)
    passed.note([weight])
    assert passed_in(weight) == RUN


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: tensor,
        lambda tensor: {"w": tensor},
        lambda tensor: [{"w": tensor}],
        lambda tensor: nn.ParameterList([nn.Parameter(tensor)]),
        lambda tensor: Holder({"w": tensor}),
    ],
)
def test_an_average_is_found_where_people_keep_it(wrap: Any) -> None:
    tensor = torch.randn(4, 3)
    (found,) = held_by([Holder(wrap(tensor)), Holder("text"), Holder({"w": torch.ones(2)})], frozenset({(4, 3)}))
    assert torch.equal(found, tensor)


def test_a_weight_whose_memory_was_freed_is_not_looked_at() -> None:
    """FSDP2 does so with what it gathered."""
    steps(torch.randn(50))
    freed = nn.Parameter(torch.randn(50))
    freed.untyped_storage().resize_(0)
    assert passed_in(freed) == frozenset()
