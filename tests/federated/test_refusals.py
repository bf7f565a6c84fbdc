"""Under a budget everything that would release what nobody counts is refused, one sentence each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
from tiny_silos import PRIVATE, SMALL

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.data.planted import Planted
from lit_dpret.federated.plan import FederationPlan
from lit_dpret.federated.settings import PddAs2, Stage1
from lit_dpret.federated.trust import sights, trust_table


def changed(run: PddAs2, **parts: Any) -> PddAs2:
    """The run with some settings of its parts replaced."""
    made = {name: replace(getattr(run, name), **value) if isinstance(value, dict) else value
            for name, value in parts.items()}  # fmt: skip
    return replace(run, **made)


MASKED: dict[str, Any] = {"secure_sum": True, "stage1": {"weighting": "uniform"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage1": {"in_batch": True}}, r"stage1\.in_batch=true .* Set it to false"),
        ({"stage2": {"in_batch": True}}, r"stage2\.in_batch=true .* Set it to false"),
        ({"stage1": {"other_positives": 1}}, r"stage1\.other_positives .* Set it to 0"),
        ({"stage2": {"request": "exact"}}, r"stage2\.request=exact .* dp_centroid or none"),
        ({"stage2": {"response": "raw"}}, r"stage2\.response=raw .* public, dp_centroid or synthetic"),
        ({"stage1": {"weighting": "examples"}}, r"weighting=examples tells the server how many"),
        ({"stage1": {"weighting": "capped", "n_hat": 9}}, r"capped tells the server .* Set federated\.secure_sum=true"),
    ],
)
def test_a_budget_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"federated\.privacy\.eps=20: federated\..*{message}"):
        changed(PRIVATE, **change).check()
    changed(changed(PRIVATE, **change), privacy={"eps": None}).check()  # nothing is promised, nothing refused


def test_the_papers_settings_pass_and_a_budget_takes_capped_weights_under_masks_and_no_request_at_all() -> None:
    assert PddAs2().check() == PddAs2() and SMALL.check() is SMALL and PRIVATE.check() is PRIVATE
    changed(PRIVATE, stage1={"weighting": "capped", "n_hat": 9}, secure_sum=True).check()
    changed(PRIVATE, stage2={"request": "none"}).check()
    changed(PRIVATE, stage2={"negatives": "dynamic", "request": "exact", "response": "raw"}).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage1": {"rounds": 0, "warmup_rounds": 0}}, "no round"),
        ({"stage1": {"rounds": -1}}, r"stage1\.rounds=-1"),
        ({"stage1": {"batch_size": 0}}, r"stage1\.batch_size=0"),
        ({"stage1": {"strategy": "fedprox"}}, r"strength=0 with federated\.stage1\.strategy=fedprox"),
        ({"stage1": {"strength": 0.1}}, r"strength=0\.1 with federated\.stage1\.strategy=fedavg"),
        ({"stage1": {"strategy": "fedsgd"}}, r"federated\.stage1\.strategy"),
        ({"stage1": {"negatives": "hard"}}, r"federated\.stage1\.negatives"),
        ({"stage1": {"optimizer_state": "lose"}}, r"federated\.stage1\.optimizer_state"),
        ({"stage1": {"weighting": "capped"}}, "n_hat=None goes with"),
        ({"stage2": {"n": 9, "top_k": 5}}, "n=9 negatives cannot be drawn from the best top_k=5"),
        ({"stage2": {"request": "hashed"}}, "is not one of exact, dp_centroid, none"),
        ({"stage2": {"send_as": "int8"}}, "send_as='int8'"),
        ({"stage2": {"anchor": -1.0}}, "anchor=-1"),
        ({"stage2": {"response": "dp_centroid"}}, r"Set federated\.privacy\.collection_eps"),
        ({"privacy": {"eps": 0.0}}, r"privacy\.eps=0\.0 must be a positive"),
        ({"privacy": {"eps": True}}, r"privacy\.eps=True must be a positive"),
        ({"privacy": {"eps": "8"}}, r"privacy\.eps='8' must be a positive"),
        ({"privacy": {"eps": float("nan")}}, r"privacy\.eps=nan must be a positive"),
        ({"privacy": {"eps": 1.0, "delta": "1e-5"}}, r"privacy\.delta='1e-5' must be a positive"),
        ({"privacy": {"collection_radius": float("inf")}}, r"privacy\.collection_radius=inf must be a positive"),
        ({"stage1": {"in_batch": "false"}}, r"stage1\.in_batch='false' must be true or false"),
        ({"stage2": {"in_batch": None}}, r"stage2\.in_batch=None must be true or false"),
        ({"secure_sum": "false"}, "secure_sum='false' must be true or false"),
        ({"privacy": {"unit": "user"}}, "is not one of query, pair"),
        ({"privacy": {"noise": "laplace"}}, r"federated\.privacy\.noise"),
        ({"privacy": {"eps": 1.0, "neighbours": "add_or_remove"}}, "Set it to zero_out or replace_one"),
        ({"secure_sum": True}, "needs a public bound"),
        ({"update_limit": 0.0}, "update_limit=0"),
        ({**MASKED, "sum_threshold": 2}, r"federated\.sum_threshold=2"),
        ({"sum_threshold": 3}, r"federated\.sum_threshold=3 goes with"),
        ({"roster": True}, r"federated\.roster=true"),
        ({**MASKED, "stage1": {"aggregation": "krum", "weighting": "uniform"}}, r"aggregation=krum with .*secure_sum"),
        ({"stage1": {"aggregation": "median"}}, r"federated\.stage1\.weighting=examples"),
        ({"stage1": {"aggregation": "mode"}}, r"federated\.stage1\.aggregation"),
        ({"stage1": {"malicious": 0}}, r"federated\.stage1\.malicious=0"),
        ({"update_norm": 0.0}, r"federated\.update_norm=0\.0"),
        ({"train_on": "guesses"}, r"federated\.train_on='?guesses"),
        ({"train_on": "synthetic", "stage2": {"request": "dp_centroid"}}, r"request=dp_centroid with .*train_on"),
        ({"train_on": "synthetic", "privacy": {"eps": 1.0}}, r"stage2\.response=raw"),
    ],
)
def test_settings_without_meaning_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        changed(SMALL, **change).check()


@pytest.mark.parametrize("value", ["abc", True, float("nan"), float("inf"), -1])
def test_what_is_no_positive_number_is_refused_by_its_setting(value: Any) -> None:
    for change, knob in (
        ({"update_limit": value}, "update_limit"),
        ({"update_norm": value}, "update_norm"),
        ({"secure_sum": True, "stage1": {"weighting": "uniform"}, "sum_threshold": value}, "sum_threshold"),
        ({"stage1": {"lr": value}}, r"stage1\.lr"),
        ({"stage1": {"strength": value, "strategy": "fedprox"}}, r"stage1\.strength"),
        ({"stage1": {"n_hat": value, "weighting": "capped"}}, r"stage1\.n_hat"),
        ({"stage2": {"lr": value}}, r"stage2\.lr"),
        ({"stage2": {"anchor": value}}, r"stage2\.anchor"),
        ({"stage2": {"select_count": value}}, r"stage2\.select_count"),
    ):
        with pytest.raises(ConfigurationError, match=rf"federated\.{knob}='?{value}"):
            changed(SMALL, **change).check()


# -- who sees what ---------------------------------------------------------------------------


def test_the_trust_table_says_in_clear_wherever_nothing_protects_and_nowhere_under_budget_and_masks() -> None:
    assert trust_table(PddAs2()).count("none: in clear") == 4  # update, number of queries, request, answer
    run = changed(PRIVATE, stage1={"weighting": "capped", "n_hat": 9}, secure_sum=True).check()
    table, signed = trust_table(run), trust_table(changed(run, roster=True).check())
    assert "in clear" not in table and "eps=20" in table and "the declaration" in table and "t=2n/3 + 1" in table
    assert "nothing is promised of the s" in table and "nothing is promised of the s" not in trust_table(SMALL)
    assert "taken on trust" in table and "taken on trust" not in signed and "c < 2 t - n" in signed
    centroids = changed(PRIVATE, stage2={"response": "dp_centroid", "request": "none"}, privacy={"collection_eps": 2.0})
    assert "each passage, eps=2" in trust_table(centroids.check())
    sealed = trust_table(PddAs2(seal=True).check())
    assert sealed.count("| who asks whom, and sizes |") == sealed.count("against the silos: none: in clear") == 2
    private = trust_table(changed(PRIVATE, seal=True, roster=True).check())
    assert "sealed from the server" in private and "in clear" not in private and "taken on trust" not in private


def test_the_trust_table_tells_by_which_rule_the_next_model_is_made() -> None:
    rules = get_args(get_type_hints(Stage1)["aggregation"])
    runs = {rule: changed(SMALL, stage1={"aggregation": rule, "weighting": "uniform"}) for rule in rules}
    told = {rule: sights(run)[0].silos for rule, run in runs.items()}
    assert len(set(told.values())) == len(rules)
    assert [rule for rule, text in told.items() if text.startswith("the mean,")] == ["mean"]


@pytest.mark.parametrize(
    ("knob", "value"),
    [("clients", "3"), ("entities", "many"), ("questions", 1.5), ("hubs", "0"), ("duplicates", -1), ("seed", True),
     ("common", "false"), ("shared", "half"), ("skew", "abc"), ("skew", float("nan"))],
)  # fmt: skip
def test_sizes_of_planted_silos_that_are_no_numbers_are_refused_with_the_setting(knob: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"planted\.{knob}={value!r}"):
        Planted(**{knob: value})
    with pytest.raises(ConfigurationError, match=rf"planted\.{knob}={value!r}"):
        FederationPlan(silos="planted", planted={knob: value})


def test_a_sample_of_queries_is_refused_where_replacing_a_pair_moves_the_pairs_of_others() -> None:
    budget = {"eps": 8.0, "neighbours": "replace_one"}
    given: dict[str, Any] = {
        "sample": {"max_train_queries": 2}, "privacy": budget | {"unit": "pair"}, "declare_public": True,
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"federated\.sample\.max_train_queries=2"):
        FederationPlan(**given)
    for sound in ({"unit": "query"}, {"unit": "pair", "neighbours": "zero_out"}):
        FederationPlan(**given | {"privacy": budget | sound})
    FederationPlan(**given | {"sample": {}})


@pytest.mark.parametrize(("run", "knob"), [(SMALL, "share_measures"), (PRIVATE, "share_epsilon")])
def test_what_a_silo_may_choose_to_tell_is_no_row_of_never(run: PddAs2, knob: str) -> None:
    lines = trust_table(run).splitlines()
    never = next(line for line in lines if "never" in line)
    assert any(f"unless the silo sets {knob}" in line for line in lines)
    assert ("train queries" in never) == (run.privacy.eps is None and run.stage1.weighting == "uniform")
