"""Norms of all pairs against n squared gradients of plain autograd in float64, and which way norms=auto takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pair_models import DIM, JACOBIANS, LINEAR, MODELS, TOWERS, Pairs, assert_equal, build, reference, table, vectors
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping.ghost import GhostClipping
from lit_dpret.privacy.clipping.pairs import (
    PairBatch,
    PairGhost,
    choose_norms,
    costs,
    make_pair_norms,
    weighted_backward,
)


@pytest.mark.like(3)
@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_exact_way_gives_the_norms_of_plain_autograd(model: str, towers: str) -> None:
    pairs = build(model, towers)
    expected = reference(pairs)
    ways = ["brute_force", "pair_ghost", "jacobian", *(["linear_head"] if model == "linear_head" else [])]
    for norms in ways:
        assert_equal(table(pairs, norms), expected, LINEAR.get(model, 1e-10) if norms == "jacobian" else 1e-10)
    if towers != "shared":
        strategy = make_pair_norms("k_blocks", pairs.module, shared=False)
        assert strategy.exact
        assert_equal(strategy.table(pairs.batch), expected, LINEAR.get(model, 1e-10))


@pytest.mark.parametrize("model", MODELS)
def test_blocks_bound_the_norms_where_parameters_are_shared(model: str) -> None:
    pairs = build(model)
    strategy = make_pair_norms("k_blocks", pairs.module)
    ratio = strategy.table(pairs.batch) / reference(pairs)
    assert not strategy.exact
    assert float(ratio.min()) >= 1 - 1e-12
    assert 1.01 < float(ratio.mean()) < 20, "a bound, and not a vacuous one"


@pytest.mark.parametrize("seed", range(6))
def test_blocks_bound_the_norms_of_near_duplicates_and_of_any_scale(seed: int) -> None:
    pairs = build("mlp")
    random = torch.Generator().manual_seed(seed)
    for p in pairs.module.parameters():
        p.data.mul_(10 ** float(torch.randn((), generator=random)))
    gaps = 10.0 ** torch.randint(-7, 1, (5, 1), generator=random)
    passages = pairs.batch.queries + gaps * torch.randn(5, 6, generator=random, dtype=torch.float64)
    pairs = replace(pairs, batch=replace(pairs.batch, passages=passages))
    expected = reference(pairs)
    assert bool((table(pairs, "k_blocks") >= expected * (1 - 1e-9)).all())
    assert bool((table(pairs, "jacobian") >= expected * (1 - 1e-9)).all())


class Rare(nn.Module):
    """What Jacobians are seldom made of: ``form`` says what."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(11, 6)
        self.transposed = Conv1D(6, 6)
        self.tied = nn.Linear(6, 11, bias=False)
        self.parts = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
        if form != "transposed":
            self.transposed.requires_grad_(False)
        if form in ("tied", "lookup_and_linear"):
            self.tied.weight = self.embed.weight
        else:
            self.tied.requires_grad_(False)

    def queries(self, ids: Tensor) -> Tensor:
        hidden = self.transposed(self.embed(ids)).tanh()
        if self.form == "tied":
            hidden = hidden + self.tied(hidden)[..., :6].tanh()
        hidden = hidden.mean(1)
        return F.normalize(torch.cat([part(hidden) for part in self.parts], 1), dim=1)

    def passages(self, ids: Tensor) -> Tensor:
        if self.form != "lookup_and_linear":
            return self.queries(ids)
        hidden = self.tied(torch.nn.functional.one_hot(ids, 6).to(self.tied.weight.dtype))[..., :6].tanh().mean(1)
        return F.normalize(torch.cat([part(hidden) for part in self.parts], 1), dim=1)


@pytest.mark.parametrize("form", ["transposed", "tied", "lookup_and_linear"])
def test_transposed_tied_and_differently_used_weights_are_exact(form: str) -> None:
    torch.manual_seed(0)
    module = Rare(form).double()
    ids = torch.tensor([[0, 1, 2], [3, 3, 1], [5, 0, 4], [2, 2, 2], [1, 4, 4], [0, 0, 5], [3, 5, 2], [4, 1, 3]])
    pairs = Pairs(module, PairBatch(ids[:4], ids[4:], module.queries, module.passages, 4))
    expected = reference(pairs)
    assert_equal(table(pairs, "pair_ghost"), expected)
    assert_equal(table(pairs, "jacobian"), expected, 1e-8)  # what is added for rounding: J is far longer than g here
    assert bool((table(pairs, "k_blocks") >= expected * (1 - 1e-12)).all())


def test_a_parameter_that_some_coordinates_do_not_reach_is_exact() -> None:
    torch.manual_seed(0)
    halves = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)]).double()

    def embed(x: Tensor) -> Tensor:
        return torch.cat([F.normalize(half(x), dim=1) / 2**0.5 for half in halves], 1)

    pairs = Pairs(halves, PairBatch(vectors(4, 0), vectors(4, 1), embed, embed, 4))
    for norms in ("pair_ghost", "jacobian"):
        assert_equal(table(pairs, norms), reference(pairs))


def test_a_backbone_is_shared_and_two_heads_are_not() -> None:
    pairs = build("bert", "shared_backbone")
    expected = reference(pairs)
    for norms in ("pair_ghost", "jacobian"):
        assert_equal(table(pairs, norms), expected)
    assert float((table(pairs, "k_blocks") / expected).min()) >= 1 - 1e-12
    for norms in JACOBIANS:
        with pytest.raises(UnsupportedModelError, match=r"encoder\..* is used by queries and passages"):
            table(pairs, norms, shared=False)


def test_no_records_have_no_norms_and_a_gradient_of_zero() -> None:
    pairs = build("mlp").first(0)
    for norms in ("brute_force", "pair_ghost", "jacobian", "k_blocks"):
        assert table(pairs, norms).shape == (0, 0)
    found = weighted_backward(pairs.batch, torch.zeros(0, 0), pairs.trained, rows_at_once=2)
    assert found.keys() == pairs.trained.keys() and not any(bool(g.any()) for g in found.values())


@pytest.mark.parametrize(
    ("model", "towers"), [*(("mlp", towers) for towers in TOWERS), ("conv_net", "shared"), ("bert_lora", "shared")]
)
def test_chunks_change_nothing(model: str, towers: str) -> None:
    pairs = build(model, towers)
    expected = reference(pairs)
    for size in (1, 2, 100) if model == "mlp" else (3,):
        assert_equal(table(pairs, "pair_ghost", pairs_at_once=size), expected)
        assert_equal(table(pairs, "jacobian", rows_at_once=size), expected, LINEAR.get(model, 1e-10))
        assert_equal(table(pairs, "k_blocks", rows_at_once=size), table(pairs, "k_blocks"), 1e-12)


@pytest.mark.parametrize("elements", [1, 40, 4000])
@pytest.mark.parametrize("model", ["conv_net", "bert"])
def test_parameters_in_parts_change_nothing(model: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = build(model)
    expected = reference(pairs)
    monkeypatch.setattr("lit_dpret.privacy.clipping.pairs.factors.chunk_of", lambda _: elements)
    assert_equal(table(pairs, "jacobian"), expected)


@pytest.mark.parametrize("cheapest", ["matrices", "streamed", "gram"])
@pytest.mark.parametrize("model", ["conv_net", "bert"])
def test_each_route_to_the_inner_products_gives_them(
    model: str, cheapest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = build(model)
    taken = []

    def prefer(found: dict[str, float]) -> str:
        taken.append(cheapest if cheapest in found else min(found, key=found.__getitem__))
        return taken[-1]

    monkeypatch.setattr("lit_dpret.privacy.clipping.pairs.factors.cheapest", prefer)
    assert_equal(table(pairs, "jacobian"), reference(pairs))
    assert cheapest in taken


@pytest.mark.parametrize("side", ["queries", "passages"])
@pytest.mark.parametrize("norms", ["brute_force", "pair_ghost", "jacobian", "k_blocks", "linear_head"])
def test_a_broken_record_breaks_its_own_row_or_column_alone(norms: str, side: str) -> None:
    pairs = build("linear_head" if norms == "linear_head" else "conv_net")
    strategy = make_pair_norms(norms, pairs.module)  # type: ignore[arg-type]
    before = strategy.table(pairs.batch)
    poisoned = getattr(pairs.batch, side).clone()
    poisoned[3, 0] = torch.nan
    for _ in range(2):
        after = strategy.table(replace(pairs.batch, **{side: poisoned}))
        if side == "passages":
            after, before = after.T, before.T
        assert not after[3].isfinite().any()
        others = torch.arange(5) != 3
        assert_equal(after[others], before[others], 1e-12)
        if side == "passages":
            before = before.T


def test_in_fp32_no_entry_is_below_the_true_norm_even_where_terms_cancel() -> None:
    pairs = build("conv_net")
    queries = pairs.batch.queries
    near = queries + torch.tensor([0.0, 1e-6, 1e-4, 1e-2, 1.0], dtype=torch.float64)[:, None, None, None]
    double = replace(pairs, batch=replace(pairs.batch, passages=near))
    single = replace(double.batch, queries=queries.float(), passages=near.float())
    true = reference(double)
    pairs.module.float()
    for norms in ("pair_ghost", "jacobian", "k_blocks"):
        found = make_pair_norms(norms, pairs.module).table(single)  # type: ignore[arg-type]
        assert float((found - true * (1 - 1e-4)).min()) >= 0
        far = ~torch.eye(5, dtype=torch.bool)
        if norms != "k_blocks":
            assert_equal(found[far], true[far], 1e-2)


def test_in_fp32_norms_from_gram_matrices_are_exact_where_much_longer_terms_cancel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(384, 256), nn.Tanh(), nn.Linear(256, 64)).double()
    queries = torch.randn(4, 384, dtype=torch.float64)
    near = queries + 0.02 * torch.randn(4, 384, dtype=torch.float64)

    def embed(x: Tensor) -> Tensor:
        return F.normalize(body(x), dim=1)

    true = reference(Pairs(body, PairBatch(queries, near, embed, embed, 4)))
    assert float(true.diagonal().max()) < 0.01 * float(true.mean())
    body.float()
    looked: list[int] = []
    exact = GhostClipping._exact_squares
    monkeypatch.setattr(
        GhostClipping, "_exact_squares", lambda self, part, batch: looked.append(1) or exact(self, part, batch)
    )
    strategy = PairGhost(body)
    strategy._engine = GhostClipping(body, max_grad_norm=1e-4)  # below such a bound it looks no closer
    found = strategy.table(PairBatch(queries.float(), near.float(), embed, embed, 4))
    assert looked
    assert float((found / true).min()) >= 1 - 4e-3
    assert_equal(found, true, 2e-2)


def test_auto_takes_the_closed_form_for_a_linear_head_and_exact_norms_for_the_embedding_net_of_the_paper() -> None:
    assert choose_norms(n_max=5000, dim=4, positions=1, width=9, linear_head=True) == "linear_head"
    assert choose_norms(n_max=400, dim=8, positions=64, width=50) == "jacobian"


@pytest.mark.parametrize(
    ("dim", "positions", "shared", "taken"),
    [
        (64, 256, True, {"pair_ghost", "jacobian", "k_blocks"}),
        (384, 32, True, {"pair_ghost", "jacobian"}),
        (384, 32, False, {"pair_ghost", "k_blocks"}),
    ],
)
def test_auto_takes_the_cheapest_exact_way_and_a_bound_where_that_costs_ten_times_as_much(
    dim: int, positions: int, shared: bool, taken: set[str]
) -> None:
    public: dict[str, Any] = dict(dim=dim, positions=positions, width=384, shared=shared)
    exact = ("pair_ghost", "jacobian") if shared else ("pair_ghost", "k_blocks")
    chosen = set()
    for n in (1, 2, *range(8, 20_000, 97)):
        name, found = choose_norms(n_max=n, **public), costs(n_max=n, **public)
        if name in exact:
            assert found[name] == min(found[way] for way in exact) <= 10 * found["k_blocks"]
        else:
            assert min(found[way] for way in exact) > 10 * found[name]
        chosen.add(name)
    assert chosen == taken


def test_auto_builds_what_it_chose() -> None:
    pairs = build("mlp")
    strategy = make_pair_norms("auto", pairs.module, n_max=5, dim=DIM, positions=1)
    assert strategy.exact
    assert_equal(strategy.table(pairs.batch), reference(pairs))
    head = build("linear_head")
    strategy = make_pair_norms("auto", head.module, n_max=5, dim=DIM, linear_head=True)
    assert_equal(strategy.table(head.batch), reference(head))
