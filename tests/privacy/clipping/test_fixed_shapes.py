"""In batches of fixed shape nothing depends on who was drawn but the values: sums, norms and counts stay the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.errors import DataError
from lit_dpret.privacy.clipping import GhostClipping, contributions
from lit_dpret.privacy.clipping.units import UnitRows


def all_but(count: int, masked: int) -> Tensor:
    mask = torch.ones(count, dtype=torch.bool)
    mask[masked] = False
    return mask


def test_norms_and_sum_equal_one_unit_at_a_time(any_case: Any, lib: SimpleNamespace) -> None:
    lib.check_exact(any_case, mask=all_but(any_case.count, 0), fixed_shapes=True)


@pytest.mark.parametrize("name", ["t5", "distilbert", "siamese", "tied"])
@pytest.mark.parametrize("room", [0.0, 1e9], ids=["never written out", "always written out"])
def test_a_unit_of_several_rows_is_clipped_as_one(
    name: str, room: float, lib: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "ROOM", room)
    case = lib.small("tied", rows=6) if name == "tied" else getattr(lib, name)(rows=6)
    ids, mask = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([True, False, True])
    lib.check_exact(case, unit_ids=ids, mask=mask, fixed_shapes=True)


@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
def test_it_clips_automatically_and_per_layer(clip_groups: str, lib: SimpleNamespace) -> None:
    case = lib.t5(rows=5)
    lib.check_exact(case, mask=all_but(5, 0), clip="automatic", clip_groups=clip_groups, fixed_shapes=True)


class Texts(nn.Module):
    """A linear layer over positions, whose output at each is weighted by what the row says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3, bias=False)

    def forward(self, inputs: Tensor, weights: Tensor) -> Tensor:
        return (self.linear(inputs).sum(2) * weights).sum(1)


@pytest.mark.parametrize("room", [0.0, 1e9], ids=["never written out", "always written out"])
@pytest.mark.parametrize("mask", [[True, True, True, True], [True, True, False, True]], ids=["real", "masked"])
def test_a_broken_row_contributes_zero_and_is_counted_where_it_is_a_units(
    room: float, mask: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "ROOM", room)
    torch.manual_seed(0)
    module, inputs, weights = Texts(), torch.randn(4, 5, 6), torch.randn(4, 5)
    clean = torch.tensor([True, True, False, True])
    reference = GhostClipping(module, max_grad_norm=1.0)
    reference.add(lambda: module(inputs, weights), torch.arange(4), clean)
    inputs[2, 3] = torch.inf
    engine = GhostClipping(module, max_grad_norm=1.0, fixed_shapes=True)
    for _ in range(2):
        stats = engine.add(lambda: module(inputs, weights), torch.arange(4), torch.tensor(mask))
        assert int(stats.non_finite) == int(mask[2])
    twice = reference.take()["linear.weight"] * 2
    torch.testing.assert_close(engine.take()["linear.weight"], twice)


def test_a_unit_whose_terms_cancel_is_clipped_by_an_upper_bound_of_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "ROOM", 0.0)
    torch.manual_seed(0)
    module, count = Texts(), 64
    monkeypatch.setattr("lit_dpret.privacy.clipping.contributions._prefers_gram", lambda *_: True)
    inputs = torch.randn(3, 1, 6).expand(3, count, 6) * 30
    signs = torch.tensor([1.0, -1.0]).repeat(count // 2)
    weights = torch.stack([signs, signs * 0.999 + 0.001, torch.full((count,), 1e-4)])  # zero, tiny, and without signs
    exact = torch.linalg.vector_norm((weights.double()[..., None] * inputs.double()).sum(1), dim=1) * 3**0.5
    engine = GhostClipping(module, max_grad_norm=1e-2, fixed_shapes=True)
    for row in range(3):
        stats = engine.add(lambda: module(inputs, weights), torch.arange(3), torch.arange(3) == row)
        assert stats.norms[row] >= exact[row] * (1 - 1e-5)
        assert engine.take()["linear.weight"].norm() <= 1e-2 * (1 + 1e-4)
    torch.testing.assert_close(stats.norms[2], exact[2], rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("ids", [[0, 1, 1], [1, 0], [0, 0, 1], []], ids=["uneven", "unordered", "short", "empty"])
def test_rows_that_do_not_have_the_shape_are_refused(ids: list[int]) -> None:
    mask = torch.ones(2, dtype=torch.bool)
    with pytest.raises(DataError, match="equally many rows"):
        UnitRows.build(torch.tensor(ids, dtype=torch.long), mask, fixed=True)


def test_the_sum_begins_at_zero_again_after_it_was_taken_or_forgotten(lib: SimpleNamespace) -> None:
    case = lib.head()
    engine = GhostClipping(case.module, max_grad_norm=1.0, fixed_shapes=True)
    case.run(engine)
    first = engine.take()
    assert all(not total.any() for total in engine.take().values())
    case.run(engine)
    engine.forget()
    case.run(engine)
    assert all(torch.equal(total, first[name]) for name, total in engine.take().items())
