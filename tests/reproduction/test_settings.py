"""Settings that a study cannot honour are refused by name before anything is trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import reproduction
from lit_dpret.audit.canaries import CanarySuite
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import OptimizerSpec
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.tasks.audit import Measurement
from reproduction import SuitePart
from reproduction.compare_negatives import NegativesVariant
from reproduction.paper_000.end_to_end_table import Regime
from reproduction.recipe import Recipe
from reproduction.variant_study import Variant

RECIPES = {"none": Recipe(label="none", privacy=partial(NoPrivacy), optimizer=OptimizerSpec(), steps=1, batch=4)}
POSSIBLE: dict[str, dict[str, Any]] = {
    "CanaryStudy": {"generator": dict, "canaries": CanarySuite(), "measure": Measurement()},
    "CompareModes": {"retriever": dict, "variants": RECIPES},
    "CompareNegatives": {"retriever": dict, "variants": {"in_batch": NegativesVariant()}, "steps": 1, "batch": 4},
    "EndToEnd": {
        "regimes": {"bert": Regime(label="a", retriever=dict, ways=RECIPES)}, "generator": None, "eps": [3.0, None],  # type: ignore[arg-type]
    },
    "FederatedStudy": {"study": "hubness"},
    "Paper000": dict.fromkeys(("pipeline", "similarity", "zero_shot", "overlap", "canaries"), dict)
    | {"shrink": None, "grid": None, "sizes": {"whole": "a", "copy": "b"}, "eps": [3.0, None]},
    "Suite": {"paper": "paper_002", "parts": {"first": SuitePart(settings=[])}, "data": {"images": None}},
    "VariantStudy": {
        "variants": {"none": Variant(label="x", privacy=NoPrivacy, lr=0.1)}, "seeds": [0], "epochs": 1, "batch_size": 4,
        "baseline": "none",
    },
    "ZeroShot": {"sets": ["fiqa"], "root": ".", "encoder": "bm25", "top_k": 10},
}  # fmt: skip
IMPOSSIBLE: dict[str, list[dict[str, Any]]] = {
    "CanaryStudy": [
        {"trainings": 0}, {"eps": [16, 16]}, {"eps": [-1]}, {"eps": []}, {"canaries": CanarySuite(include=0.5)},
    ],
    "CompareModes": [
        {"only": ["dp_sgd"]}, {"only": []}, {"eps": []}, {"eps": [3.0, -1.0]}, {"seeds": 0}, {"round_trip_filter": 0},
    ],
    "CompareNegatives": [{"steps": 0}, {"batch": 0}],
    "EndToEnd": [
        {"only": ["none"]}, {"only": []}, {"eps": [3.0, 3.0]}, {"eps": []}, {"seeds": 0}, {"max_passages": 0},
        {"rates": [0.0]}, {"rates": [0.1], "eps": [None]},
    ],
    "FederatedStudy": [
        {"study": "speed"}, {"study": None}, {"seeds": [0, 0]}, {"split": "train"}, {"systems": ["central"]},
        {"values": [5, 50]}, {"study": "data_ratio", "values": [0.5, 1.5]}, {"study": "communication", "values": [10]},
        {"skew": 4.0}, {"study": "gain", "skew": 0.5},
    ],
    "Paper000": [
        {"only": ["table_3"]}, {"main": "large"}, {"beside": {"large": "T5-XL"}}, {"sizes": {"a/b": "x"}},
        {"eps": [3.0, 3.0]}, {"others_at": [5.0]}, {"examples": 0},
    ],
    "Suite": [
        {"paper": "paper_y"}, {"data": {"images": "no/such"}}, {"only": ["third"]},
        *({"parts": {"first": SuitePart(settings=[], **wrong)}} for wrong in (
            {"needs": ["texts"]}, {"after": ["first"]}, {"taken": "no/such"},
        )),
    ],
    "VariantStudy": [{"only": ["naive"]}, {"seeds": []}, {"seeds": [1, 1]}, {"epochs": 0}],
    "ZeroShot": [
        {"sets": []}, {"sets": ["fiqa", "FiQA"]}, {"root": None}, {"metrics": ["ndcg@100"]}, {"metrics": []},
        {"max_query_length": 8},
    ],
}  # fmt: skip


def test_a_way_of_judging_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"task\.measure\.span='foo'"):
        Measurement(span="foo")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("study", "wrong"), [(study, wrong) for study, refused in IMPOSSIBLE.items() for wrong in refused], ids=str
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(study: str, wrong: dict[str, Any]) -> None:
    made = getattr(reproduction, study)
    made(**POSSIBLE[study])
    with pytest.raises(ConfigurationError) as refused:
        made(**POSSIBLE[study] | wrong)
    assert any(f"task.{name}" in str(refused.value) for name in wrong)
