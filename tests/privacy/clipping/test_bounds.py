"""One unit moves the sum by at most max_grad_norm: whatever the model, the unit, or the precision."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.privacy.clipping import contributions, make_engine
from lit_dpret.privacy.clipping.base import clip_factors


def moved(lib: SimpleNamespace, one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(lib.norm_of({n: one[n].double() - other[n].double() for n in one}))


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
def test_adding_or_removing_one_unit_moves_the_sum_by_at_most_the_bound(
    seed: int, engine: str, clip: str, lib: SimpleNamespace
) -> None:
    torch.manual_seed(seed)
    model = RandomModel(seed).double()
    rows, bound = 6, 10.0 ** (seed % 3 - 1)
    case = lib.Case(model, lambda batch: model(batch["ids"]), {"ids": torch.randint(0, 11, (rows, 5))})
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
        assert lib.difference(masked, removed) < 1e-10
        assert moved(lib, whole, masked) <= bound
        largest = max(largest, moved(lib, whole, masked))
    if clip == "automatic":
        assert largest > 0.5 * bound or model.scale < 1


@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
def test_a_single_unit_of_a_large_gradient_moves_the_sum_by_exactly_the_bound(
    clip_groups: str, lib: SimpleNamespace
) -> None:
    case = lib.t5(rows=3)
    clipping = make_engine("ghost", case.module, max_grad_norm=1e-6, clip_groups=clip_groups)
    for unit in range(3):
        case.run(clipping, mask=torch.arange(3) == unit)
        assert math.isclose(float(lib.norm_of(clipping.take())), 1e-6 / (1 + 1e-9), rel_tol=1e-10)


@pytest.mark.parametrize("name", ["t5_tied_relu", "t5_untied_gated", "bert", "siamese", "embedding_tied_to_linear"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_in_bf16_every_contribution_is_within_the_bound_in_fp32(
    name: str, weights: torch.dtype, lib: SimpleNamespace
) -> None:
    lib.check_low_precision(lib.case(name), weights=weights)


def test_terms_that_cancel_in_fp32_are_computed_again_in_float64(lib: SimpleNamespace) -> None:
    """Two tokens with opposite gradients: the Gram matrix's entries are 1e8 times their sum."""
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(2, 1, 64).expand(2, 2, 64) + 1e-4 * torch.randn(2, 2, 64)
    sign = torch.tensor([1.0, -1.0])[:, None]

    def losses(batch: dict[str, Tensor]) -> Tensor:
        return 1e3 * (model(batch["x"]) * sign).sum((1, 2))

    case = lib.Case(model, losses, {"x": x})
    difference = (1e3 * (x * sign).sum(1)).double()
    exact = difference.norm(dim=1) * 64**0.5
    clipping = make_engine("ghost", model, max_grad_norm=1e-3)
    stats = case.run(clipping)
    assert torch.allclose(stats.norms, exact, rtol=1e-4)
    clipping.take()
    for unit in range(2):
        case.run(clipping, mask=torch.arange(2) == unit)
        assert float(lib.norm_of(clipping.take())) <= 1e-3


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop", "opacus"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["input", "loss"])
def test_a_broken_unit_contributes_zero_is_counted_and_leaves_the_others_alone(
    where: str, value: float, engine: str, lib: SimpleNamespace
) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    x = torch.randn(5, 2, 5, dtype=torch.float64)
    scale = torch.ones(5, dtype=torch.float64)
    if where == "input":
        x[2] = value
    else:
        scale[2] = value
    case = lib.Case(model, lambda b: model(b["x"]).square().mean((1, 2)) * b["scale"], {"x": x, "scale": scale})
    norms = [float(lib.norm_of(gradient)) for unit, gradient in enumerate(case.unit_gradients()) if unit != 2]
    lib.check_dropped(case, 2, engine=engine, bound=sorted(norms)[1])


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop", "opacus"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_unit_under_a_normalised_output_silences_nobody_else(
    engine: str, value: float, lib: SimpleNamespace
) -> None:
    """Zero gradients that pass a norm of NaN become NaN; removing this unit must not bring the others back."""
    model = nn.Linear(5, 4).double()
    x = torch.randn(4, 1, 5, dtype=torch.float64)
    x[1, 0, 2] = value
    target = torch.randn(4, dtype=torch.float64)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.normalize(model(batch["x"]), dim=-1).matmul(target).exp().sum(1)

    lib.check_dropped(lib.Case(model, losses, {"x": x}), 1, engine=engine, bound=0.1)


class Breakable(nn.Module):
    """The loss of a row is finite whatever ``flag`` is; its gradient is not where ``flag`` is zero."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        flag = flag[:, None, None]
        hidden = self.first(x)
        if self.kind == "root of zero":
            return self.last((hidden.square() * flag).sqrt()).sin().sum((1, 2))
        if self.kind == "a missing value that is masked":
            hidden = self.first(x + (x - x) / flag)
            return self.last(torch.where(flag != 0, hidden, 0.0)).sin().sum((1, 2))
        if self.kind == "infinity cut off":
            hidden = (hidden / flag).exp()
            return self.last(torch.where(hidden.isfinite(), hidden, 0.0).tanh()).sin().sum((1, 2))
        return (self.last(hidden).square().sum((1, 2)) * flag[:, 0, 0]).sqrt()


BREAKS = ["root of zero", "infinity cut off", "root of a zero loss", "a missing value that is masked"]


@pytest.mark.parametrize("rows", ["one row each", "two rows each"])
@pytest.mark.parametrize(
    ("kind", "engine"),
    # Opacus takes the inputs of a linear layer that are NaN for zeros, whoever is in the batch.
    [(kind, engine) for kind in BREAKS for engine in ("ghost", "vmap", "loop", "opacus")
     if (kind, engine) != (BREAKS[-1], "opacus")],
)  # fmt: skip
def test_a_unit_with_a_finite_loss_and_a_broken_gradient_silences_nobody_else(
    kind: str, rows: str, engine: str, lib: SimpleNamespace
) -> None:
    model = Breakable(kind).double()
    data = {"x": torch.randn(6, 2, 5).double().abs(), "flag": torch.ones(6).double()}
    data["flag"][2] = 0.0
    case = lib.Case(model, lambda b: model(b["x"], b["flag"]), data)
    unit_ids = torch.arange(6) // 2 if rows == "two rows each" else torch.arange(6)
    broken = int(unit_ids[2])
    assert bool(case.losses(data).isfinite().all())
    assert not lib.norm_of(case.unit_gradients(unit_ids)[broken]).isfinite()
    lib.check_dropped(case, broken, engine=engine, unit_ids=unit_ids)


LAYERS_WITH_TIME_FIRST = {
    "GRU": lambda: nn.GRU(4, 4, batch_first=True),
    "LSTM": lambda: nn.LSTM(4, 4, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("positions", [6, 12])
@pytest.mark.parametrize("layer", LAYERS_WITH_TIME_FIRST)
def test_a_broken_unit_leaves_others_alone_where_a_layer_puts_time_before_the_batch(
    layer: str, positions: int, value: float, lib: SimpleNamespace
) -> None:
    model = nn.ModuleList([LAYERS_WITH_TIME_FIRST[layer](), nn.Linear(4, 1)]).double()
    x = torch.randn(6, positions, 4, dtype=torch.float64)
    x[2] = value

    def losses(batch: dict[str, Tensor]) -> Tensor:
        hidden = model[0](batch["x"])
        hidden = hidden if isinstance(hidden, Tensor) else hidden[0]
        return model[1](hidden.mean(1)).squeeze(1)

    case = lib.Case(model, losses, {"x": x})
    clipping = make_engine("loop", model, max_grad_norm=0.1)
    case.run(clipping)
    found = clipping.take()
    case.run(clipping, rows={"x": x[torch.arange(6) != 2]})
    gap = lib.norm_of({name: found[name] - others for name, others in clipping.take().items()})
    assert float(gap) <= 0.1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop", "opacus"])
def test_a_unit_with_a_broken_loss_and_a_finite_gradient_is_dropped_and_counted(
    engine: str, value: float, lib: SimpleNamespace
) -> None:
    model = nn.Linear(5, 3).double()
    data = {"x": torch.randn(4, 2, 5).double(), "constant": torch.tensor([0.0, value, 0.0, 0.0]).double()}
    case = lib.Case(model, lambda b: model(b["x"]).square().sum((1, 2)) + b["constant"], data)
    lib.check_dropped(case, 1, engine=engine)


@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_a_broken_token_in_t5_breaks_its_own_unit_only(engine: str, lib: SimpleNamespace) -> None:
    case = lib.t5(rows=5)
    with torch.no_grad():
        case.module.shared.weight[7] = float("nan")
        case.rows["input_ids"].masked_fill_(case.rows["input_ids"] == 7, 8)
        case.rows["labels"].masked_fill_(case.rows["labels"] == 7, 8)
        case.rows["input_ids"][1, 0] = 7
    # the tied output layer would spread row 7 to all logits, so only the input side is tied here
    case.module.lm_head.weight = nn.Parameter(case.module.shared.weight.detach().nan_to_num(0.1))
    lib.check_dropped(case, 1, engine=engine)


@pytest.mark.parametrize("width", [2, 64])
def test_a_finite_gradient_too_large_for_fp32_squares_is_clipped_not_dropped(width: int, lib: SimpleNamespace) -> None:
    model = nn.Linear(width, width)
    case = lib.Case(model, lambda b: 1e15 * model(b["x"]).sum((1, 2)), {"x": torch.full((2, 2, width), 1e10)})
    clipping = make_engine("ghost", model, max_grad_norm=1.0)
    stats = case.run(clipping)
    assert stats.non_finite == 0 and stats.clipped == 2
    assert math.isclose(float(lib.norm_of(clipping.take())), lib.lowered(2.0), rel_tol=1e-5)


@pytest.mark.parametrize("clip", ["abadi", "automatic"])
def test_a_factor_times_its_norm_is_at_most_the_bound(clip: str) -> None:
    norms = torch.tensor([0.0, 1e-30, 0.3, 1.0, 7.0, 1e30, float("inf"), float("nan")], dtype=torch.float64)
    factors = clip_factors(norms, max_grad_norm=1.0, clip=clip, gamma=0.01)  # type: ignore[arg-type]
    assert (factors[:6] * norms[:6] <= 1.0 + 1e-12).all()
    assert factors[6:].tolist() == [0.0, 0.0] and factors.isfinite().all()
    if clip == "abadi":
        assert factors[:4].tolist() == [1.0] * 4


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
    stats = clipping.add(losses, torch.arange(3), torch.ones(3, dtype=torch.bool))
    assert int(stats.clipped) == 0 and int(stats.within) == 2
