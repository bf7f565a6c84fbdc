"""Settings that a task cannot honour are refused by name before any work."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lit_dpret import tasks
from lit_dpret.errors import ConfigurationError

IMPOSSIBLE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "CheckData": ({}, [
        {"examples": -1}, {"max_texts": 0}, {"split_seed": 1.5}, {"split_by": "query"}, {"fractions": {"test": 1.0}},
    ]),
    "Encode": ({}, [{"side": "document"}, {"batch_size": 0}, {"storage": "int8"}]),
    "Evaluate": ({}, [{"search": "annoy"}, {"whose": "mine"}, {"metrics": []}, {"top_k": 1}]),
    "Export": ({}, [
        {"data": None}, {"data": "b", "checkpoint": "a"}, {"data": "b", "license": "mit"},
        {"data": "b", "datasets": ["a/b"]}, *({"checkpoint": "a", **setting} for setting in (
            # what a hub would not take
            {"base_model": "/srv/models/mine"}, {"license": "All rights!"}, {"language": "English"},
            {"datasets": ["a/b/c"]}, {"push_to_hub": "/srv/models/mine"},
        )),
    ]),
    "FitScored": ({"data": "public"}, [{"data": None}, {"max_passages": 0}]),
    "HardNegatives": ({"silo": "x", "encoder": "y", "whose": "public"}, [
        {"whose": None}, {"questions": 0}, {"negatives": 0},
    ]),
    "Inversion": ({"encoder": "x", "whose": "public"}, [
        {"whose": None}, {"candidates": 501}, {"samples": 501}, {"samples": 1, "whose": "private"}, {"side": "both"},
    ]),
    "Membership": ({"run": "x"}, [
        {"others": "train"}, {"queries": 3}, {"shadows": 5}, {"minutes": 0}, {"model": "y", "shadows": 8},
        {"release_reference": "x"},
    ]),
    "Plan": ({}, [
        {"units": 0}, {"units": 1.5}, {"epochs": 0}, {"epochs": "many"}, {"epochs": math.nan}, {"epochs": math.inf},
        {"measure": "yes"}, {"plot": 3},
    ]),
    "PretrainingOverlap": ({"corpus": "x", "queries": "public"}, [
        {"queries": None}, {"queries": "private"}, {"ngram": 0}, {"max_texts": 0}, {"sampled": 0.0},
    ]),
    "Search": ({"index": "x", "query": "y"}, [{"query": " "}, {"top_k": 0}]),
    "Similarity": ({"synthetic": "x", "reference": "public"}, [
        {"reference": None}, {"reference": "private"}, {"card_entry": True}, {"ngram": 0}, {"max_texts": 0},
        {"seeds": 0}, {"measures": []}, {"measures": ["rouge"]}, {"features": ["passage"]},
        {"reference_file": "x.jsonl", "held_out": "dev"}, {"reference_file": "x.jsonl", "measures": ["bleu"]},
        {"reference_file": "x.jsonl", "reference": "synthetic"},
    ]),
}  # fmt: skip
CASES = [(task, base, wrong) for task, (base, refused) in IMPOSSIBLE.items() for wrong in refused]


@pytest.mark.parametrize(("task", "base", "wrong"), CASES, ids=lambda one: str(one))
def test_a_setting_beyond_reach_is_refused_by_name(task: str, base: dict[str, Any], wrong: dict[str, Any]) -> None:
    getattr(tasks, task)(**({"checkpoint": "a"} if task == "Export" else base))  # which could be
    with pytest.raises(ConfigurationError) as refused:
        getattr(tasks, task)(**base | wrong)
    assert any(f"task.{name}" in str(refused.value) or f"{name}=" in str(refused.value) for name in wrong)
