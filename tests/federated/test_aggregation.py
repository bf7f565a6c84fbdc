"""Aggregation: the closed form, and the bad updates that are named before they spoil a model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_dpret.errors import DataError
from lit_dpret.federated.aggregation import check_weights, client_weights, put_weights, take_weights, weighted_mean


def updates(count: int, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {f"c{i}": {name: torch.randn(shape, generator=generator) for name, shape in (("w", (3, 2)), ("b", (2,)))}
            for i in range(count)}  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.integers(0, 50))
def test_fedavg_is_the_closed_form_and_the_order_of_clients_changes_nothing(counts: list[int], seed: int) -> None:
    found = updates(len(counts), seed)
    sizes = dict(zip(found, counts, strict=True))
    mean = weighted_mean(found, client_weights(sizes, "examples"))
    backwards = weighted_mean(dict(reversed(found.items())), client_weights(sizes, "examples"))
    for name in ("w", "b"):
        stacked = torch.stack([found[c][name].double() for c in found])
        share = torch.tensor(counts, dtype=torch.float64) / sum(counts)
        torch.testing.assert_close(
            mean[name].double(), torch.einsum("c,c...->...", share, stacked), rtol=1e-6, atol=1e-6
        )
        assert torch.equal(mean[name], backwards[name])
        assert (mean[name] <= stacked.max(0).values + 1e-5).all() and (mean[name] >= stacked.min(0).values - 1e-5).all()


def test_weights_are_counts_or_equal_or_capped() -> None:
    counts = {"a": 10, "b": 1000}
    assert client_weights(counts, "examples") == {"a": 10.0, "b": 1000.0}
    assert client_weights(counts, "uniform") == {"a": 1.0, "b": 1.0}
    assert client_weights(counts, "capped", n_hat=100) == {"a": 0.1, "b": 1.0}


def test_a_client_without_train_queries_is_refused() -> None:
    with pytest.raises(DataError, match="'a'"):
        client_weights({"a": 0}, "examples")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.full((3, 2), float("nan"))}, "client 'c1': 'w' contains values that are not finite"),
        ({"w": torch.zeros(2, 3)}, r"client 'c1': 'w' has shape \(2, 3\)"),
        ({"x": torch.zeros(1)}, "client 'c1': 1 tensors are missing or too many, 'x'"),
    ],
)
def test_a_bad_update_is_named_with_its_client(change: dict[str, torch.Tensor], message: str) -> None:
    found = updates(2, 0)
    found["c1"] |= change
    with pytest.raises(DataError, match=message):
        check_weights("client 'c1'", found["c1"], found["c0"])


def test_only_what_is_trained_travels_and_it_comes_back_as_it_was() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].requires_grad_(False)
    before = take_weights(net)
    assert set(before) == {"0.weight", "0.bias"}
    put_weights(net, {name: value + 1 for name, value in before.items()})
    assert torch.equal(take_weights(net)["0.bias"], before["0.bias"] + 1)
    with pytest.raises(DataError, match=r"'0\.bias' contains values that are not finite"):
        put_weights(net, before | {"0.bias": torch.tensor([1.0, float("inf")])})
