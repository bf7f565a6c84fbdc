"""Norms and clipped sums equal those of one unit at a time, in every way to compute them, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from clipping_cases import (
    CASES,
    Case,
    Positions,
    Scaled,
    case_of,
    check_dropped,
    check_exact,
    clipped_sum,
    difference,
    distilbert,
    head,
    norm_of,
    siamese,
    small,
    t5,
)
from torch import nn

from lit_dpret.errors import DataError
from lit_dpret.privacy.clipping import contributions, ghost, make_engine
from lit_dpret.privacy.clipping.units import UnitRows

Way = dict[str, Any]


@pytest.fixture(params=["by cost", "never written out", "always written out", "fixed", "fixed, written out"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """Whether unit gradients are written out and kept, and whether shapes depend on who was drawn."""
    written, plain, asked = [], contributions.write_out, request.param
    monkeypatch.setattr(ghost, "write_out", lambda *arguments: written.append(1) or plain(*arguments))
    if asked != "by cost":
        monkeypatch.setattr(contributions, "ROOM", math.inf if "always" in asked or "," in asked else 0.0)
    yield {"fixed_shapes": True} if "fixed" in asked else {}
    if "fixed" not in asked and asked != "by cost":
        assert bool(written) == ("always" in asked)


@pytest.mark.like(4)
@pytest.mark.parametrize("name", sorted(CASES))
def test_norms_and_sum_equal_one_unit_at_a_time(name: str, way: Way) -> None:
    check_exact(CASES[name](), **way)


SIX_ROWS: dict[str, Callable[[], Case]] = {
    "t5": lambda: t5(rows=6),
    "distilbert": lambda: distilbert(rows=6),
    "siamese": lambda: siamese(rows=6),
    "tied": lambda: small("tied", rows=6),
    "two_linears": lambda: small("two_linears", rows=6),
}


@pytest.mark.parametrize("ids", [[0, 1, 2, 0, 1, 2], [2, 0, 2, 1, 2, 0], [0] * 6], ids=["mixed", "unequal", "one"])
@pytest.mark.parametrize("name", SIX_ROWS)
def test_a_unit_of_several_rows_is_clipped_as_one(name: str, ids: list[int]) -> None:
    check_exact(SIX_ROWS[name](), unit_ids=torch.tensor(ids))


@pytest.mark.like(3)
@pytest.mark.parametrize("name", SIX_ROWS)
def test_units_of_several_rows_beside_a_masked_one(name: str, way: Way) -> None:
    case, ids, mask = SIX_ROWS[name](), torch.arange(6) // 2, torch.tensor([True, False, True])
    check_exact(case, unit_ids=ids, mask=mask, **way)
    check_exact(case, unit_ids=ids, mask=mask, clip="automatic", clip_groups="per_layer", **way)
    if not way:
        check_exact(case, unit_ids=ids.flip(0), mask=mask, clip="automatic")


@pytest.mark.parametrize("clip", ["abadi", "automatic"])
@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_a_masked_unit_contributes_exactly_zero_under_both_clip_functions(engine: str, clip: str) -> None:
    ids, mask = torch.tensor([0, 1, 2, 1, 4, 5]), torch.tensor([True, False, True, True, True, False])
    check_exact(t5(rows=6), engine=engine, clip=clip, unit_ids=ids, mask=mask)


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop", "opacus"])
def test_a_batch_of_masked_units_runs_no_forward_pass_and_adds_zero(engine: str) -> None:
    case = head()
    clipping = make_engine(engine, case.module, max_grad_norm=1.0)
    stats = clipping.add(lambda: pytest.fail("ran"), torch.tensor([0, 1]), torch.zeros(3, dtype=torch.bool))
    assert stats.norms.tolist() == [0.0, 0.0, 0.0] and stats.clipped == stats.non_finite == 0
    sums = clipping.take()
    assert {n: s.shape for n, s in sums.items()} == {n: p.shape for n, p in case.module.named_parameters()}
    assert not any(s.any() for s in sums.values())


@pytest.mark.like(3)
@pytest.mark.parametrize("pieces", [1, 2, 6])
@pytest.mark.parametrize("name", ["t5", "siamese"])
def test_how_a_batch_is_split_does_not_change_the_sum(name: str, pieces: int, way: Way) -> None:
    case = SIX_ROWS[name]()
    gradients = case.unit_gradients()
    bound = float(torch.stack([norm_of(g) for g in gradients]).median())
    clipping = make_engine("ghost", case.module, max_grad_norm=bound, **way)
    for index in torch.arange(6).tensor_split(pieces):
        case.run(clipping, rows=case.take(index))
    assert difference(clipping.take(), clipped_sum(gradients, bound)) < 1e-10


@pytest.mark.parametrize("changes", [{}, {"feed_forward_proj": "gated-gelu"}])
def test_ghost_clips_each_unit_of_one_graph_under_dropout(changes: dict[str, str]) -> None:
    case = t5(rows=6, dropout_rate=0.3, **changes)
    case.module.train()
    unit_ids = torch.tensor([0, 1, 1, 2, 3, 3])
    clipping = make_engine("ghost", case.module, max_grad_norm=2.0)
    torch.manual_seed(5)
    stats = case.run(clipping, unit_ids)
    torch.manual_seed(5)
    losses = case.losses(case.rows)
    gradients = []
    for unit in range(4):
        found = torch.autograd.grad(losses[unit_ids == unit].sum(), clipping.parameters.values(), retain_graph=True)
        gradients.append(dict(zip(clipping.parameters, found, strict=True)))
    assert stats.clipped
    assert torch.allclose(stats.norms, torch.stack([norm_of(g) for g in gradients]), rtol=1e-10)
    assert difference(clipping.take(), clipped_sum(gradients, 2.0)) < 1e-10


def test_float32_norms_are_those_of_float64() -> None:
    case = t5(rows=6, query=9, passage=20)
    norms = torch.stack([norm_of(g) for g in case.unit_gradients()])
    case.module.float()
    clipping = make_engine("ghost", case.module, max_grad_norm=float(norms.median()))
    stats = case.run(clipping)
    assert torch.allclose(stats.norms, norms, rtol=1e-6)
    assert all(total.dtype == torch.float32 for total in clipping.take().values())


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop", "opacus"])
def test_a_covered_module_that_does_not_run_contributes_exactly_zero(engine: str) -> None:
    case = head()
    module = nn.ModuleDict({"used": case.module, "idle": nn.Linear(3, 4).double()})
    clipping = make_engine(engine, module, max_grad_norm=1.0)
    case.run(clipping)
    sums = clipping.take()
    assert sums["used.weight"].any() and not sums["idle.weight"].any() and not sums["idle.bias"].any()


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_sums_add_up_until_they_are_taken_or_forgotten(fixed_shapes: bool) -> None:
    case = head()
    clipping = make_engine("ghost", case.module, max_grad_norm=0.5, fixed_shapes=fixed_shapes)
    case.run(clipping)
    once = clipping.take()
    assert not any(total.any() for total in clipping.take().values())
    case.run(clipping)
    case.run(clipping)
    twice = clipping.take()
    assert all(torch.allclose(twice[n], 2 * once[n]) for n in once)
    case.run(clipping)
    clipping.forget()
    assert not any(total.any() for total in clipping.take().values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_unit_adds_nothing_and_is_counted_unless_it_is_masked(value: float, way: Way) -> None:
    case = case_of(nn.Linear(5, 4, bias=False), 4, 2, 5)
    case.rows["x"][2, 0, 0] = value
    check_dropped(case, 2, **way)
    clipping = make_engine("ghost", case.module, max_grad_norm=1.0, **way)
    assert case.run(clipping, mask=torch.arange(4) != 2).non_finite == 0
    rest = [gradient for unit, gradient in enumerate(case.unit_gradients()) if unit != 2]
    assert difference(clipping.take(), clipped_sum(rest, 1.0)) < 1e-10


def test_a_unit_whose_terms_cancel_is_clipped_by_an_upper_bound_of_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "ROOM", 0.0)
    monkeypatch.setattr(contributions, "_prefers_gram", lambda *_: True)
    linear, count = nn.Linear(6, 3, bias=False), 64
    inputs = torch.randn(3, 1, 6).expand(3, count, 6) * 30
    signs = torch.tensor([1.0, -1.0]).repeat(count // 2)
    weights = torch.stack([signs, signs * 0.999 + 0.001, torch.full((count,), 1e-4)])  # zero, tiny, and without signs
    exact = torch.linalg.vector_norm((weights.double()[..., None] * inputs.double()).sum(1), dim=1) * 3**0.5
    engine = make_engine("ghost", linear, max_grad_norm=1e-2, fixed_shapes=True)
    for row in range(3):
        losses = lambda: (linear(inputs).sum(2) * weights).sum(1)  # noqa: E731
        stats = engine.add(losses, torch.arange(3), torch.arange(3) == row)
        assert stats.norms[row] >= exact[row] * (1 - 1e-5)
        assert engine.take()["weight"].norm() <= 1e-2 * (1 + 1e-4)
    torch.testing.assert_close(stats.norms[2], exact[2], rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("ids", [[0, 1, 1], [1, 0], [0, 0, 1], []], ids=["uneven", "unordered", "short", "empty"])
def test_rows_that_do_not_have_the_shape_are_refused(ids: list[int]) -> None:
    mask = torch.ones(2, dtype=torch.bool)
    with pytest.raises(DataError, match="equally many rows"):
        UnitRows.build(torch.tensor(ids, dtype=torch.long), mask, fixed=True)


def fingerprint(module: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, layer in module.named_modules():
        hooks = {k: len(v) for k, v in vars(layer).items() if k.endswith("_hooks") and hasattr(v, "__len__")}
        state[name] = sorted(vars(layer)), hooks, [id(p) for p in layer._parameters.values()]
    for name, p in module.named_parameters():
        state[name] = id(p), p.grad, p.requires_grad, p._version, sorted(vars(p)), p.detach().clone()
    return state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (dict, tuple, list)):
        pairs = zip(one.items(), other.items(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
        return type(one) is type(other) and all(same(a, b) for a, b in pairs)
    return bool(one == other)


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop", "opacus"])
def test_a_batch_leaves_no_trace_nor_does_one_whose_forward_pass_fails(engine: str) -> None:
    case = t5()
    if engine == "vmap":
        case = case_of(nn.Sequential(Positions(), nn.Linear(4, 4), Scaled()), 3, 5, 4)
    case.module.train()
    for name, p in case.module.named_parameters():
        p.requires_grad_("relative_attention_bias" not in name)
    p.grad = torch.full_like(p, 3.0)
    before = fingerprint(case.module)
    clipping = make_engine(engine, case.module, max_grad_norm=1.0)
    random = torch.get_rng_state()
    case.run(clipping)
    assert torch.equal(random, torch.get_rng_state())
    assert same(before, fingerprint(case.module))
    expected = clipping.take()
    assert not any(total.requires_grad for total in expected.values())
    with torch.no_grad():
        case.run(clipping)
    assert difference(clipping.take(), expected) < 1e-12

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    late = case.module[1] if engine == "vmap" else case.module.decoder.block[1].layer[1].EncDecAttention.k
    handle = late.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        case.run(clipping)
    handle.remove()
    assert same(before, fingerprint(case.module))


@pytest.mark.parametrize("name", ["t5_untied_gated", "bert", "embedding_tied_to_linear"])
def test_the_losses_under_the_engine_are_those_without_it_bit_for_bit(name: str) -> None:
    case, seen = CASES[name](), []
    plain, expected = case.losses, case.losses(case.rows)
    case.losses = lambda rows: seen.append(plain(rows)) or seen[0]
    case.run(make_engine("ghost", case.module, max_grad_norm=1.0))
    assert torch.equal(expected, seen[0])


def test_a_compiled_module_is_clipped_exactly_and_stays_compiled() -> None:
    case = head()
    compiled = torch.compile(case.module, backend="eager")
    losses = lambda b: nn.functional.cross_entropy(compiled(b["x"]), b["y"], reduction="none")  # noqa: E731
    check_exact(Case(compiled, losses, case.rows))
    ran = []
    torch._dynamo.reset()
    again = torch.compile(compiled._orig_mod, backend=lambda graph, _: ran.append(1) or graph.forward)
    again(case.rows["x"])
    assert ran
