"""Norms of all pairs, and the weighted gradient, against n squared gradients of plain autograd in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pair_models import DIM, Pairs, build, vectors
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.privacy.clipping import GhostClipping
from lit_dpret.privacy.clipping.pairs import (
    BruteForce,
    PairBatch,
    choose_norms,
    clipped_pair_factors,
    costs,
    embed_all,
    make_pair_norms,
    weighted_backward,
)

MODELS = ["mlp", "conv_net", "bert", "t5_encoder", "bert_lora", "t5_lora", "linear_head"]
TOWERS = ["shared", "separate", "frozen_passages"]
JACOBIANS = ["jacobian", "k_blocks"]
#: T5's norm takes its mean square in fp32, so cotangents add up to fp32's rounding only: d of them are not one.
LINEAR = {"t5_encoder": 1e-6, "t5_lora": 1e-6}


def table(pairs: Pairs, norms: str, **settings: Any) -> Tensor:
    return make_pair_norms(norms, pairs.module, **settings).table(pairs.batch)  # type: ignore[arg-type]


def reference(pairs: Pairs) -> Tensor:
    """Written again here: one backward pass over the whole batch for each pair."""
    batch, parameters = pairs.batch, list(pairs.trained.values())
    s = batch.embed_queries(batch.queries) @ batch.embed_passages(batch.passages).T
    found = torch.zeros(batch.n, batch.n, dtype=torch.float64)
    for i in range(batch.n):
        for j in range(batch.n):
            grads = torch.autograd.grad(s[i, j], parameters, retain_graph=True, allow_unused=True)
            found[i, j] = sum(float(g.square().sum()) for g in grads if g is not None) ** 0.5
    return found


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    assert float(((found - expected) / expected).abs().max()) < tolerance


# --- norms ------------------------------------------------------------------------------------------------------


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


def test_a_backbone_is_shared_and_two_heads_are_not() -> None:
    pairs = build("bert", "shared_backbone")
    expected = reference(pairs)
    for norms in ("pair_ghost", "jacobian"):
        assert_equal(table(pairs, norms), expected)
    assert float((table(pairs, "k_blocks") / expected).min()) >= 1 - 1e-12
    for norms in JACOBIANS:
        with pytest.raises(UnsupportedModelError, match=r"encoder\..* is used by queries and passages"):
            table(pairs, norms, shared=False)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("model", ["mlp", "conv_net"])
def test_norms_and_gradient_are_right_for_any_number_of_records(model: str, n: int) -> None:
    pairs = build(model).first(n)
    expected = reference(pairs)
    for norms in ("brute_force", "pair_ghost", "jacobian"):
        assert_equal(table(pairs, norms), expected)
    assert_same_gradient(pairs, expected)


def test_no_records_have_no_norms_and_a_gradient_of_zero() -> None:
    pairs = build("mlp").first(0)
    for norms in ("brute_force", "pair_ghost", "jacobian", "k_blocks"):
        assert table(pairs, norms).shape == (0, 0)
    found = weighted_backward(pairs.batch, torch.zeros(0, 0), pairs.trained, rows_at_once=2)
    assert found.keys() == pairs.trained.keys() and not any(bool(g.any()) for g in found.values())


@pytest.mark.parametrize(
    ("model", "towers"),
    [
        ("mlp", "shared"),
        ("mlp", "separate"),
        ("mlp", "frozen_passages"),
        ("conv_net", "shared"),
        ("bert_lora", "shared"),
    ],
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


@pytest.mark.parametrize("norms", ["pair_ghost", "jacobian", "k_blocks", "linear_head"])
def test_a_table_is_a_function_of_its_own_two_records(norms: str) -> None:
    model = "linear_head" if norms == "linear_head" else "conv_net"
    pairs = build(model)
    before = table(pairs, norms)
    changed = pairs.batch.queries.clone()
    changed[2] = 17.0
    others = torch.arange(5) != 2
    after = table(replace(pairs, batch=replace(pairs.batch, queries=changed)), norms)
    assert_equal(after[others], before[others], 1e-12)
    assert float(((after[2] - before[2]) / before[2]).abs().min()) > 1e-6, "the record itself has changed"


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
    for norms in ("jacobian", "k_blocks"):
        found = make_pair_norms(norms, pairs.module).table(single)  # type: ignore[arg-type]
        assert float((found - true * (1 - 1e-4)).min()) >= 0
        far = ~torch.eye(5, dtype=torch.bool)
        if norms == "jacobian":
            assert_equal(found[far], true[far], 1e-2)


@pytest.mark.parametrize("norms", ["pair_ghost", "jacobian", "k_blocks"])
def test_autocast_changes_neither_norms_nor_gradient(norms: str) -> None:
    pairs = build("conv_net")
    pairs.module.float()
    single = replace(pairs.batch, queries=pairs.batch.queries.float(), passages=pairs.batch.passages.float())
    weights = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))

    def both() -> tuple[Tensor, Tensor]:
        found = make_pair_norms(norms, pairs.module).table(single)  # type: ignore[arg-type]
        sums = weighted_backward(single, weights, pairs.trained, rows_at_once=2)
        return found, torch.cat([g.flatten() for g in sums.values()])

    plain = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(one, other) for one, other in zip(plain, both(), strict=True))


def test_fewer_digits_than_fp32_are_refused_where_something_is_trained_and_allowed_where_nothing_is() -> None:
    pairs = build("mlp", "frozen_passages")
    passages = pairs.module[1].bfloat16()
    low = replace(pairs.batch, passages=pairs.batch.passages.bfloat16())
    assert_equal(table(replace(pairs, batch=low), "jacobian"), table(replace(pairs, batch=low), "pair_ghost"))
    passages.requires_grad_(True)
    trained = {name: p for name, p in pairs.module.named_parameters() if p.requires_grad}
    for norms in ("pair_ghost", "jacobian", "k_blocks", "brute_force"):
        with pytest.raises(UnsupportedModelError, match=r"torch.bfloat16\) has fewer digits"):
            table(replace(pairs, batch=low), norms)
    with pytest.raises(UnsupportedModelError, match="has fewer digits"):
        weighted_backward(low, torch.ones(5, 5), trained, rows_at_once=5)
    whole = build("mlp")
    rounded = replace(whole.batch, embed_queries=lambda x: whole.batch.embed_queries(x).bfloat16())
    with pytest.raises(UnsupportedModelError, match="What embeds the rows"):
        table(replace(whole, batch=rounded), "pair_ghost")


def test_the_engine_finds_norms_alone_without_adding_anything() -> None:
    pairs = build("mlp")
    engine = GhostClipping(pairs.module, max_grad_norm=1.0)

    def losses() -> Tensor:
        return pairs.batch.embed_queries(pairs.batch.queries)[:, 0]

    found = engine.norms(losses, 5)
    assert not any(bool(total.any()) for total in engine.take().values())
    stats = engine.add(losses, torch.arange(5), torch.ones(5, dtype=torch.bool))
    assert_equal(found, stats.norms, 1e-12)


def test_the_closed_form_refuses_what_is_no_linear_head() -> None:
    for model, reason in (("mlp", "not one such layer"), ("conv_net", "not one such layer")):
        with pytest.raises(UnsupportedModelError, match=reason):
            table(build(model), "linear_head")
    layer = nn.Linear(6, DIM, bias=False).double()
    for embed in (lambda x: F.normalize(layer(x).tanh(), dim=1), lambda x: layer(x)):
        batch = PairBatch(vectors(3, 0), vectors(3, 1), embed, embed, 3)
        with pytest.raises(UnsupportedModelError, match="not those of weight"):
            make_pair_norms("linear_head", layer).table(batch)

    def half_detached(x: Tensor) -> Tensor:
        projected = layer(x)
        return projected / projected.detach().norm(dim=1, keepdim=True)

    batch = PairBatch(vectors(3, 0), vectors(3, 1), half_detached, half_detached, 3)
    with pytest.raises(UnsupportedModelError, match="not those of weight"):
        make_pair_norms("linear_head", layer).table(batch)


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norms", ["brute_force", "pair_ghost", "jacobian", "k_blocks"])
def test_active_dropout_and_batch_norm_are_refused_by_name(norms: str) -> None:
    random = nn.Sequential(nn.Linear(6, DIM), nn.Dropout(0.1))
    with pytest.raises(UnsupportedModelError, match=r"1 \(Dropout\) drops at random with p=0.1"):
        make_pair_norms(norms, random)  # type: ignore[arg-type]
    strategy = make_pair_norms(norms, random.eval())  # type: ignore[arg-type]
    random.train()
    with pytest.raises(UnsupportedModelError, match="drops at random"):
        strategy.table(PairBatch(torch.ones(2, 6), torch.ones(2, 6), random, random, 2))
    normalised = nn.Sequential(nn.Linear(6, DIM), nn.BatchNorm1d(DIM)).eval()
    with pytest.raises(UnsupportedModelError, match=r"1 \(BatchNorm1d\)"):
        make_pair_norms(norms, normalised)  # type: ignore[arg-type]


@pytest.mark.parametrize("norms", ["pair_ghost", "jacobian", "k_blocks", "weighted"])
def test_randomness_without_a_module_is_refused(norms: str) -> None:
    layer = nn.Linear(6, DIM).double()

    def embed(x: Tensor) -> Tensor:
        return F.normalize(F.dropout(layer(x), 0.5), dim=1)

    batch = PairBatch(vectors(5, 0), vectors(5, 1), embed, embed, 5)
    with pytest.raises(UnsupportedModelError, match="differently in two passes"):
        if norms == "weighted":
            weighted_backward(batch, torch.ones(5, 5), dict(layer.named_parameters()), rows_at_once=2)
        else:
            make_pair_norms(norms, layer).table(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("norms", ["pair_ghost", "jacobian", "k_blocks"])
def test_embeddings_that_couple_records_are_refused(norms: str) -> None:
    layer = nn.Linear(6, DIM).double()

    def embed(x: Tensor) -> Tensor:
        projected = layer(x)
        return F.normalize(projected - projected.mean(0), dim=1)

    batch = PairBatch(vectors(5, 0), vectors(5, 1), embed, embed, 5)
    with pytest.raises(UnsupportedModelError):
        make_pair_norms(norms, layer).table(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("norms", ["pair_ghost", "jacobian", "k_blocks"])
def test_a_weight_used_behind_its_module_is_refused(norms: str) -> None:
    layer = nn.Linear(6, DIM).double()

    def embed(x: Tensor) -> Tensor:
        return F.normalize(layer(x) + F.linear(x, layer.weight), dim=1)

    batch = PairBatch(vectors(3, 0), vectors(3, 1), embed, embed, 3)
    with pytest.raises(UnsupportedModelError, match="also used outside"):
        make_pair_norms(norms, layer).table(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("norms", ["brute_force", "pair_ghost", "jacobian", "k_blocks"])
def test_embeddings_without_anything_trained_are_refused(norms: str) -> None:
    layer = nn.Linear(6, DIM).double()
    batch = PairBatch(vectors(2, 0), vectors(2, 1), lambda x: F.normalize(x, dim=1), lambda x: F.normalize(x, dim=1), 2)
    with pytest.raises(UnsupportedModelError, match="depend"):
        make_pair_norms(norms, layer).table(batch)  # type: ignore[arg-type]


def test_settings_out_of_range_and_rows_that_do_not_fit_are_refused() -> None:
    layer = nn.Linear(6, DIM).double()
    with pytest.raises(ConfigurationError, match="norms='fast' is not one of"):
        make_pair_norms("fast", layer)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="n_max=None and dim=4"):
        make_pair_norms("auto", layer, dim=4)
    with pytest.raises(ConfigurationError, match="pairs_at_once=0"):
        make_pair_norms("pair_ghost", layer, pairs_at_once=0)
    with pytest.raises(ConfigurationError, match="rows_at_once=-1"):
        make_pair_norms("jacobian", layer, rows_at_once=-1)
    for bound in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="max_logit_grad_norm"):
            clipped_pair_factors(torch.ones(1, 1), bound)
    with pytest.raises(DataError, match=r"passages of a pair batch holds \(2, 6\)"):
        PairBatch(vectors(3, 0), vectors(2, 1), layer, layer, 3)
    batch = PairBatch(vectors(3, 0), vectors(3, 1), layer, layer, 3)
    with pytest.raises(DataError, match=r"\(n, n\) expected"):
        weighted_backward(batch, torch.ones(2, 3), dict(layer.named_parameters()), rows_at_once=2)
    tower = nn.Linear(6, DIM + 1).double()
    with pytest.raises(UnsupportedModelError, match="4 dimensions and passages in 5"):
        embed_all(replace(batch, embed_passages=tower), rows_at_once=2)
    with pytest.raises(UnsupportedModelError, match=r"have shape \(3, 4, 1\)"):
        embed_all(replace(batch, embed_queries=lambda x: layer(x)[..., None]), rows_at_once=3)


# --- factors and the second pass --------------------------------------------------------------------------------


def assert_same_gradient(pairs: Pairs, norms: Tensor, tolerance: float = 1e-10) -> None:
    """With a bound that clips half of the pairs, and weights of either sign."""
    coefficients = torch.randn(norms.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    bound = float(norms.median())
    factors, dropped = clipped_pair_factors(norms, bound)
    assert dropped == 0
    gradients = BruteForce(pairs.module).gradients(pairs.batch)
    expected = {}
    for name, gradient in gradients.items():
        clipped = gradient * (bound / norms).clamp(max=1).reshape(*norms.shape, *[1] * (gradient.dim() - 2))
        expected[name] = torch.tensordot(coefficients, clipped, dims=2)
    whole = float(sum(g.square().sum() for g in expected.values())) ** 0.5
    for size in (2, 100):
        found = weighted_backward(pairs.batch, coefficients * factors, pairs.trained, rows_at_once=size)
        assert found.keys() == expected.keys()
        gap = max(float((found[name] - expected[name]).norm()) for name in found)
        assert gap < tolerance * whole


@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_second_pass_is_the_weighted_sum_of_clipped_gradients(model: str, towers: str) -> None:
    pairs = build(model, towers)
    assert_same_gradient(pairs, table(pairs, "pair_ghost"), LINEAR.get(model, 1e-10))


def test_a_clipped_gradient_is_within_the_bound_and_a_small_one_unchanged() -> None:
    norms = reference(build("mlp"))
    bound = float(norms.median())
    factors, _ = clipped_pair_factors(norms, bound)
    assert bool((factors * norms <= bound * (1 + 1e-12)).all())
    assert bool((factors[norms <= bound] == 1).all())


def test_broken_pairs_get_factor_zero_and_are_counted_while_a_norm_of_zero_is_kept() -> None:
    norms = torch.tensor([[torch.nan, torch.inf], [0.0, 2.0]], dtype=torch.float64)
    factors, dropped = clipped_pair_factors(norms, 1.0)
    assert dropped == 2
    assert factors.tolist() == [[0.0, 0.0], [1.0, 0.5]]


@pytest.mark.parametrize("model", ["mlp", "conv_net", "linear_head"])
@pytest.mark.parametrize("side", ["queries", "passages"])
def test_a_broken_record_adds_nothing_and_spoils_nothing(model: str, side: str) -> None:
    pairs = build(model)
    weights = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected_weights = weights.clone()
    (expected_weights if side == "queries" else expected_weights.T)[3] = 0
    expected = weighted_backward(pairs.batch, expected_weights, pairs.trained, rows_at_once=5)
    poisoned = getattr(pairs.batch, side).clone()
    poisoned[3, 0] = torch.nan
    broken = replace(pairs.batch, **{side: poisoned})
    weights_of_a_softmax = weights.clone()
    (weights_of_a_softmax if side == "queries" else weights_of_a_softmax.T)[3] = torch.nan
    for given in (weights, weights_of_a_softmax):
        for size in (2, 5):
            found = weighted_backward(broken, given, pairs.trained, rows_at_once=size)
            for name, gradient in found.items():
                assert torch.allclose(gradient, expected[name], rtol=1e-10, atol=1e-12)


def test_the_second_pass_leaves_no_trace_in_the_module() -> None:
    pairs = build("mlp")
    before = {name: p.detach().clone() for name, p in pairs.trained.items()}
    for norms in ("pair_ghost", "jacobian", "k_blocks"):
        table(pairs, norms)
    weighted_backward(pairs.batch, torch.ones(5, 5), pairs.trained, rows_at_once=2)
    for name, parameter in pairs.trained.items():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])
    assert not any("forward" in vars(layer) for layer in pairs.module.modules())


# --- the choice -------------------------------------------------------------------------------------------------


def test_auto_takes_the_closed_form_for_a_linear_head_whatever_its_size() -> None:
    for n in (2, 5000):
        assert choose_norms(n_max=n, dim=4, positions=1, width=9, linear_head=True) == "linear_head"


@pytest.mark.parametrize("dim", [8, 64, 384])
@pytest.mark.parametrize("shared", [True, False])
def test_auto_switches_where_the_costs_cross(dim: int, shared: bool) -> None:
    public: dict[str, Any] = dict(dim=dim, positions=32, width=384, shared=shared)
    other = "jacobian" if shared else "k_blocks"
    chosen = [choose_norms(n_max=n, **public) for n in range(1, 3 * dim + 100)]
    cost = [costs(n_max=n, **public) for n in range(1, 3 * dim + 100)]
    assert chosen[0] == "pair_ghost"
    for name, found in zip(chosen, cost, strict=True):
        if name == "pair_ghost":
            assert found["pair_ghost"] <= found[other]
        elif name == other and shared:
            assert found["jacobian"] < found["pair_ghost"]
    if not shared:
        switch = chosen.index("k_blocks")
        assert set(chosen[switch:]) == {"k_blocks"}
        assert cost[switch]["k_blocks"] < cost[switch]["pair_ghost"]
        assert cost[switch - 1]["pair_ghost"] <= cost[switch - 1]["k_blocks"]


def test_auto_takes_a_bound_only_where_exact_norms_cost_ten_times_as_much() -> None:
    public: dict[str, Any] = dict(dim=64, positions=256, width=384)
    for n in range(1, 4000, 7):
        found = costs(n_max=n, shared=True, **public)
        best = min(found["pair_ghost"], found["jacobian"])
        assert (choose_norms(n_max=n, **public) == "k_blocks") == (best > 10 * found["k_blocks"])
    assert choose_norms(n_max=4000, **public) == "k_blocks"
    assert choose_norms(n_max=128, **public) != "k_blocks"


def test_auto_builds_what_it_chose() -> None:
    pairs = build("mlp")
    strategy = make_pair_norms("auto", pairs.module, n_max=5, dim=DIM, positions=1)
    assert strategy.exact
    assert_equal(strategy.table(pairs.batch), reference(pairs))
    head = build("linear_head")
    strategy = make_pair_norms("auto", head.module, n_max=5, dim=DIM, linear_head=True)
    assert_equal(strategy.table(head.batch), reference(head))
