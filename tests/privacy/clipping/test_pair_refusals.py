"""What pairs of records refuse: randomness, coupling, hidden uses, and settings out of range."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pair_models import DIM, build, table, vectors
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError, UnsupportedModelError
from lit_dpret.privacy.clipping.pairs import (
    PairBatch,
    clipped_pair_factors,
    embed_all,
    make_pair_norms,
    weighted_backward,
)


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
