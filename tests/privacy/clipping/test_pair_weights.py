"""Clip factors and the weighted sum of clipped gradients, against all written out; and what pairs of records refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pair_models import DIM, LINEAR, MODELS, TOWERS, Pairs, assert_equal, build, reference, table, vectors
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.privacy.clipping import pairs as of_pairs
from lit_dpret.privacy.clipping.pairs import PairBatch, clipped_pair_factors, make_pair_norms, weighted_backward


def assert_same_gradient(pairs: Pairs, norms: Tensor, tolerance: float = 1e-10) -> None:
    """With a bound that clips half of the pairs, and weights of either sign."""
    coefficients = torch.randn(norms.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    bound = float(norms.median())
    factors, dropped = clipped_pair_factors(norms, bound)
    assert dropped == 0
    gradients = of_pairs.BruteForce(pairs.module).gradients(pairs.batch)
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


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("model", ["mlp", "conv_net"])
def test_norms_and_gradient_are_right_for_any_number_of_records(model: str, n: int) -> None:
    pairs = build(model).first(n)
    expected = reference(pairs)
    for norms in ("brute_force", "pair_ghost", "jacobian"):
        assert_equal(table(pairs, norms), expected)
    assert_same_gradient(pairs, expected)


@pytest.mark.like(3)
@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_second_pass_is_the_weighted_sum_of_clipped_gradients(model: str, towers: str) -> None:
    pairs = build(model, towers)
    assert_same_gradient(pairs, table(pairs, "pair_ghost"), LINEAR.get(model, 1e-10))


def test_broken_pairs_get_factor_zero_and_are_counted_while_a_norm_of_zero_is_kept() -> None:
    norms = torch.tensor([[torch.nan, torch.inf], [0.0, 2.0]], dtype=torch.float64)
    factors, dropped = clipped_pair_factors(norms, 1.0)
    assert dropped == 2
    assert factors.tolist() == [[0.0, 0.0], [1.0, 0.5]]
    assert clipped_pair_factors(torch.tensor([[0.5, 1.0, 3.0]]), 1.0)[0].tolist() == [[1.0, 1.0, pytest.approx(1 / 3)]]


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
        with pytest.raises(UnsupportedModelError, match=r"torch.bfloat16\) has lower precision"):
            table(replace(pairs, batch=low), norms)
    with pytest.raises(UnsupportedModelError, match="has lower precision"):
        weighted_backward(low, torch.ones(5, 5), trained, rows_at_once=5)
    whole = build("mlp")
    rounded = replace(whole.batch, embed_queries=lambda x: whole.batch.embed_queries(x).bfloat16())
    with pytest.raises(UnsupportedModelError, match="What embeds the rows"):
        table(replace(whole, batch=rounded), "pair_ghost")


@pytest.mark.parametrize("norms", ["brute_force", "pair_ghost", "jacobian", "k_blocks"])
def test_active_dropout_is_refused_by_name(norms: str) -> None:
    random = nn.Sequential(nn.Linear(6, DIM), nn.Dropout(0.1))
    with pytest.raises(UnsupportedModelError, match=r"1 \(Dropout\) drops at random with p=0.1"):
        make_pair_norms(norms, random)  # type: ignore[arg-type]
    strategy = make_pair_norms(norms, random.eval())  # type: ignore[arg-type]
    random.train()
    with pytest.raises(UnsupportedModelError, match="drops at random"):
        strategy.table(PairBatch(torch.ones(2, 6), torch.ones(2, 6), random, random, 2))


@pytest.mark.parametrize("norms", ["brute_force", "pair_ghost", "jacobian", "k_blocks"])
def test_batch_norm_is_refused_in_training_and_bounded_with_its_running_statistics(norms: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, DIM), nn.BatchNorm1d(DIM).requires_grad_(False)).double()
    batch = PairBatch(torch.randn(3, 6).double(), torch.randn(3, 6).double(), module, module, 3)
    with pytest.raises(UnsupportedModelError, match=r"1 is a BatchNorm1d"):
        make_pair_norms(norms, module).table(batch)  # type: ignore[arg-type]
    strategy = make_pair_norms(norms, module.eval())  # type: ignore[arg-type]
    found, exact = strategy.table(batch), make_pair_norms("brute_force", module).table(batch)
    if strategy.exact:
        assert_equal(found, exact)
    else:
        assert (found >= exact * (1 - 1e-12)).all()


#: How a layer embeds a row, before that is normalised, and why not.
REFUSED: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], str]] = {
    "randomness without a module": (lambda layer, x: F.dropout(layer(x), 0.5), "differently in two passes"),
    "coupled records": (lambda layer, x: layer(x) - layer(x).mean(0), "unit|another"),
    "a weight behind its module": (lambda layer, x: layer(x) + F.linear(x, layer.weight), "also used outside"),
    "nothing trained": (lambda layer, x: x, "depend"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("norms", ["pair_ghost", "jacobian", "k_blocks", "brute_force", "weighted"])
def test_embeddings_that_cannot_be_followed_are_refused(norms: str, kind: str) -> None:
    layer, (of, words) = nn.Linear(6, DIM).double(), REFUSED[kind]
    if (norms == "weighted" and kind != "randomness without a module") or (
        norms == "brute_force" and kind != "nothing trained"
    ):
        return  # it needs no recording
    batch = PairBatch(vectors(5, 0), vectors(5, 1), *[lambda x: F.normalize(of(layer, x), dim=1)] * 2, 5)
    with pytest.raises(UnsupportedModelError, match=words):
        if norms == "weighted":
            weighted_backward(batch, torch.ones(5, 5), dict(layer.named_parameters()), rows_at_once=2)
        else:
            make_pair_norms(norms, layer).table(batch)  # type: ignore[arg-type]


def test_settings_out_of_range_and_rows_that_do_not_fit_are_refused() -> None:
    layer = nn.Linear(6, DIM).double()
    with pytest.raises(ConfigurationError, match="norms='fast' is not one of"):
        make_pair_norms("fast", layer)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="n_max=None and dim=4"):
        make_pair_norms("auto", layer, dim=4)
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
        of_pairs.embed_all(replace(batch, embed_passages=tower), rows_at_once=2)
    with pytest.raises(UnsupportedModelError, match=r"have shape \(3, 4, 1\)"):
        of_pairs.embed_all(replace(batch, embed_queries=lambda x: layer(x)[..., None]), rows_at_once=3)


def test_the_closed_form_refuses_what_is_no_linear_head() -> None:
    for model in ("mlp", "conv_net"):
        with pytest.raises(UnsupportedModelError, match="not one such layer"):
            table(build(model), "linear_head")
    layer = nn.Linear(6, DIM, bias=False).double()

    def half_detached(x: Tensor) -> Tensor:
        projected = layer(x)
        return projected / projected.detach().norm(dim=1, keepdim=True)

    for embed in (lambda x: F.normalize(layer(x).tanh(), dim=1), layer, half_detached):
        batch = PairBatch(vectors(3, 0), vectors(3, 1), embed, embed, 3)
        with pytest.raises(UnsupportedModelError, match="not those of weight"):
            make_pair_norms("linear_head", layer).table(batch)
