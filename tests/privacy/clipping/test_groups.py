"""Per-layer clipping: each layer within C / sqrt(K), all together within C, whatever engine computes it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.clipping import contributions, make_engine
from lit_dpret.privacy.clipping.base import group_parameters
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.noise import KeyedStream

ENGINES = ["ghost", "vmap", "loop", "opacus"]


def layers_of(module: nn.Module) -> list[list[str]]:
    """Modules with what they own, each tensor once; by walking the modules, not by names."""
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    found = []
    for layer in module.modules():
        own = [names.pop(id(p)) for p in layer.parameters(recurse=False) if id(p) in names]
        found += [own] if own else []
    return found


def check(case: Any, lib: SimpleNamespace, engine: str, clip: str = "abadi", unit_ids: Any = None) -> Any:
    """Norms and sum equal the reference, and what is clipped together is what one module owns."""
    clipping = lib.check_exact(case, engine=engine, clip=clip, unit_ids=unit_ids, clip_groups="per_layer")
    assert sorted(map(sorted, clipping.groups)) == sorted(map(sorted, layers_of(case.module)))
    return clipping


@pytest.mark.parametrize("name", ["t5_tied_relu", "bert", "siamese", "two_linears_with_one_weight"])
@pytest.mark.parametrize("clip", ["abadi", "automatic"])
def test_layers_whose_gradients_are_written_out_are_clipped_alike(
    name: str, clip: str, lib: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "ROOM", math.inf)
    check(lib.case(name), lib, "ghost", clip)
    check(lib.case(name), lib, "ghost", clip, unit_ids=torch.arange(lib.case(name).count) // 2)


class Mixed(nn.Module):
    """A bare parameter, which is the module's own, beside layers with rules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.first, self.norm = nn.Linear(5, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)) * self.scale.exp()


def mixed(lib: SimpleNamespace, rows: int = 5) -> Any:
    model = Mixed().double()
    data = {"x": torch.randn(rows, 3, 5).double()}
    return lib.Case(nn.Sequential(model, nn.Linear(4, 2)).double(), None, data)


@pytest.mark.parametrize("clip", ["abadi", "automatic"])
@pytest.mark.parametrize("name", ["t5_tied_relu", "bert_masked_lm", "siamese", "two_linears_with_one_weight"])
@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_the_sum_equals_one_unit_at_a_time(engine: str, name: str, clip: str, lib: SimpleNamespace) -> None:
    check(lib.case(name), lib, engine, clip)


@pytest.mark.parametrize("clip", ["abadi", "automatic"])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_the_sum_of_a_model_with_bare_parameters(engine: str, clip: str, lib: SimpleNamespace) -> None:
    case = mixed(lib)
    case.losses = lambda b: case.module(b["x"]).sin().sum((1, 2))
    clipping = check(case, lib, engine, clip, torch.tensor([1, 0, 1, 2, 3]))
    assert clipping.groups == (("0.scale",), ("0.first.weight", "0.first.bias"), ("0.norm.weight", "0.norm.bias"),
                               ("1.weight", "1.bias"))  # fmt: skip


@pytest.mark.parametrize("unit_ids", [None, [0, 0, 1, 1, 2, 2]])
def test_opacus_clips_by_layer_too(unit_ids: list[int] | None, lib: SimpleNamespace) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    case = lib.Case(model, lambda b: model(b["x"]).sin().sum((1, 2)), {"x": torch.randn(6, 3, 5).double()})
    for clip in ("abadi", "automatic"):
        check(case, lib, "opacus", clip, None if unit_ids is None else torch.tensor(unit_ids))


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop"])
def test_units_of_several_rows_and_batches_of_none_and_one(engine: str, lib: SimpleNamespace) -> None:
    case = lib.t5(rows=6)
    clipping = check(case, lib, engine, unit_ids=torch.tensor([2, 0, 2, 1, 2, 0]))
    nothing = torch.zeros(0, dtype=torch.long)
    assert clipping.add(lambda: pytest.fail("ran"), nothing, nothing.bool()).norms.shape == (0,)
    assert not any(total.any() for total in clipping.take().values())
    case.rows = case.take(torch.tensor([3]))
    check(case, lib, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_of_one_layer_is_clipped_as_flat(engine: str, lib: SimpleNamespace) -> None:
    case, sums = lib.head(), []
    for clip_groups in ("flat", "per_layer"):
        clipping = make_engine(engine, case.module, max_grad_norm=0.5, clip_groups=clip_groups)
        assert case.run(clipping).clipped
        sums.append(clipping.take())
    assert lib.difference(*sums) == 0.0


@pytest.mark.parametrize("clip", ["abadi", "automatic"])
@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop"])
@pytest.mark.parametrize("name", ["t5_tied_relu", "embedding_tied_to_linear", "norm_tied_to_linear"])
def test_one_unit_moves_each_layer_by_its_share_and_all_together_by_the_bound(
    name: str, engine: str, clip: str, lib: SimpleNamespace
) -> None:
    case, bound = lib.case(name), 1e-3
    layers, count = layers_of(case.module), case.count
    clipping = make_engine(engine, case.module, max_grad_norm=bound, clip=clip, clip_groups="per_layer")
    case.run(clipping)
    whole = clipping.take()
    for unit in range(count):
        case.run(clipping, mask=torch.arange(count) != unit)
        rest = clipping.take()
        moved = {name: whole[name] - rest[name] for name in whole}
        assert float(lib.norm_of(moved)) <= bound * (1 + 1e-9)
        shares = [float(lib.norm_of({n: moved[n] for n in layer})) * math.sqrt(len(layers)) for layer in layers]
        assert max(shares) <= bound * (1 + 1e-9)
        if clip == "abadi":
            assert max(shares) == pytest.approx(bound, rel=1e-8)


def test_terms_of_one_layer_that_cancel_in_fp32_are_computed_again_in_float64(lib: SimpleNamespace) -> None:
    """The layer whose terms cancel has a tiny gradient; that of the other one must not hide it."""
    model = nn.ModuleDict({"cancels": nn.Linear(64, 64, bias=False), "large": nn.Linear(64, 1, bias=False)})
    x = torch.randn(2, 1, 64).expand(2, 2, 64) + 1e-4 * torch.randn(2, 2, 64)
    sign = torch.tensor([1.0, -1.0])[:, None]

    def losses(batch: dict[str, Tensor]) -> Tensor:
        return 1e3 * (model["cancels"](batch["x"]) * sign).sum((1, 2)) + 1e6 * model["large"](batch["x"]).sum((1, 2))

    case = lib.Case(model, losses, {"x": x})
    clipping = make_engine("ghost", model, max_grad_norm=1e-3, clip_groups="per_layer")
    for unit in range(2):
        case.run(clipping, mask=torch.arange(2) == unit)
        for total in clipping.take().values():
            share = float(total.double().norm()) * math.sqrt(2) / 1e-3
            assert 0.99 <= share <= 1 + 1e-6  # what rounding may add to the sum is taken off the bound


class Branches(nn.Module):
    """The root has no derivative at zero: only that branch's gradient is broken, and the loss is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.root = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        return self.sound(x).sin().sum((1, 2)) + (self.root(x).square() * flag[:, None, None]).sqrt().sum((1, 2))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("broken", ["a branch", "the loss", "the input"])
def test_a_unit_broken_in_one_layer_contributes_zero_to_all_and_is_counted(
    broken: str, engine: str, lib: SimpleNamespace
) -> None:
    model = Branches().double()
    data = {"x": torch.randn(4, 2, 5).double(), "flag": torch.ones(4).double(), "scale": torch.ones(4).double()}
    {"a branch": data["flag"], "the loss": data["scale"], "the input": data["x"][:, 1, 2]}[broken][1] = (
        0.0 if broken == "a branch" else float("nan")
    )
    case = lib.Case(model, lambda b: model(b["x"], b["flag"]) * b["scale"], data)
    lib.check_dropped(case, 1, engine=engine, bound=1.0, clip_groups="per_layer")


def test_a_tied_weight_is_in_one_group_and_so_is_every_parameter(lib: SimpleNamespace) -> None:
    for name in ("t5_tied_relu", "bert_masked_lm", "two_linears_with_one_weight", "siamese"):
        module = lib.case(name).module
        groups = make_engine("ghost", module, max_grad_norm=1.0, clip_groups="per_layer").groups
        assert sorted(n for names in groups for n in names) == sorted(n for n, _ in module.named_parameters())
    assert group_parameters(["a.weight", "b.weight", "a.bias", "c"], "per_layer") == (
        ("a.weight", "a.bias"), ("b.weight",), ("c",)
    )  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_another_way_of_grouping_is_refused_by_its_key(engine: str, lib: SimpleNamespace) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.clip_groups='per_block' is not one of flat, per_layer"):
        make_engine(engine, lib.head().module, max_grad_norm=1.0, clip_groups="per_block")
    with pytest.raises(ConfigurationError, match=r"privacy\.clip_groups='global' is not one of flat, per_layer"):
        DPSGD(eps=1.0, clip_groups="global")  # type: ignore[arg-type]


def test_the_mode_clips_as_its_plan_says(lib: SimpleNamespace) -> None:
    request = SimpleNamespace(
        sampling="poisson", sample_rate=0.1, expected_batch_size=20, physical_batch_size=5, cap=None
    )
    mode = DPSGD(eps=3.0, delta=1e-5, noise_multiplier=30.0, max_grad_norm=1e-4, clip_groups="per_layer")
    case = lib.small()
    plan = mode.plan(request, units=200, steps=1)
    mode.attach(case.module, plan, KeyedStream(bytes(32), "run"))
    mode.add(lambda: case.losses(case.rows), torch.arange(5), torch.arange(5) == 2)
    total, share = mode.take(), 1e-4 / math.sqrt(len(layers_of(case.module)))
    found = [float(lib.norm_of({n: total[n] for n in layer})) for layer in layers_of(case.module)]
    assert found == [0.0 if norm == 0.0 else pytest.approx(share, rel=1e-8) for norm in found]
    assert plan.clip_groups == "per_layer" and plan.sensitivity == 1e-4 and mode.counts.clipped == 1
