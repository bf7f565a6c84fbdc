"""Norms and clipped sums equal those of one unit at a time, for every model that is covered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_dpret.privacy.clipping import make_engine


def test_norms_and_sum_equal_one_unit_at_a_time(any_case: Any, lib: SimpleNamespace) -> None:
    lib.check_exact(any_case)


@pytest.mark.parametrize("name", ["t5_tied_relu", "bert", "siamese", "small"])
def test_the_loop_equals_one_unit_at_a_time(name: str, lib: SimpleNamespace) -> None:
    lib.check_exact(lib.case(name), engine="loop")


@pytest.mark.parametrize("engine", ["ghost", "loop"])
@pytest.mark.parametrize("name", ["t5_tied_relu", "head"])
def test_automatic_clipping_divides_by_norm_plus_gamma(name: str, engine: str, lib: SimpleNamespace) -> None:
    lib.check_exact(lib.case(name), engine=engine, clip="automatic")


UNIT_IDS = {
    "two_rows_each": [0, 0, 1, 1, 2, 2],
    "interleaved": [0, 1, 2, 0, 1, 2],
    "unequal": [2, 0, 2, 1, 2, 0],
    "one_unit": [0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("ids", sorted(UNIT_IDS))
@pytest.mark.parametrize("name", ["t5", "distilbert", "siamese", "tied"])
def test_a_unit_of_several_rows_is_clipped_as_one(name: str, ids: str, lib: SimpleNamespace) -> None:
    case = {
        "t5": lambda: lib.t5(rows=6),
        "distilbert": lambda: lib.distilbert(rows=6),
        "siamese": lambda: lib.siamese(rows=6),
        "tied": lambda: lib.small("tied", rows=6),
    }[name]()
    lib.check_exact(case, unit_ids=torch.tensor(UNIT_IDS[ids]))


@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_a_masked_unit_contributes_exactly_zero(engine: str, lib: SimpleNamespace) -> None:
    ids, mask = torch.tensor([0, 1, 2, 1, 4, 5]), torch.tensor([True, False, True, True, True, False])
    lib.check_exact(lib.t5(rows=6), engine=engine, unit_ids=ids, mask=mask)


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop", "opacus"])
def test_a_batch_of_masked_units_runs_no_forward_pass_and_adds_zero(engine: str, lib: SimpleNamespace) -> None:
    case = lib.head()
    clipping = make_engine(engine, case.module, max_grad_norm=1.0)
    stats = clipping.add(lambda: pytest.fail("ran"), torch.tensor([0, 1]), torch.zeros(3, dtype=torch.bool))
    assert stats.norms.tolist() == [0.0, 0.0, 0.0] and stats.clipped == stats.non_finite == 0
    sums = clipping.take()
    assert {n: s.shape for n, s in sums.items()} == {n: p.shape for n, p in case.module.named_parameters()}
    assert not any(s.any() for s in sums.values())


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("name", ["t5", "siamese"])
def test_how_a_batch_is_split_does_not_change_the_sum(name: str, pieces: int, lib: SimpleNamespace) -> None:
    case = lib.t5(rows=7) if name == "t5" else lib.siamese(rows=7)
    gradients = case.unit_gradients()
    bound = float(torch.stack([lib.norm_of(g) for g in gradients]).median())
    clipping = make_engine("ghost", case.module, max_grad_norm=bound)
    for index in torch.arange(7).tensor_split(pieces):
        case.run(clipping, rows=case.take(index))
    assert lib.difference(clipping.take(), lib.clipped_sum(gradients, bound)) < 1e-10


@pytest.mark.parametrize("changes", [{}, {"feed_forward_proj": "gated-gelu"}])
def test_ghost_clips_each_unit_of_one_graph_under_dropout(changes: dict[str, str], lib: SimpleNamespace) -> None:
    case = lib.t5(rows=6, dropout_rate=0.3, **changes)
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
    assert torch.allclose(stats.norms, torch.stack([lib.norm_of(g) for g in gradients]), rtol=1e-10)
    assert lib.difference(clipping.take(), lib.clipped_sum(gradients, 2.0)) < 1e-10


PARTS = {
    "bert": ["bias", "embeddings", "LayerNorm", "query", "layer.1.", "word_embeddings", "position_embeddings"],
    "t5_untied_relu": ["layer_norm", "relative_attention_bias", "shared", "lm_head", "decoder"],
}


@pytest.mark.parametrize(("name", "trained"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_only_what_is_trainable_is_clipped(name: str, trained: str, lib: SimpleNamespace) -> None:
    case = lib.case(name)
    for full, p in case.module.named_parameters():
        p.requires_grad_(trained in full)
    clipping = lib.check_exact(case)
    assert clipping.parameters and all(trained in full for full in clipping.parameters)


def test_float32_norms_are_those_of_float64(lib: SimpleNamespace) -> None:
    case = lib.t5(rows=6, query=9, passage=20)
    norms = torch.stack([lib.norm_of(g) for g in case.unit_gradients()])
    case.module.float()
    clipping = make_engine("ghost", case.module, max_grad_norm=float(norms.median()))
    stats = case.run(clipping)
    assert torch.allclose(stats.norms, norms, rtol=1e-6)
    assert all(total.dtype == torch.float32 for total in clipping.take().values())


@pytest.mark.parametrize("engine", ["ghost", "vmap", "loop", "opacus"])
def test_a_covered_module_that_does_not_run_contributes_exactly_zero(engine: str, lib: SimpleNamespace) -> None:
    case = lib.head()
    module = torch.nn.ModuleDict({"used": case.module, "idle": torch.nn.Linear(3, 4).double()})
    clipping = make_engine(engine, module, max_grad_norm=1.0)
    case.run(clipping)
    sums = clipping.take()
    assert sums["used.weight"].any() and not sums["idle.weight"].any() and not sums["idle.bias"].any()


def test_sums_add_up_until_they_are_taken(lib: SimpleNamespace) -> None:
    case = lib.head()
    clipping = make_engine("ghost", case.module, max_grad_norm=0.5)
    case.run(clipping)
    once = clipping.take()
    case.run(clipping)
    case.run(clipping)
    twice = clipping.take()
    assert all(torch.allclose(twice[n], 2 * once[n]) for n in once)
    case.run(clipping)
    clipping.forget()
    assert not any(total.any() for total in clipping.take().values())


@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_a_caller_under_no_grad_gets_the_same_sum(engine: str, lib: SimpleNamespace) -> None:
    case = lib.small("tied")
    clipping = make_engine(engine, case.module, max_grad_norm=0.5)
    case.run(clipping)
    expected = clipping.take()
    with torch.no_grad():
        case.run(clipping)
    assert lib.difference(clipping.take(), expected) < 1e-12
