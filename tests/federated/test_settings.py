"""Settings without meaning are refused by name, and under a budget everything that no ledger would count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_silos import PRIVATE, SMALL

from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.settings import PddAs2


def changed(run: PddAs2, **parts: Any) -> PddAs2:
    """The run with some settings of its parts replaced."""
    made = {name: replace(getattr(run, name), **value) if isinstance(value, dict) else value
            for name, value in parts.items()}  # fmt: skip
    return replace(run, **made)


MASKED: dict[str, Any] = {"secure_sum": True, "stage1": {"weighting": "uniform"}}


@pytest.mark.parametrize(("change", "knob"), [
    ({"stage1": {"in_batch": True}}, "stage1.in_batch=true"),
    ({"stage2": {"in_batch": True}}, "stage2.in_batch=true"),
    ({"stage1": {"other_positives": 1}}, "stage1.other_positives"),
    ({"stage2": {"request": "exact"}}, "stage2.request=exact"),
    ({"stage2": {"response": "raw"}}, "stage2.response=raw"),
    ({"stage1": {"weighting": "examples"}}, "stage1.weighting=examples"),
    ({"stage1": {"weighting": "capped", "n_hat": 9}}, "stage1.weighting=capped"),
])  # fmt: skip
def test_a_budget_refuses_what_no_ledger_counts(change: dict[str, Any], knob: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"federated\.privacy\.eps=20: federated\.{knob}"):
        changed(PRIVATE, **change).check()
    changed(changed(PRIVATE, **change), privacy={"eps": None}).check()  # nothing is promised, nothing refused


def test_the_papers_settings_pass_and_a_budget_takes_capped_weights_under_masks_and_no_request_at_all() -> None:
    assert PddAs2().check() == PddAs2() and SMALL.check() is SMALL and PRIVATE.check() is PRIVATE
    changed(PRIVATE, stage1={"weighting": "capped", "n_hat": 9}, secure_sum=True).check()
    changed(PRIVATE, stage2={"request": "none"}).check()
    changed(PRIVATE, stage2={"negatives": "dynamic", "request": "exact", "response": "raw"}).check()


@pytest.mark.parametrize(("change", "knob"), [
    ({"stage1": {"rounds": 0, "warmup_rounds": 0}}, r"stage1\.rounds"),
    ({"stage1": {"rounds": -1}}, r"stage1\.rounds=-1"),
    ({"stage1": {"batch_size": 0}}, r"stage1\.batch_size=0"),
    ({"stage1": {"strategy": "fedprox"}}, r"stage1\.strength=0"),
    ({"stage1": {"strength": 0.1}}, r"stage1\.strength=0\.1"),
    ({"stage1": {"strategy": "fedsgd"}}, r"stage1\.strategy"),
    ({"stage1": {"negatives": "hard"}}, r"stage1\.negatives"),
    ({"stage1": {"optimizer_state": "lose"}}, r"stage1\.optimizer_state"),
    ({"stage1": {"weighting": "capped"}}, r"stage1\.n_hat=None"),
    ({"stage1": {"in_batch": "false"}}, r"stage1\.in_batch='false'"),
    ({"stage1": {"aggregation": "median"}}, r"stage1\.weighting=examples"),
    ({"stage1": {"aggregation": "mode"}}, r"stage1\.aggregation"),
    ({"stage1": {"malicious": 0}}, r"stage1\.malicious=0"),
    ({"stage2": {"n": 9, "top_k": 5}}, r"stage2\.n=9 .*top_k=5"),
    ({"stage2": {"request": "hashed"}}, r"stage2\.request"),
    ({"stage2": {"send_as": "int8"}}, r"stage2\.send_as='int8'"),
    ({"stage2": {"anchor": -1.0}}, r"stage2\.anchor=-1"),
    ({"stage2": {"in_batch": None}}, r"stage2\.in_batch=None"),
    ({"stage2": {"response": "dp_centroid"}}, r"privacy\.collection_eps"),
    ({"privacy": {"eps": 0.0}}, r"privacy\.eps=0\.0"),
    ({"privacy": {"eps": True}}, r"privacy\.eps=True"),
    ({"privacy": {"eps": "8"}}, r"privacy\.eps='8'"),
    ({"privacy": {"eps": float("nan")}}, r"privacy\.eps=nan"),
    ({"privacy": {"eps": 1.0, "delta": "1e-5"}}, r"privacy\.delta='1e-5'"),
    ({"privacy": {"collection_radius": float("inf")}}, r"privacy\.collection_radius=inf"),
    ({"privacy": {"unit": "user"}}, r"privacy\.unit"),
    ({"privacy": {"noise": "laplace"}}, r"privacy\.noise"),
    ({"privacy": {"eps": 1.0, "neighbours": "add_or_remove"}}, r"privacy\.neighbours=add_or_remove"),
    ({"privacy": {"request_share": 1.0}}, r"privacy\.request_share=1\.0"),
    ({"secure_sum": "false"}, "secure_sum='false'"),
    ({"secure_sum": True}, r"stage1\.weighting=examples"),
    ({**MASKED, "sum_threshold": 2}, "sum_threshold=2"),
    ({**MASKED, "stage1": {"aggregation": "krum", "weighting": "uniform"}}, r"stage1\.aggregation=krum"),
    ({"sum_threshold": 3}, "sum_threshold=3"),
    ({"roster": True}, "roster=true"),
    ({"update_limit": 0.0}, "update_limit=0"),
    ({"update_norm": 0.0}, r"update_norm=0\.0"),
    ({"train_on": "guesses"}, "train_on='?guesses"),
    ({"train_on": "synthetic", "stage2": {"request": "dp_centroid"}}, r"stage2\.request=dp_centroid"),
    ({"train_on": "synthetic", "privacy": {"eps": 1.0}}, r"stage2\.response=raw"),
])  # fmt: skip
def test_settings_without_meaning_are_refused_by_name(change: dict[str, Any], knob: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"federated\.{knob}"):
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
