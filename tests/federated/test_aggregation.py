"""Aggregation: the closed form, and the bad updates that are named before they spoil a model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated.aggregation import client_weights, put_weights, take_weights, weighted_mean


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


@pytest.mark.parametrize(
    ("counts", "settings_", "error", "message"),
    [
        ({"a": 1}, {"weighting": "capped"}, ConfigurationError, "n_hat=None"),
        ({"a": 1}, {"weighting": "uniform", "n_hat": 5}, ConfigurationError, "n_hat=5"),
        ({"a": 1}, {"weighting": "median"}, ConfigurationError, "weighting='median'"),
        ({"a": 0}, {"weighting": "examples"}, DataError, "Client 'a' has no train query"),
    ],
)
def test_a_weighting_without_meaning_is_refused(
    counts: dict[str, int], settings_: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        client_weights(counts, **settings_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.full((3, 2), float("nan"))}, "client 'c1': 'w' holds values that are not finite"),
        ({"w": torch.zeros(2, 3)}, r"client 'c1': 'w' has shape \(2, 3\)"),
        ({"x": torch.zeros(1)}, "client 'c1': 1 tensors are missing or too many, 'x'"),
    ],
)
def test_a_bad_update_is_named_with_its_client(change: dict[str, torch.Tensor], message: str) -> None:
    found = updates(2, 0)
    found["c1"] |= change
    with pytest.raises(DataError, match=message):
        weighted_mean(found, {"c0": 1.0, "c1": 1.0})


def test_no_answer_and_no_weight_are_refused() -> None:
    with pytest.raises(DataError, match="No client answered"):
        weighted_mean({}, {})
    with pytest.raises(DataError, match="'c0' has no positive weight"):
        weighted_mean(updates(1, 0), {})


def test_only_what_is_trained_travels_and_it_comes_back_as_it_was() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].requires_grad_(False)
    before = take_weights(net)
    assert set(before) == {"0.weight", "0.bias"}
    put_weights(net, {name: value + 1 for name, value in before.items()})
    assert torch.equal(take_weights(net)["0.bias"], before["0.bias"] + 1)
    with pytest.raises(DataError, match=r"'0\.bias' holds values that are not finite"):
        put_weights(net, before | {"0.bias": torch.tensor([1.0, float("inf")])})
