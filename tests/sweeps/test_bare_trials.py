"""A sweep with trials that have no privacy: no epsilon covers a choice that looked at them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lit_dpret.cards.tuning import tuning_facts, with_earlier_tuning
from lit_dpret.privacy.accounting.releases import FullBatch, GaussianRelease
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.ledger.dataset_ledger import sweep_limit
from lit_dpret.sweeps import SweepFile, SweepFolder, SweepTerms, write_result
from lit_dpret.sweeps.report import write_report

PLANNED = {"epsilon": 3.5, "delta": 1e-5, "unit": "query", "neighbours": "zero_out", "accountant": "pld"}


def bare_sweep(folder: Path, *, bare: int | None, scored: str = "private") -> SweepFolder:
    content = {"parameters": {"point": {"values": ["eps3", "eps_inf"]}}, "metric": {"name": "loss"}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    file = SweepFile.read(folder / "sweep.yaml")
    terms = SweepTerms(
        budget=PrivacyBudget(eps=3.0, delta=1e-5), dataset_ledger=folder / "data.jsonl", total_eps=4.0,
        metric_data=scored, planned=PLANNED, ledger_delta=1e-5, without_privacy=bare,
    )  # fmt: skip
    places = [[GaussianRelease(noise_multiplier=20.0, law=FullBatch(), count=4)]]
    made = SweepFolder.plan(folder / "s", file, file.trials(), places, terms)
    for number, trial in enumerate(file.trials()):
        made.trial_folder(trial.id).mkdir(parents=True)
        write_result(made.trial_folder(trial.id), trial.overrides, {"loss": 1.0 + number})
    return made


@pytest.mark.parametrize("bare", [1, None], ids=["one has none", "nobody looked"])
def test_a_choice_among_trials_of_which_one_has_no_privacy_is_not_accounted(bare: int | None, tmp_path: Path) -> None:
    told = bare_sweep(tmp_path, bare=bare).describe()
    found = tuning_facts(None, None, told, 1e-5)
    assert found["accounted"] is False and "epsilon" not in found and "NOT ACCOUNTED" in found["text"]
    assert sweep_limit(told, 1e-5) is None
    assert ("1 of them without privacy" in found["text"]) == (bare == 1)
    assert "no epsilon covers the choice" in write_report(SweepFolder.read(tmp_path / "s")).text


def test_the_best_of_private_trainings_has_the_epsilon_of_all_whatever_they_were_scored_on(tmp_path: Path) -> None:
    # One Gaussian step each, scored by a public number that rises with one unit's coordinate: the best of ten is ten
    # looks at that unit, and claims of one training do not hold for it.
    quiet = tuning_facts(
        None, None, {**bare_sweep(tmp_path, bare=0, scored="public").describe(), "metric_data": "none"}, 1e-5
    )
    assert (quiet["data"], quiet["accounted"], quiet["epsilon"]) == ("private", True, 4.0), "also where none is named"
    told = SweepFolder.read(tmp_path / "s").describe()
    assert sweep_limit(told, 1e-5) == 4.0
    for declared in (None, {"data": "public"}):
        found = tuning_facts(declared, None, told, 1e-5)
        assert (found["data"], found["accounted"], found["epsilon"]) == ("private", True, 4.0)
        assert "scored are not covered" not in found["text"] and "no privacy" not in found["text"]
    later = with_earlier_tuning(tuning_facts({"data": "none"}), found, "the model", composed=True)
    assert later["accounted"] is False and later["data"] == "private", "what starts from it was chosen with it"
    text = write_report(SweepFolder.read(tmp_path / "s")).text
    assert "epsilon of all trials together covers" in text and "cost" not in text.splitlines()[-1]


def test_the_epsilon_of_synthetic_queries_is_in_no_sum_of_the_trials_that_they_scored(tmp_path: Path) -> None:
    told = bare_sweep(tmp_path, bare=0, scored="synthetic").describe()
    found = tuning_facts(None, None, told, 1e-5)
    assert found["accounted"] is False and "epsilon" not in found and "NOT ACCOUNTED" in found["text"]
    assert "their own epsilon" in write_report(SweepFolder.read(tmp_path / "s")).text
    alone = tuning_facts({"data": "synthetic"}, None, None, 1e-5)
    assert alone["accounted"] is False and "NOT ACCOUNTED" in alone["text"]


def test_the_limit_of_a_ledger_is_stated_at_its_delta_or_more_and_on_no_card_without_a_claim(tmp_path: Path) -> None:
    told = bare_sweep(tmp_path, bare=0).describe()
    for delta in (1e-9, None):
        found = tuning_facts(None, None, told, delta)
        assert found["accounted"] is False and "epsilon" not in found, delta
        assert sweep_limit(told, delta) is None
    assert tuning_facts(None, None, told, 1e-4)["epsilon"] == 4.0, "what holds at a delta holds at a larger one"
    assert "3.5" not in tuning_facts(None, None, told, None)["text"], "a run that claims nothing is within no total"


def test_a_card_names_as_varied_what_varies_and_no_setting_that_all_trials_share(tmp_path: Path) -> None:
    content = {"parameters": {"seed": {"value": 7}, "point": {"values": ["eps3", "eps_inf"]}, "task": {"value": "fit"}}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    file = SweepFile.read(tmp_path / "sweep.yaml")
    made = SweepFolder.plan(tmp_path / "s", file, file.trials(), [], SweepTerms(budget=None, metric_data="public"))
    assert made.describe()["varied"] == ["point"]
    assert "(varied: point)" in tuning_facts(None, None, made.describe(), None)["text"]
    for trial in file.trials():
        made.trial_folder(trial.id).mkdir(parents=True)
        write_result(made.trial_folder(trial.id), trial.overrides, {"loss": 1.0})
    found = write_report(made)
    assert {row["settings"]["seed"] for row in found.rows} == {"7"}, "the file of results keeps all"
    assert "seed" not in found.text and "point" in found.text
