"""One unit moves the sum by at most max_grad_norm: whatever the model, the unit, or the precision."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from clipping_cases import ENGINES, Case, add, check_dropped, difference, lowered, norm_of
from torch import Tensor, nn

from lit_dpret.privacy.clipping import contributions, make_engine


def moved(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(norm_of({n: one[n].double() - other[n].double() for n in one}))


class RandomModel(nn.Module):
    """Random widths, sharing and depth, from the layers that are covered."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def pick(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=draw))

        self.width, self.calls = pick(2, 9), pick(1, 4)
        self.embed = nn.Embedding(11, self.width, padding_idx=0 if pick(0, 2) else None)
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width, bias=bool(pick(0, 2))) for _ in range(pick(1, 4)))
        self.norm = nn.LayerNorm(self.width) if pick(0, 2) else nn.RMSNorm(self.width)
        self.out = nn.Linear(self.width, 11, bias=bool(pick(0, 2)))
        if pick(0, 2):
            self.out.weight = self.embed.weight
        self.scale = 10.0 ** pick(-3, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            for _ in range(self.calls):
                hidden = self.norm(hidden + layer(hidden).tanh())
        return self.scale * self.out(hidden).log_softmax(-1)[:, :, 3].mean(1)


@pytest.mark.parametrize("clip", ["abadi", "automatic"])
@pytest.mark.parametrize("engine", ["ghost", "loop"])
@pytest.mark.parametrize("seed", range(8))
def test_adding_or_removing_one_unit_moves_the_sum_by_at_most_the_bound(seed: int, engine: str, clip: str) -> None:
    torch.manual_seed(seed)
    model = RandomModel(seed).double()
    rows, bound = 6, 10.0 ** (seed % 3 - 1)
    case = Case(model, lambda batch: model(batch["ids"]), {"ids": torch.randint(0, 11, (rows, 5))})
    unit_ids = torch.tensor([0, 1, 1, 2, 0, 3])
    clipping = make_engine(engine, model, max_grad_norm=bound, clip=clip)
    case.run(clipping, unit_ids)
    whole = clipping.take()
    largest = 0.0
    for unit in range(4):
        mask = torch.arange(4) != unit
        case.run(clipping, unit_ids, mask)
        masked = clipping.take()
        keep = (unit_ids != unit).nonzero().flatten()
        case.run(clipping, unit_ids[keep], mask, rows=case.take(keep))
        removed = clipping.take()
        assert difference(masked, removed) < 1e-10
        assert moved(whole, masked) <= bound
        largest = max(largest, moved(whole, masked))
    if clip == "automatic":
        assert largest > 0.5 * bound or model.scale < 1


@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
def test_terms_that_cancel_in_fp32_are_computed_again_in_float64(clip_groups: str) -> None:
    """Two tokens with opposite gradients: the Gram matrix's entries are 1e8 times their sum.

    Per layer, the large gradient of another layer must not hide it.
    """
    model = nn.ModuleDict({"cancels": nn.Linear(64, 64, bias=False)})
    if clip_groups == "per_layer":
        model["large"] = nn.Linear(64, 1, bias=False)
    x = torch.randn(2, 1, 64).expand(2, 2, 64) + 1e-4 * torch.randn(2, 2, 64)
    sign = torch.tensor([1.0, -1.0])[:, None]

    def losses(batch: dict[str, Tensor]) -> Tensor:
        large = 1e6 * model["large"](batch["x"]).sum((1, 2)) if "large" in model else 0.0
        return 1e3 * (model["cancels"](batch["x"]) * sign).sum((1, 2)) + large

    case = Case(model, losses, {"x": x})
    clipping = make_engine("ghost", model, max_grad_norm=1e-3, clip_groups=clip_groups)
    exact = (1e3 * (x * sign).sum(1)).double().norm(dim=1) * 64**0.5
    for unit in range(2):
        stats = case.run(clipping, mask=torch.arange(2) == unit)
        for total in clipping.take().values():
            share = float(total.double().norm()) * math.sqrt(len(model)) / 1e-3
            assert 0.99 <= share <= 1 + 1e-6  # what rounding may add to the sum is taken off the bound
        assert clip_groups == "per_layer" or math.isclose(stats.norms[unit], exact[unit], rel_tol=1e-4)


Break = Callable[[nn.ModuleList, Tensor, Tensor], Tensor]
FINITE_LOSS: dict[str, tuple[float, Break]] = {
    "root of zero": (0.0, lambda m, x, flag: m[2]((m[0](x).square() * flag).sqrt()).sin()),
    "root of zero in one layer": (0.0, lambda m, x, flag: m[2](m[1](m[0](x))).sin() + (m[3](x) ** 2 * flag).sqrt()),
    "root of a zero loss": (0.0, lambda m, x, flag: (m[2](m[0](x)).square().sum((1, 2), True) * flag).sqrt()),
    "infinity cut off": (0.0, lambda m, x, flag: m[2](finite((m[0](x) / flag).exp()).tanh()).sin()),
    "a missing value that is masked": (0.0, lambda m, x, flag: m[2](finite(m[0](x + (x - x) / flag))).sin()),
}
BROKEN_LOSS: dict[str, Break] = {
    "the input": lambda m, x, flag: m[2](m[1](m[0](x * flag))).square(),
    "the loss": lambda m, x, flag: m[2](m[1](m[0](x))).square() * flag,
    "the loss alone": lambda m, x, flag: m[2](m[0](x)).square() + flag,
    # zero gradients that pass a norm of NaN become NaN; removing this unit must not bring the others back
    "a normalised output": lambda m, x, flag: nn.functional.normalize(m[0](x * flag), dim=-1).exp(),
}
BREAKS = FINITE_LOSS | {
    f"{value} in {name}": (value, broken)
    for name, broken in BROKEN_LOSS.items()
    for value in (math.nan, math.inf, -math.inf)
}


def finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


@pytest.mark.like(4)
@pytest.mark.parametrize(("rows", "clip_groups"), [(1, "flat"), (2, "flat"), (1, "per_layer")])
@pytest.mark.parametrize(
    ("kind", "engine"),
    # Opacus takes the inputs of a linear layer that are NaN for zeros, whoever is in the batch.
    [(kind, engine) for kind in BREAKS for engine in ENGINES if (kind, engine) != (list(FINITE_LOSS)[-1], "opacus")],
)
def test_a_broken_unit_contributes_zero_is_counted_and_leaves_the_others_alone(
    kind: str, engine: str, rows: int, clip_groups: str
) -> None:
    model = nn.ModuleList([nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(5, 3)]).double()
    value, losses = BREAKS[kind]
    data = {"x": torch.randn(8, 2, 5).double().abs(), "flag": torch.ones(8, 1, 1).double()}
    data["flag"][2] = value
    case = Case(model, lambda b: losses(model, b["x"], b["flag"]).flatten(1).sum(1), data)
    unit_ids = torch.arange(8) // rows
    assert bool(case.losses(data).isfinite().all()) == (kind in FINITE_LOSS)
    assert norm_of(case.unit_gradients(unit_ids)[2 // rows]).isfinite() == ("the loss alone" in kind)
    check_dropped(case, 2 // rows, engine=engine, unit_ids=unit_ids, clip_groups=clip_groups)


LAYERS_WITH_TIME_FIRST = {
    "GRU": lambda: nn.GRU(4, 4, batch_first=True),
    "LSTM": lambda: nn.LSTM(4, 4, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("positions", [6, 12])
@pytest.mark.parametrize("layer", LAYERS_WITH_TIME_FIRST)
def test_a_broken_unit_leaves_others_alone_where_a_layer_puts_time_before_the_batch(
    layer: str, positions: int, value: float
) -> None:
    model = nn.ModuleList([LAYERS_WITH_TIME_FIRST[layer](), nn.Linear(4, 1)]).double()
    x = torch.randn(6, positions, 4, dtype=torch.float64)
    x[2] = value

    def losses(batch: dict[str, Tensor]) -> Tensor:
        hidden = model[0](batch["x"])
        hidden = hidden if isinstance(hidden, Tensor) else hidden[0]
        return model[1](hidden.mean(1)).squeeze(1)

    case = Case(model, losses, {"x": x})
    clipping = make_engine("loop", model, max_grad_norm=0.1)
    case.run(clipping)
    found = clipping.take()
    case.run(clipping, rows={"x": x[torch.arange(6) != 2]})
    gap = norm_of({name: found[name] - others for name, others in clipping.take().items()})
    assert float(gap) <= 0.1


@pytest.mark.parametrize("width", [2, 64])
def test_a_finite_gradient_too_large_for_fp32_squares_is_clipped_not_dropped(width: int) -> None:
    model = nn.Linear(width, width)
    case = Case(model, lambda b: 1e15 * model(b["x"]).sum((1, 2)), {"x": torch.full((2, 2, width), 1e10)})
    clipping = make_engine("ghost", model, max_grad_norm=1.0)
    stats = case.run(clipping)
    assert stats.non_finite == 0 and stats.clipped == 2
    assert math.isclose(float(norm_of(clipping.take())), lowered(2.0), rel_tol=1e-5)


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("room", [0.0, contributions.ROOM], ids=["parts", "written_out"])
@pytest.mark.parametrize("size", [1e-5, 1.0, 1e12])
def test_a_unit_without_a_gradient_is_in_no_count_whatever_its_inputs_are(
    size: float, room: float, fixed_shapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "ROOM", room)
    table, linear, wide = nn.Embedding(9, 80), nn.Linear(80, 96), nn.Linear(96, 80, bias=False)
    model, silent = nn.ModuleList([table, linear, nn.LayerNorm(96), wide]), torch.tensor([1.0, 0.0, 1e-5])
    ids = torch.randint(0, 9, (3, 12))

    def losses() -> Tensor:
        hidden = model[2](linear(size * table(ids)))
        found: Tensor = wide(size * hidden).sum((1, 2)) * silent
        return found

    clipping = make_engine("ghost", model, max_grad_norm=1e30, fixed_shapes=fixed_shapes)
    stats = add(clipping, losses, 3)
    assert int(stats.clipped) == 0 and int(stats.within) == 2
