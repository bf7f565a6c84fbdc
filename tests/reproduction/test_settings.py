"""Settings that a study cannot honour are refused by name before anything is trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tasks import no_parts

import reproduction
from lit_dpret.audit.canaries import CanarySuite
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import OptimizerSpec
from lit_dpret.privacy.modes import DPSGD, BatchClip, LogitDP, NoPrivacy, SyntheticData
from lit_dpret.tasks.audit import Measurement
from reproduction import SuitePart
from reproduction.compare_negatives import NegativesVariant
from reproduction.paper_000.end_to_end_table import Regime
from reproduction.paper_000.grid import Grid
from reproduction.recipe import GeneratorRecipe, Recipe
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
    "SecondTask": {"study": "run"},
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
    "SecondTask": [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}],
    "Suite": [
        {"paper": "paper_y"}, {"data": {"images": "no/such"}}, {"only": ["third"]},
        *({"parts": {"first": SuitePart(settings=[], **wrong)}} for wrong in (
            {"needs": ["texts"]}, {"after": ["first"]}, {"taken": "no/such"},
        )),
    ],
    "VariantStudy": [{"only": ["naive"]}, {"seeds": []}, {"seeds": [1, 1]}, {"epochs": 0}, {"adam_eps": 0.0}],
    "ZeroShot": [
        {"sets": []}, {"sets": ["fiqa", "FiQA"]}, {"root": None}, {"metrics": ["ndcg@100"]}, {"metrics": []},
        {"max_query_length": 8},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "wrong", "knob"),
    [
        (Measurement, {"span": "foo"}, r"task\.measure\.span='foo'"),
        (Grid, {"lr": []}, r"task\.grid\.lr=\[\]"),
        *((partial(Variant, label="x", privacy=NoPrivacy), {"lr": 0.1} | change, r"task\.variants")
          for change in ({"lr": 0.0}, {"batch_size": 0}, {"seeds": 0}, {"part": "other"})),
    ],
)  # fmt: skip
def test_a_part_of_the_settings_of_a_study_is_refused_by_name(make: Any, wrong: dict[str, Any], knob: str) -> None:
    with pytest.raises(ConfigurationError, match=knob):
        make(**wrong)


@pytest.mark.parametrize(
    ("study", "wrong"), [(study, wrong) for study, refused in IMPOSSIBLE.items() for wrong in refused], ids=str
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(study: str, wrong: dict[str, Any]) -> None:
    made = getattr(reproduction, study)
    made(**POSSIBLE[study])
    with pytest.raises(ConfigurationError) as refused:
        made(**POSSIBLE[study] | wrong)
    assert any(f"task.{name}" in str(refused.value) for name in wrong)


# -- cards that would say that nothing was chosen

SMALL: dict[str, Any] = {"optimizer": OptimizerSpec(), "steps": 1, "batch": 4}
MADE = Recipe(label="made", privacy=partial(SyntheticData), queries="a", **SMALL)
GENERATOR = GeneratorRecipe(label="a", model=partial(dict), privacy=partial(DPSGD), steps=1, batch=4)
PRIVATE = {mode.name: Recipe(label=mode.name, privacy=partial(mode), **SMALL) for mode in (BatchClip, LogitDP)}


def of_paper(declared: str, **more: Any) -> dict[str, Any]:
    grid = Grid(max_grad_norm=[0.1, 1.0])
    return {"pipeline": lambda: SimpleNamespace(tuning_data=declared), "grid": grid, "others_at": [], **more}


def regimes(**changes: Any) -> dict[str, Any]:
    return {"a": Regime(label="a", retriever=dict, ways={"made": replace(MADE, **changes)})}  # type: ignore[arg-type]


# By what they train: studies that choose among several, each with what it is like where there is no choice.
CHOICES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "modes": ("CompareModes", {"variants": PRIVATE, "keep_models": True}, {"keep_models": False}),
    "generators": (
        "Ablate", {"retriever": dict, "variants": {"a": MADE, "b": replace(MADE, queries="b")},
                   "generators": {"a": GENERATOR, "b": GENERATOR}}, {"only": ["a"]},
    ),
    "budgets": ("EndToEnd", {"regimes": regimes(), "generator": GENERATOR, "eps": [8.0, 16.0]}, {"eps": [8.0]}),
    "sizes": ("Paper000", {"only": ["retrieval"], "eps": [3.0, 8.0]}, {"eps": [3.0]}),
    "points": ("Paper000", {"only": ["grid"], "eps": [3.0], "originals_are_public": True}, {"only": ["retrieval"]}),
    "variants": (
        "VariantStudy", {"variants": {n: Variant(label=n, privacy=BatchClip, lr=0.1) for n in "ab"}}, {"only": ["a"]},
    ),
    "canaries": ("CanaryStudy", {"eps": [3.0, 8.0], "keep_models": True}, {"eps": [3.0]}),
    "tried variants": ("CompareModes", {"variants": {"a": replace(RECIPES["none"], trials=7)}}, {"variants": RECIPES}),
    "tried generators": (
        "Ablate", {"retriever": dict, "variants": {"a": MADE}, "generators": {"a": replace(GENERATOR, trials=3)}},
        {"generators": {"a": GENERATOR}},
    ),
    "tried regimes": (
        "EndToEnd", {"regimes": regimes(trials=7), "generator": GENERATOR, "eps": [8.0]}, {"regimes": regimes()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHOICES)
@pytest.mark.parametrize("declared", ["none", "public"])
def test_private_models_chosen_among_several_do_not_say_that_nothing_or_public_data_chose(
    what: str, declared: str, tmp_path: Path
) -> None:
    name, settings, alone = CHOICES[what]
    known = POSSIBLE.get(name, {}) | (of_paper(declared) if name == "Paper000" else {"tuning_data": declared})
    parts = no_parts(tmp_path / "run")
    getattr(reproduction, name)(**known | settings | alone).refuse_untold_choice(parts)
    if what.startswith("tried") and declared == "public":  # whoever tried settings on public data says so
        return
    with pytest.raises(
        ConfigurationError, match=r"trials=" if what.startswith("tried") else rf"tuning_data={declared}"
    ):
        getattr(reproduction, name)(**known | settings).begin(parts)
    assert not (tmp_path / "run").exists(), "before anything is trained"
