"""Who shares a sub-batch with whom, and the bound on its size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.coupled_sensitivity import Coupling, change_of_a_sub_batch, resolve_n_max
from lit_dpret.privacy.accounting.releases import FixedSize, FullBatch, Poisson, SamplingLaw, Shuffle, TruncatedPoisson
from lit_dpret.privacy.batches import PADDING
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan
from lit_dpret.privacy.sampling import PrivateBatchSampler

LAWS: list[SamplingLaw] = [
    Poisson(sample_rate=0.3),
    TruncatedPoisson(sample_rate=0.3, cap=70, n=200),
    FixedSize(batch_size=60, n=200),
    Shuffle(batch_size=60, n=200),
    FullBatch(),
]


def sampler(law: SamplingLaw, **settings: Any) -> PrivateBatchSampler:
    known = {"units": 200, "steps_per_epoch": 50, "physical_batch_size": 8, "sub_batches": (4, None)}
    return PrivateBatchSampler(law, stream=KeyedStream(b"k" * 32, "run"), **{**known, **settings})


def members(found: list[list[Any]]) -> list[set[int]]:
    return [{draw.unit for draw in part if draw.unit != PADDING} for part in found]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_a_logical_batch_falls_into_sub_batches_that_hold_each_drawn_unit_once(law: SamplingLaw) -> None:
    drawn = sampler(law)
    for step in range(3):
        parts = members(drawn.physical_batches(step))
        assert len(parts) == 4 == drawn.physical_batches_per_step
        assert set().union(*parts) == set(drawn.draw(step).tolist())
        assert sum(map(len, parts)) == len(drawn.draw(step))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_taking_one_unit_out_changes_exactly_one_sub_batch(law: SamplingLaw, monkeypatch: Any) -> None:
    drawn = sampler(law)
    before = members(drawn.physical_batches(0))
    units = drawn.draw(0)
    monkeypatch.setattr(drawn, "draw", lambda step: np.delete(units, 5))
    after = members(drawn.physical_batches(0))
    changed = [a ^ b for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [{int(units[5])}]


def test_units_are_assigned_independently_and_evenly() -> None:
    drawn = sampler(FullBatch())
    together = np.zeros((200, 200))
    for step in range(400):
        for part in members(drawn.physical_batches(step)):
            chosen = np.array(sorted(part))
            together[np.ix_(chosen, chosen)] += 1
    pairs = together[np.triu_indices(200, 1)]
    assert abs(pairs.mean() / 400 - 1 / 4) < 0.005
    assert abs(pairs.std() / np.sqrt(400 * 3 / 16) - 1) < 0.05


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_no_sub_batch_holds_more_than_n_max_and_the_rest_is_left_out_evenly(law: SamplingLaw) -> None:
    drawn = sampler(law, sub_batches=(4, 9))
    took, drew = np.zeros(200), np.zeros(200)
    for step in range(300):
        parts = members(drawn.physical_batches(step))
        assert max(map(len, parts)) <= 9
        took[sorted(set().union(*parts))] += 1
        drew[drawn.draw(step)] += 1
    share = took / drew
    assert abs(share[:100].mean() - share[100:].mean()) < 0.03


def test_a_single_sub_batch_of_a_capped_law_is_never_cut() -> None:
    assert resolve_n_max(None, law=LAWS[1], sub_batches=1, expected=60) == 70
    assert resolve_n_max(None, law=FullBatch(), sub_batches=1, expected=200, units=200) == 200


def test_the_default_bound_is_hardly_ever_reached() -> None:
    chosen = resolve_n_max(
        None, law=TruncatedPoisson(sample_rate=0.2, cap=10_500, n=50_000), sub_batches=25, expected=10_000
    )
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(10_500, [1 / 25] * 25, size=4000)
    assert 400 < chosen < 550 and sizes.max() <= chosen


@pytest.mark.parametrize("law", [LAWS[0], LAWS[1]], ids=lambda law: law.kind)
def test_only_under_add_or_remove_can_a_removed_unit_let_another_one_in(law: SamplingLaw) -> None:
    for neighbours in ("zero_out", "replace_one"):
        assert change_of_a_sub_batch(neighbours, law, n_max=9) == "add_or_remove"  # type: ignore[arg-type]
    assert change_of_a_sub_batch("add_or_remove", law, n_max=9) == "replace_one"
    assert change_of_a_sub_batch("add_or_remove", LAWS[1], n_max=70) == "add_or_remove"


def test_a_declared_bound_below_the_mean_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.n_max=14 is below the 15 units"):
        resolve_n_max(14, law=LAWS[1], sub_batches=4, expected=60)


def test_a_plan_with_a_coupling_survives_json() -> None:
    from lit_dpret.privacy.budget import PrivacyBudget

    plan = PrivacyPlan.build(
        PrivacyBudget(eps=1.0, delta=1e-5), PlainSamplingRequest(sampling="poisson", expected_batch_size=20),
        steps=2, max_grad_norm=1.0, n_public=200, noise_multiplier=30.0,
    )  # fmt: skip
    import dataclasses
    import json

    coupled = dataclasses.replace(plan, coupling=Coupling(bounded="pair", sub_batches=2, n_max=9, expected=7.5))
    assert PrivacyPlan.from_dict(json.loads(json.dumps(coupled.to_dict()))) == coupled
    assert coupled.fingerprint() != plan.fingerprint()
