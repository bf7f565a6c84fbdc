"""Convolutions in every geometry, alone and in a residual network with GroupNorm: clipped exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clipping_cases import add, case_of, check_exact, check_refused
from torch import Tensor, nn

from lit_dpret.privacy.clipping import contributions, make_engine

SPACE = {1: (9,), 2: (7, 8), 3: (4, 5, 6)}
KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

GEOMETRIES: dict[str, dict[str, Any]] = {
    "one_by_one": dict(kernel_size=1),
    "plain": dict(kernel_size=3),
    "without_bias": dict(kernel_size=3, bias=False),
    "stride": dict(kernel_size=2, stride=2),
    "stride_that_leaves_a_rest": dict(kernel_size=2, stride=3, padding=1),
    "padding": dict(kernel_size=3, padding=2),
    "dilation": dict(kernel_size=2, dilation=3, padding=1),
    "same": dict(kernel_size=4, padding="same"),
    "valid": dict(kernel_size=3, padding="valid"),
    "groups": dict(kernel_size=3, padding=1, groups=2),
    "depthwise": dict(kernel_size=3, padding=1, groups=4, out=8),
    "all": dict(kernel_size=3, stride=2, padding=2, dilation=2, groups=2),
    "circular": dict(kernel_size=3, padding=1, padding_mode="circular"),
    "reflect": dict(kernel_size=3, padding=1, padding_mode="reflect"),
    "replicate": dict(kernel_size=3, padding=1, padding_mode="replicate", groups=2),
}


def layer(space: int, geometry: str, **changes: Any) -> nn.Module:
    settings = GEOMETRIES[geometry] | changes
    out = settings.pop("out", 6)
    return KINDS[space](4, out, **settings)


@pytest.fixture(params=["gram", "written_out"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of computing a norm, whatever they cost."""
    monkeypatch.setattr(contributions, "_prefers_gram", lambda *_: request.param == "gram")


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
@pytest.mark.parametrize("space", [1, 2])
def test_a_convolution_is_clipped_exactly(space: int, geometry: str) -> None:
    model = nn.Sequential(nn.Linear(SPACE[space][-1], SPACE[space][-1]), layer(space, geometry))
    check_exact(case_of(model, 5, 4, *SPACE[space]))


@pytest.mark.parametrize("geometry", ["all", "same", "replicate"])
def test_a_convolution_over_three_axes_is_clipped_exactly(geometry: str) -> None:
    check_exact(case_of(layer(3, geometry), 3, 4, *SPACE[3]))


class Shared(nn.Module):
    """One kernel used by three layers, with other strides or with other groups."""

    def __init__(self, groups: bool) -> None:
        super().__init__()
        self.groups = groups
        self.plain = nn.Conv1d(2, 4, 3, bias=False)
        self.other = nn.Conv1d(4, 4, 3, groups=2, bias=False) if groups else nn.Conv1d(2, 4, 3, stride=2, bias=False)
        self.other.weight = self.plain.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.plain(x)
        if self.groups:
            return self.other(hidden.sin())
        return self.other(hidden.sin()[:, :2]) + self.plain(x)[..., ::2][..., :3]


@pytest.mark.parametrize("groups", [False, True])
def test_one_kernel_of_several_layers_is_one_parameter(groups: bool) -> None:
    check_exact(case_of(Shared(groups), 5, 2, 9))


def test_images_folded_into_the_batch_belong_to_their_row() -> None:
    case = case_of(model := nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4)), 4, 3, 1, 6, 5)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        return model(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sin().square().flatten(2).sum(2).prod(1)

    case.losses = losses
    check_exact(case)
    check_exact(case, unit_ids=torch.tensor([1, 0, 1, 2]))


@pytest.mark.parametrize(
    ("shape", "groups"), [((6,), 1), ((6,), 2), ((6, 5), 1), ((6, 5), 6), ((6, 3, 4), 2), ((6, 3, 4), 6)]
)
def test_group_norm_is_clipped_exactly(shape: tuple[int, ...], groups: int) -> None:
    norm = nn.GroupNorm(groups, 6, eps=0.1)
    nn.init.normal_(norm.weight)
    check_exact(case_of(norm, 5, *shape))


def test_how_much_is_done_at_a_time_does_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "CHUNK", {"cpu": 1})
    check_exact(case_of(layer(2, "all"), 4, 4, *SPACE[2]))


def test_an_input_without_a_batch_is_refused() -> None:
    case = case_of(model := nn.Conv1d(4, 2, 3), 1, 4, 9)
    case.losses = lambda b: model(b["x"][0]).sum()[None]
    check_refused(case, r"shape \(4, 9\): no batch axis")


@pytest.mark.parametrize("what", ["broken", "cancelling"])
@pytest.mark.parametrize("units", [1, 3])
def test_a_batch_without_a_unit_that_is_summed_in_float32_breaks_nothing(units: int, what: str) -> None:
    model, x = nn.Conv1d(64, 96, 3, bias=False), torch.randn(units, 64, 20)
    weights = torch.full((units, 96, 18), torch.nan)
    if what == "cancelling":
        x = torch.ones(units, 64, 20) + 1e-7 * x
        weights = 1e6 * torch.randn(units, 96, 1) * torch.tensor([1.0, -1.0]).repeat(9)
    clipping = make_engine("ghost", model, max_grad_norm=1.0)
    for wanted in (torch.randn(units, 96, 18), weights):
        stats = add(clipping, lambda wanted=wanted: (model(x) * wanted).sum((1, 2)), units)
        assert float(clipping.take()["weight"].norm()) <= units
    assert int(stats.non_finite) == (units if what == "broken" else 0)
