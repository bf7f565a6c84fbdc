"""Low precision, of a model or of an engine's products: no unit adds more than its bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clipping_cases import (
    CASES,
    CAUSAL,
    COVERED,
    Case,
    Scaled,
    alone,
    bert,
    case_of,
    causal,
    check_low_precision,
    difference,
    norm_of,
    siamese,
    small,
    t5,
)
from clipping_cases import Positions as Places
from torch import Tensor, nn

from lit_dpret.privacy.clipping import contributions, make_engine

Patch = pytest.MonkeyPatch
ENGINES = ["ghost_tf32", "ghost_bf16"]


class Positions(nn.Module):
    """Linear layers over positions, some of which see the same input, with output gradients that are data."""

    def __init__(self, inner: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inner, out), nn.Linear(inner, out, bias=False)
        self.norm = nn.LayerNorm(out)

    def losses(self, rows: dict[str, Tensor]) -> Tensor:
        found = self.norm(self.first(rows["x"])) * rows["v"] + self.second(rows["x"]) * rows["u"]
        total: Tensor = found.flatten(1).sum(1)
        return total


def rows_of(seed: int, *, units: int, positions: int, inner: int, out: int, level: float, scale: float) -> Any:
    draw = torch.Generator().manual_seed(seed)

    def around(width: int, sign: Tensor) -> Tensor:
        common = torch.randn(units, 1, width, generator=draw)
        return common * sign[None, :, None] + level * torch.randn(units, positions, width, generator=draw)

    plain, turned = torch.ones(positions), torch.ones(positions)
    turned[::2] = -1
    return {"x": around(inner, plain), "v": scale * around(out, turned), "u": scale * around(out, turned)}


@pytest.mark.parametrize("clip", ["abadi", "automatic"])
@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
@pytest.mark.parametrize("engine", ENGINES)
def test_norms_are_close_above_and_sums_are_those_of_the_clipped_gradients(
    engine: str, clip_groups: Any, clip: Any
) -> None:
    torch.manual_seed(0)
    model = Positions(64, 48)
    rows = rows_of(1, units=6, positions=20, inner=64, out=48, level=1.0, scale=1.0)
    case = Case(model, model.losses, rows)
    unit_ids = torch.tensor([0, 0, 1, 2, 3, 3])
    exact = torch.stack([norm_of(g) for g in case.unit_gradients(unit_ids)])
    bound = float(exact.median())
    found = {}
    for name in ("ghost", engine):
        clipping = make_engine(name, model, max_grad_norm=bound, clip=clip, clip_groups=clip_groups)
        for _ in range(2):
            stats = case.run(clipping, unit_ids)
            found[name] = stats.norms.double(), clipping.take()
    ratio = found[engine][0] / exact
    assert bool(((ratio > 0.998) & (ratio < 1.02)).all())  # of the rounded gradient, which may be a little shorter
    assert difference(found[engine][1], found["ghost"][1]) < 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_a_unit_that_the_bound_says_nothing_of_is_computed_in_float64(engine: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(contributions, "ROOM", 0)
    shares = []
    for scale, level, bound in ((1e3, 1e-5, 1e-3), (1e25, 1.0, 1.0), (1e-25, 1.0, 1e-30), (1e12, 1e-4, 1.0)):
        for seed in range(3):
            model = nn.Linear(96, 80, bias=False)
            rows = rows_of(seed, units=1, positions=12, inner=96, out=80, level=level, scale=scale)

            def losses(model: Any = model, rows: Any = rows) -> Tensor:
                found: Tensor = (model(rows["x"]) * rows["v"]).sum((1, 2))
                return found

            shares.append(alone(make_engine(engine, model, max_grad_norm=bound), losses) / bound)
    assert max(shares) <= 1.0
    assert min(shares) > 0.5, "it is not thrown away either"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_broken_unit_adds_nothing_and_leaves_the_others_as_they_are(engine: str) -> None:
    model = Positions(64, 48)
    rows = rows_of(1, units=4, positions=20, inner=64, out=48, level=1.0, scale=1.0)
    clipping = make_engine(engine, model, max_grad_norm=1.0)
    kept = {name: value[torch.tensor([0, 1, 3])] for name, value in rows.items()}
    Case(model, model.losses, kept).run(clipping)
    expected = clipping.take()
    for broken in (math.nan, math.inf, 3.4e38):
        bad = {name: value.clone() for name, value in rows.items()}
        bad["u"][2, 5, 7] = broken
        stats = Case(model, model.losses, bad).run(clipping)
        found = clipping.take()
        assert stats.non_finite == 1 and difference(found, expected) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [t5, bert])
def test_every_unit_of_a_language_model_alone_is_within_the_bound(model: Any, engine: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(contributions, "ROOM", 0)  # nothing is written out for the sum
    for autocast in (False, True):
        check_low_precision(model(), engine=engine, autocast=autocast, least=0.9)


@pytest.mark.parametrize(
    ("name", "clip_groups"),
    [*((name, "flat") for name in sorted(COVERED)), ("t5_v1.0_tied", "per_layer"), ("conv_net", "per_layer")],
)
def test_under_bf16_autocast_every_contribution_is_within_the_bound(name: str, clip_groups: str) -> None:
    check_low_precision(COVERED[name](3), clip_groups=clip_groups, norm_within=0.2, floor=0.01)


OTHERS: dict[str, tuple[Callable[[], Case], dict[str, Any]]] = {
    "gemma": (lambda: causal(CAUSAL["gemma3"](), rows=3), {}),
    "siamese": (siamese, {}),
    "small": (lambda: small("tied"), {}),
    "bare parameters": (lambda: case_of(nn.Sequential(Scaled(), Places(), Scaled()), 3, 5, 4), {"engine": "vmap"}),
    "transposed convolution": (lambda: case_of(nn.ConvTranspose1d(5, 3, 2, stride=2), 3, 5, 4), {"engine": "vmap"}),
    **{
        f"weights of {name}": (CASES[name], {"weights": torch.bfloat16})
        for name in ("t5_tied_relu", "t5_untied_gated", "bert", "siamese", "embedding_tied_to_linear")
    },
}


@pytest.mark.like(3)
@pytest.mark.parametrize("room", [contributions.ROOM, math.inf], ids=["", "written out"])
@pytest.mark.parametrize("name", OTHERS)
def test_in_bf16_every_contribution_is_within_the_bound_in_fp32(name: str, room: float, monkeypatch: Patch) -> None:
    monkeypatch.setattr(contributions, "ROOM", room)
    build, settings = OTHERS[name]
    check_low_precision(build(), **settings)
