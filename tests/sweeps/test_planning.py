"""What a sweep plans is what its trials reserve and what their cards say, or it is refused before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planned_sweeps import begun, planned

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.card import read_card
from lit_dpret.privacy.card_check import verify_card
from lit_dpret.privacy.dataset_ledger import DatasetLedger


def begin_ledger(folder: Path, delta: float, total_eps: float = 100.0) -> None:
    DatasetLedger(folder / "data.jsonl", total_eps=total_eps, budget=PrivacyBudget(eps=1.0, delta=delta)).begin()


# -- the delta of the limit ------------------------------------------------------------------------


def test_a_limit_at_a_larger_delta_than_the_trials_covers_no_choice_and_the_sweep_is_refused(tmp_path: Path) -> None:
    begin_ledger(tmp_path, 1e-3)
    with pytest.raises(ConfigurationError, match=r"task\.metric_data=private.*privacy\.delta"):
        planned(tmp_path, metric_data="private", settings={"delta": 1e-6})
    assert not (tmp_path / "sweep" / "sweep.json").exists()


def test_each_number_that_a_plan_tells_has_the_delta_that_it_holds_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_ledger(tmp_path, 1e-3)
    facts = planned(tmp_path, metric_data="public", settings={"delta": 1e-6}).describe()
    told = capsys.readouterr().out
    assert facts["planned"]["delta"] == 1e-6 and facts["ledger_delta"] == 1e-3
    assert f"together epsilon {facts['planned']['epsilon']:.4g} at delta 1e-06" in told and "at delta 0.001" in told
    private: dict[str, Any] = {"settings": {"delta": 1e-6}}
    card = read_card(begun(tmp_path, **private))
    assert "epsilon" not in card["tuning"] and card["claim"]["delta"] == 1e-6


def test_the_card_of_a_trial_states_the_limit_where_it_holds_at_the_delta_of_the_claim(tmp_path: Path) -> None:
    begin_ledger(tmp_path, 1e-6)
    planned(tmp_path, metric_data="private", settings={"delta": 1e-5})
    place = begun(tmp_path, settings={"delta": 1e-5})
    card = read_card(place)
    assert card["tuning"]["accounted"] is True and card["tuning"]["epsilon"] == 100.0
    assert verify_card(card, place / "privacy_ledger.jsonl") == []
    card["tuning"]["epsilon"] = 3.0
    assert verify_card(card, place / "privacy_ledger.jsonl")
