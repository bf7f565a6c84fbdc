"""The mean and the robust rules; a silo that sends anything is left out or outvoted, and no round spoils the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_silos import SMALL, federation

pytest.importorskip("flwr", reason="needs the extra federated (flwr)")

from messages import MASKED, NAMES, START, Drifts, Masked, drifted

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.federated import aggregation, secure_mean
from lit_dpret.federated.aggregation import (
    Weights,
    check_weights,
    client_weights,
    next_weights,
    put_weights,
    take_weights,
    updates_needed,
    weighted_mean,
)
from lit_dpret.federated.secure_mean import FixedPoint, mean_of
from lit_dpret.federated.settings import PddAs2, Stage1

CLEAR = replace(MASKED, secure_sum=False, sum_threshold=None)
RULES = ("median", "trimmed_mean", "krum", "multi_krum")


def rule(name: str, malicious: int = 1, **more: Any) -> PddAs2:
    stage = Stage1(aggregation=name, malicious=malicious, weighting="uniform")  # type: ignore[arg-type]
    return PddAs2(stage1=stage, **more).check()


def some(count: int, seed: int = 0, size: int = 30) -> tuple[Weights, dict[str, Weights]]:
    generator = torch.Generator().manual_seed(seed)
    start = {"w": torch.randn(size, generator=generator), "b": torch.randn(2, 3, generator=generator)}
    updates = {f"c{i}": {key: value + 0.1 * torch.randn(value.shape, generator=generator)
                         for key, value in start.items()} for i in range(count)}  # fmt: skip
    return start, updates


def combined(start: Weights, updates: dict[str, Weights], run: PddAs2, faults: list[str] | None = None) -> Weights:
    told = [] if faults is None else faults
    return next_weights(start, updates, dict.fromkeys(updates, 1.0), run, where="round 0", faults=told)[0]


# -- the rules ----------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(5, 9), st.integers(0, 100))
def test_the_rules_are_those_of_their_papers(count: int, seed: int) -> None:
    """Against formulas written anew; Flower's functions are what is run."""
    start, updates = some(count, seed)
    stacked = torch.stack([torch.cat([one["b"].flatten(), one["w"]]).double() for _, one in sorted(updates.items())])

    def flat(name: str, malicious: int = 1) -> torch.Tensor:
        found = combined(start, updates, rule(name, malicious))
        return torch.cat([found["b"].flatten(), found["w"]]).double()

    ordered = stacked.sort(0).values
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    torch.testing.assert_close(flat("median"), middle, rtol=0, atol=1e-6)
    for wrong in range(1, (count - 1) // 2 + 1):
        torch.testing.assert_close(
            flat("trimmed_mean", wrong), ordered[wrong : count - wrong].mean(0), rtol=0, atol=1e-6
        )
    distances = torch.cdist(stacked, stacked).square()
    scores = distances.sort(1).values[:, 1 : max(1, count - 1 - 2) + 1].sum(1)
    torch.testing.assert_close(flat("krum"), stacked[scores.argmin()], rtol=0, atol=1e-6)
    kept = scores.argsort()[: count - 1]
    torch.testing.assert_close(flat("multi_krum"), stacked[kept].mean(0), rtol=0, atol=1e-6)


def test_too_few_silos_for_a_rule_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    assert [updates_needed(rule(name, 2).stage1) for name in ("mean", *RULES)] == [1, 5, 5, 7, 7]
    with pytest.raises(ConfigurationError, match=r"federated\.stage1\.aggregation=krum"):
        federation(tmp_path, replace(SMALL, stage1=replace(SMALL.stage1, aggregation="krum", weighting="uniform")))
    median = replace(CLEAR, stage1=replace(CLEAR.stage1, aggregation="median"))
    with pytest.raises(ConfigurationError, match=r"federated\.min_clients=2"):
        Masked(tmp_path, median, min_clients=2)
    start, updates = some(4)
    with pytest.raises(DataError, match=r"federated\.stage1\.aggregation"):
        combined(start, updates, rule("krum"))


# -- the bound ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "why"), [(1e3, "federated.update_norm"), (1e20, "federated.update_norm"), (float("nan"), "not finite")]
)
def test_an_update_times_a_great_number_or_without_numbers_is_left_out_by_name_and_spoils_nothing(
    scale: float, why: str, tmp_path: Path
) -> None:
    class Poisons(Drifts):
        def train_shared(self, weights: Any, number: int) -> Weights:
            found = super().train_shared(weights, number)
            if self.name == "client1":
                found = {key: weights[key] + scale * (found[key] - weights[key]) for key in found}
            return found

    result = Masked(tmp_path, CLEAR, silo=Poisons).launch()
    others = [name for name in NAMES if name != "client1"]
    assert result.rounds == {0: others}
    assert len(result.faults) == 1 and "client 'client1'" in result.faults[0] and why in result.faults[0]
    expected = weighted_mean({name: drifted(START, name, 0) for name in others}, dict.fromkeys(others, 1.0))
    for name, value in expected.items():
        torch.testing.assert_close(result.weights[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_norm_that_no_update_keeps_to_is_named_by_the_error(hidden: bool, tmp_path: Path) -> None:
    stage = replace(SMALL.stage1, weighting="uniform")
    run = federation(tmp_path, replace(SMALL, stage1=stage, update_norm=1e-9, secure_sum=hidden))
    updates = {name: {key: value * 1.1 for key, value in run.start.items()} for name in run.clients}
    with pytest.raises(DataError, match=r"federated\.update_norm=1e-09"):
        run.aggregate(run.start, updates, 0)


def test_a_round_whose_result_is_not_finite_keeps_the_last_good_model_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = {"w": torch.ones(4)}
    huge = {f"c{i}": {"w": torch.full((4,), 3.4e38)} for i in range(4)}
    faults: list[str] = []
    run = rule("mean", update_norm=None)
    monkeypatch.setattr(aggregation, "weighted_mean", lambda *_: {"w": torch.full((4,), float("inf"))})
    found, names = next_weights(start, huge, dict.fromkeys(huge, 1.0), run, where="round 3", faults=faults)
    assert torch.equal(found["w"], start["w"]) and names == []
    assert len(faults) == 1 and faults[0].startswith("round 3: the result")


# -- under masks --------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "weight"), [(300.0, 1.0), (0.5, -4.0), (0.5, 40.0), (0.9, -1.99)])
def test_a_sum_that_honest_silos_cannot_make_is_void_and_the_last_good_model_stays(
    change: float, weight: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = replace(SMALL.stage1, weighting="uniform")
    run = federation(tmp_path, replace(SMALL, stage1=stage, secure_sum=True))
    real, liars = secure_mean.vector_of, ["client0"]

    def vector(*given: Any) -> Any:
        found, cut = real(*given)
        if liars:
            liars.pop()
            found = np.full_like(found, change)
            found[-1] = weight
        return found, cut

    monkeypatch.setattr(secure_mean, "vector_of", vector)
    monkeypatch.setattr(secure_mean, "words_for", lambda _, clients: FixedPoint(limit=100.0, clients=clients))
    updates = {name: {key: value + 0.01 for key, value in run.start.items()} for name in run.clients}
    found = run.aggregate(run.start, updates, 0)
    assert all(torch.equal(found[key], value) for key, value in run.start.items())
    assert len(run.result.faults) == 1 and run.result.faults[0].startswith("stage 1, round 0:")
    assert any(not torch.equal(value, run.start[key]) for key, value in run.aggregate(run.start, updates, 1).items())


def mean_under_masks(
    start: Weights, changes: list[np.ndarray], weights: list[float], limit: float
) -> tuple[torch.Tensor, float]:
    """The secure mean of changes of one tensor, and its weight; both as they come out of rounded words."""
    fixed, words = secure_mean.words_for(limit, len(changes)), []
    for change, weight in zip(changes, weights, strict=True):
        update = {"w": start["w"] + torch.from_numpy(change)}
        words.append(fixed.encode(secure_mean.vector_of(start, update, weight, limit)[0]))
    total = fixed.decode(np.sum(words, axis=0, dtype=np.uint32))
    return mean_of(start, total, fixed, clients=len(changes), limit=limit, norm=None)["w"], float(total[-1])


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 12), st.floats(0.05, 1.0), st.floats(0.01, 3.0), st.integers(0, 99))
def test_no_sum_of_honest_silos_is_void_however_it_is_rounded(
    count: int, share: float, limit: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    changes = [draw.choice([-2 * limit, limit, 0.0], 20) for _ in range(count)]
    mean_under_masks({"w": torch.ones(20)}, changes, [1.0, *[share] * (count - 1)], limit)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 12), st.floats(0.0, 6.0), st.floats(0.05, 3.0), st.integers(0, 99))
def test_the_mean_is_nowhere_further_from_the_exact_one_than_rounding_explains(
    count: int, smaller: float, limit: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    weights = draw.uniform(0.5, 1.0, count) * 10.0**-smaller
    changes = [draw.choice([-limit, limit, limit / 3], 20) for _ in range(count)]
    exact = np.average(changes, axis=0, weights=weights)
    found, weight = mean_under_masks({"w": torch.zeros(20)}, changes, weights.tolist(), limit)
    allowed = (1 + limit) * secure_mean.words_for(limit, count).error / weight + 1e-7 * limit
    assert np.abs(found.double().numpy() - exact).max() <= allowed


@pytest.mark.parametrize(("count", "limit"), [(3, 0.5), (3, 3.0), (10, 1.0), (100, 0.5), (100, 3.0)])
def test_a_sum_that_is_taken_moves_no_weight_beyond_the_limit_however_little_it_weighs(
    count: int, limit: float
) -> None:
    """The largest sum that is taken, of silos that together weigh one step: undivided it is n + 1 limits, and more."""
    start, fixed = {"w": torch.zeros(2)}, secure_mean.words_for(limit, count)
    step = 1 / fixed.scale
    largest = np.floor((limit * (step + fixed.error) + fixed.error) / step) * step
    assert largest / step >= (count + 1) * min(limit, 1.0)
    found = mean_of(start, np.array([largest, -largest, step]), fixed, clients=count, limit=limit, norm=None)
    assert torch.equal(found["w"], torch.tensor([limit, -limit]))
    with pytest.raises(DataError):
        mean_of(start, np.array([largest + step, 0.0, step]), fixed, clients=count, limit=limit, norm=None)


# -- the mean, and updates that are no weights of the model


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.integers(0, 50))
def test_fedavg_is_the_closed_form_and_the_order_of_clients_changes_nothing(counts: list[int], seed: int) -> None:
    _, found = some(len(counts), seed)
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
    with pytest.raises(DataError, match="'a'"):
        client_weights({"a": 0}, "examples")


def test_an_update_with_a_tensor_too_many_is_named_with_its_client() -> None:
    start, found = some(2)
    with pytest.raises(DataError, match=r"client 'c1'.*'x'"):
        check_weights("client 'c1'", found["c1"] | {"x": torch.zeros(1)}, start)


def test_only_what_is_trained_travels_and_it_comes_back_as_it_was() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].requires_grad_(False)
    before = take_weights(net)
    assert set(before) == {"0.weight", "0.bias"}
    put_weights(net, {name: value + 1 for name, value in before.items()})
    assert torch.equal(take_weights(net)["0.bias"], before["0.bias"] + 1)
    with pytest.raises(DataError, match=r"'0\.bias'"):
        put_weights(net, before | {"0.bias": torch.tensor([1.0, float("inf")])})
