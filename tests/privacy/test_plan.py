"""A plan is public, complete and consistent: it keeps its own budget, and says what else it costs."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any, get_args

import pytest

from lit_dpret.cards import forecast
from lit_dpret.cards.forecast import cautions, describe_plan
from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.privacy.accounting.accountant import Accountant
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.accounting.coupled_sensitivity import Coupling
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    Poisson,
    Shuffle,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import PrivacyBudget, SamplingName
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan
from lit_dpret.tasks.plan import format_plan

N = 2000


def budget(eps: float = 1.0, **changes: Any) -> PrivacyBudget:
    return PrivacyBudget(**{"eps": eps, "delta": 1e-5, **changes})


def build(**changes: Any) -> PrivacyPlan:
    settings: dict[str, Any] = {"budget": budget(), "steps": 50, "max_grad_norm": 0.5, "n_public": N}
    request = PlainSamplingRequest(sampling="poisson", expected_batch_size=40)
    for name in set(changes) & set(vars(request)):
        setattr(request, name, changes.pop(name))
    return PrivacyPlan.build(**{**settings, "request": request, **changes})


PRIVATE: dict[str, Any] = {"budget": budget(neighbours="add_or_remove"), "n_public": None, "sample_rate": 0.02}


@pytest.fixture(scope="module")
def truncated() -> PrivacyPlan:
    return build(sampling="truncated_poisson", steps=2000)


def test_a_plan_survives_json_exactly(truncated: PrivacyPlan) -> None:
    coupled = replace(truncated, coupling=Coupling(bounded="pair", sub_batches=2, n_max=9, expected=7.5))
    assert coupled.fingerprint() != truncated.fingerprint()
    for plan in (truncated, coupled):
        restored = PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert restored == plan
        assert restored.fingerprint() == plan.fingerprint()
        assert restored.epsilon() == plan.epsilon()


def test_equal_plans_have_equal_fingerprints_and_any_change_shows(truncated: PrivacyPlan) -> None:
    whole = replace(truncated, budget=budget(eps=1), max_grad_norm=1, sensitivity=1)
    real = replace(truncated, budget=budget(eps=1.0), max_grad_norm=1.0, sensitivity=1.0)
    assert whole == real
    assert whole.fingerprint() == real.fingerprint()
    changes: list[dict[str, Any]] = [
        {"steps": 2001},
        {"noise_multiplier": truncated.noise_multiplier + 1e-9},
        {"denominator": 41.0},
        {"clip": "automatic"},
        {"clip_groups": "per_layer"},
        {"law": Poisson(sample_rate=0.02)},
        {"budget": budget(neighbours="replace_one")},
        {"n_public": None},
        {"max_units_per_user": 3},
    ]
    fingerprints = {replace(truncated, **change).fingerprint() for change in changes}
    assert len(fingerprints | {truncated.fingerprint()}) == len(changes) + 1


def test_a_plan_is_frozen_and_a_malformed_record_of_one_is_refused(truncated: PrivacyPlan) -> None:
    with pytest.raises(FrozenInstanceError):
        truncated.noise_multiplier = 0.1  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match="sigma"):
        PrivacyPlan.from_dict({**truncated.to_dict(), "sigma": 1.0})
    record = truncated.to_dict()
    del record["law"]
    with pytest.raises(ConfigurationError, match="law"):
        PrivacyPlan.from_dict(record)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm"),
        ({"denominator": -1.0}, "denominator"),
        ({"steps": 0}, "steps=0"),
        ({"physical_batch_size": 0}, "datamodule.physical_batch_size"),
        ({"clip": "flat"}, "privacy.clip='flat'"),
        ({"clip_groups": "global"}, "privacy.clip_groups='global' is not one of flat, per_layer"),
        ({"accountant": "gdp"}, "privacy.accountant='gdp'"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(truncated: PrivacyPlan, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        replace(truncated, **change)


# -- building ----------------------------------------------------------------------------------


def test_the_planned_steps_use_the_budget_and_do_not_pass_it(truncated: PrivacyPlan) -> None:
    plan = truncated
    assert 0.98 * plan.budget.eps < plan.epsilon() <= plan.budget.eps
    assert plan.epsilon() == epsilon([plan.release(plan.steps)], delta=1e-5, neighbours="zero_out")
    counter = Accountant(plan.budget.delta, plan.budget.neighbours, plan.accountant)
    assert counter.max_steps(plan.release(), plan.budget.eps, at_most=plan.steps) == plan.steps


def test_the_law_holds_the_resolved_rate_and_cap(truncated: PrivacyPlan) -> None:
    law = truncated.law
    assert isinstance(law, TruncatedPoisson)
    assert (law.sample_rate, law.n) == (0.02, N)
    assert 40 < law.cap < 120
    assert build(sampling="truncated_poisson", cap=100, noise_multiplier=9.0).law == replace(law, cap=100)
    assert build(noise_multiplier=9.0).law == Poisson(sample_rate=0.02)
    assert build(sampling="shuffle").law == Shuffle(batch_size=40, n=N)
    assert build(sampling="full_batch", steps=3).law == FullBatch()
    replaced = budget(neighbours="replace_one")
    fixed = build(sampling="fixed_size", accountant="rdp", budget=replaced, noise_multiplier=30.0)
    assert fixed.law == FixedSize(batch_size=40, n=N)
    by_rate = build(sampling="shuffle", sample_rate=0.02, expected_batch_size=None)
    assert by_rate.law == Shuffle(batch_size=40, n=N)
    assert build(noise_multiplier=9.0, clip_groups="per_layer").clip_groups == "per_layer"


def test_noise_is_the_multiplier_times_the_bound_and_goes_into_every_release(truncated: PrivacyPlan) -> None:
    """However the parameters are grouped for clipping."""
    for plan in (truncated, replace(truncated, clip_groups="per_layer")):
        assert plan.sensitivity == plan.max_grad_norm == 0.5
        assert plan.noise_std == plan.noise_multiplier * 0.5
        assert plan.release(3) == GaussianRelease(noise_multiplier=plan.noise_multiplier, law=plan.law, count=3)
    given = build(noise_multiplier=4.0)
    assert given.noise_multiplier == 4.0 and given.epsilon() < given.budget.eps


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 40.0),
        ({"expected_batch_size": None, "sample_rate": 0.05}, 100.0),
        ({"sampling": "shuffle"}, 40.0),
        ({"sampling": "full_batch", "steps": 3}, 2000.0),
        ({"sampling": "full_batch", "steps": 3, "expected_batch_size": None}, 2000.0),
        (PRIVATE | {"expected_batch_size": 30}, 30.0),
    ],
)
def test_the_denominator_is_a_public_constant(changes: dict[str, Any], expected: float) -> None:
    assert build(noise_multiplier=50.0, **changes).denominator == expected


def test_a_given_noise_that_would_overspend_is_refused_with_the_steps_that_fit() -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.noise_multiplier=1\.2 allows (\d+) of the 5000") as refusal:
        build(noise_multiplier=1.2, steps=5000)
    fits = int(str(refusal.value).split(" allows ")[1].split()[0])
    release = GaussianRelease(noise_multiplier=1.2, law=Poisson(sample_rate=0.02))
    spent = [epsilon([replace(release, count=c)], delta=1e-5, neighbours="zero_out") for c in (fits, fits + 1)]
    assert spent[0] <= 1.0 < spent[1]
    assert build(noise_multiplier=1.2, steps=fits).steps == fits


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling": "bootstrap"}, "datamodule.sampling='bootstrap'"),
        ({"steps": 0}, "trainer.max_steps"),
        ({"n_public": 0}, "no unit"),
        ({"expected_batch_size": None}, "datamodule.expected_batch_size nor datamodule.sample_rate"),
        ({"expected_batch_size": 0}, "expected_batch_size=0"),
        ({"expected_batch_size": 2001}, "exceeds the 2000 units"),
        ({"expected_batch_size": None, "sample_rate": 1.5}, "datamodule.sample_rate=1.5"),
        ({"sample_rate": 0.5}, "contradict each other"),
        ({"budget": budget(delta=0.01)}, "privacy.delta=0.01 is not below 1/n"),
    ],
)
def test_settings_that_make_no_plan_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        build(**changes)


@pytest.mark.parametrize("sampling", [s for s in get_args(SamplingName) if s != "full_batch"])
def test_under_add_or_remove_nothing_is_derived_from_the_data(sampling: str) -> None:
    private = {"budget": budget(neighbours="add_or_remove"), "sampling": sampling, "n_public": None}
    with pytest.raises(ConfigurationError, match=r"datamodule\.sample_rate and privacy\.delta"):
        build(**private)
    with pytest.raises(ConfigurationError, match=r"datamodule\.sample_rate and privacy\.delta"):
        build(**{**private, "n_public": N})
    if sampling != "poisson":
        with pytest.raises(ConfigurationError, match=r"datamodule\.sampling=poisson"):
            build(**private, sample_rate=0.02)
    if sampling == "truncated_poisson":
        with pytest.raises(ConfigurationError, match=r"datamodule\.sampling=poisson"):
            build(**{**private, "n_public": N}, sample_rate=0.02)
    with pytest.raises(ConfigurationError, match=r"datamodule\.expected_batch_size"):
        build(**{**private, "sampling": "poisson"}, sample_rate=0.02, expected_batch_size=None)


def test_constants_declared_under_add_or_remove_are_taken_as_they_are() -> None:
    private = budget(neighbours="add_or_remove")
    plan = build(budget=private, n_public=None, sample_rate=0.013, expected_batch_size=26)
    assert (plan.law, plan.denominator, plan.n_public) == (Poisson(sample_rate=0.013), 26.0, None)
    assert "2000" not in json.dumps(plan.to_dict())
    law = {"sampling": "truncated_poisson", "n_public": 3000, "sample_rate": 0.013, "cap": 90}
    declared = build(budget=private, expected_batch_size=26, noise_multiplier=9.0, **law)
    assert declared.law == TruncatedPoisson(sample_rate=0.013, cap=90, n=3000)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": "truncated_poisson", "accountant": "rdp"},
        {"sampling": "truncated_poisson", "accountant": "prv"},
        {"sampling": "fixed_size"},
        {"accountant": "rdp", "budget": budget(neighbours="replace_one")},
    ],
)
def test_a_plan_that_no_accountant_judges_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedAccountingError, match=r"datamodule\.sampling=.*is supported by"):
        build(**changes)


# -- describing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eps", "delta", "batch", "sampling", "named"),
    [
        (20.0, 9e-4, 40, "poisson", []),
        (5.0, 1.1e-3, 40, "poisson", ["delta=0.0011"]),
        (5.0, 1e-5, 100, "poisson", []),
        (5.0, 1e-5, 101, "poisson", ["expected_batch_size"]),
        (5.0, 1.1e-3, 101, "poisson", ["delta=0.0011", "expected_batch_size"]),
        (5.0, 1e-5, None, "full_batch", []),
        (21.0, 1e-5, 40, "poisson", ["privacy.eps=21"]),
    ],
)
def test_a_plan_cautions_of_a_large_delta_or_epsilon_and_of_batches_that_are_most_of_the_data(
    eps: float, delta: float, batch: int | None, sampling: str, named: list[str]
) -> None:
    few = {"n_public": 200, "noise_multiplier": 4.0, "steps": 3}
    told = cautions(build(budget=budget(eps, delta=delta), sampling=sampling, expected_batch_size=batch, **few))
    assert len(told) == len(named) and all(word in text for word, text in zip(named, told, strict=True))


@pytest.fixture(scope="module")
def facts(truncated: PrivacyPlan) -> dict[str, Any]:
    return describe_plan(truncated)


@pytest.mark.costly
def test_a_description_is_json_and_restates_the_plan(facts: dict[str, Any], truncated: PrivacyPlan) -> None:
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert PrivacyPlan.from_dict(facts["plan"]) == truncated
    assert facts["fingerprint"] == truncated.fingerprint() and facts["epsilon"] == truncated.epsilon()
    assert facts["epochs"] == pytest.approx(40.0)
    assert facts["noise_to_batch"] == truncated.noise_multiplier / 40
    assert isinstance(truncated.law, TruncatedPoisson) and facts["cap"] == truncated.law.cap


def test_a_description_counts_the_same_noise_by_every_accountant_and_relation(facts: dict[str, Any]) -> None:
    table = {(r["accountant"], r["neighbours"], r["sampling"]): r["epsilon"] for r in facts["epsilon_by"]}
    stated = table["pld", "zero_out", "truncated_poisson"]
    assert stated == facts["epsilon"]
    plain = table["pld", "zero_out", "poisson"]
    assert plain <= stated <= 1.005 * plain
    assert plain < table["prv", "zero_out", "poisson"] < plain + 0.02
    assert table["pld", "add_or_remove", "poisson"] == pytest.approx(plain)
    assert plain < table["rdp", "zero_out", "poisson"] < table["pld", "replace_one", "poisson"] * 1.5
    assert table["pld", "zero_out", "shuffle"] == facts["epsilon_if_shuffled"]["epsilon"] > stated
    assert facts["ceilings"]["accountant"] == "pld"
    assert 0.5 < facts["ceilings"]["membership_accuracy"] < 1


def test_a_description_says_which_noise_other_budgets_need(facts: dict[str, Any], truncated: PrivacyPlan) -> None:
    rows = facts["noise_for"]
    assert [row["eps"] for row in rows] == [1.0, 3.0, 8.0, 16.0]
    noises = [row["noise_multiplier"] for row in rows]
    assert noises == sorted(noises, reverse=True)
    assert noises[0] == pytest.approx(truncated.noise_multiplier, rel=0.011)
    for row in rows:
        release = GaussianRelease(noise_multiplier=row["noise_multiplier"], law=Poisson(sample_rate=0.02), count=2000)
        assert epsilon([release], delta=1e-5, neighbours="zero_out") <= row["eps"]


@pytest.mark.slow
def test_the_description_under_add_or_remove_holds_nothing_but_declared_constants() -> None:
    private = build(**PRIVATE, noise_multiplier=9.0, steps=5)
    facts = describe_plan(private)
    assert facts["knee"]["batches"][-1] <= 40 / 0.02 / 2
    assert {row["sampling"] for row in facts["epsilon_matrix"]} == {"poisson"}
    assert "fixed_size" not in format_plan(facts)
    assert describe_plan(build(sampling="full_batch", steps=3))["knee"]["batches"][-1] == N


@pytest.mark.costly
def test_what_cannot_be_computed_is_empty_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "BUDGETS", (0.5, 1.0))
    facts = describe_plan(build(sampling="full_batch", steps=3))
    unsupported = [row for row in facts["epsilon_by"] if row["accountant"] == "prv"]
    assert unsupported
    assert all(row["epsilon"] is None and "prv" in row["why"] for row in unsupported)
    private = build(**PRIVATE, noise_multiplier=9.0, steps=5)
    answer = describe_plan(private)["epsilon_if_shuffled"]
    assert answer["epsilon"] is None
    assert "add_or_remove" in answer["why"]


@pytest.mark.parametrize(
    ("accountant", "asked", "passes"),
    [
        ("prv", {"sampling": "truncated_poisson"}, False),
        ("prv", {"sampling": "truncated_poisson", "cap": 200}, True),  # of 200 units it is Poisson sampling
        ("pld", {"sampling": "poisson", "sample_rate": 1.0}, True),
        ("rdp", {"sampling": "shuffle"}, True),
    ],
)
def test_what_a_plan_might_accept_is_not_refused_before_the_data_are_read(
    accountant: Any, asked: dict[str, Any], passes: bool
) -> None:
    mode = DPSGD(eps=3.0, accountant=accountant)
    request = PlainSamplingRequest(**{"expected_batch_size": 8} | asked)
    if passes:
        mode.check_request(request)
    else:
        with pytest.raises(UnsupportedAccountingError):
            mode.check_request(request)
