"""The declared number of units of one person: on the card, and refused where the data say otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stand_ins import Texts, dp, fit

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases


def run(tmp_path: Path, users: int | None, bound: int | None, **data: Any) -> Path:
    """A run on 60 queries, of 60 / users each where users are known."""
    log = tmp_path / "log.jsonl"
    rows = [{"query": f"tide {'x' * i}", "passage": f"p{i % 3}"} for i in range(60)]
    if users is not None:
        rows = [{**row, "user_id": f"user {i % users}"} for i, row in enumerate(rows)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    folder = tmp_path / "run"
    module = Texts(privacy=dp(tmp_path, noise_multiplier=6.0, max_units_per_user=bound))
    settings = {"sampling": "poisson", "expected_batch_size": 6, "physical_batch_size": 8, **data}
    fit(folder, module, PairsDataModule(pairs=log, **settings), steps=3, extra=[PrivacyCard(run_dir=folder)])
    return folder


def test_the_card_of_a_run_states_the_epsilon_of_a_user(tmp_path: Path) -> None:
    folder = run(tmp_path, users=20, bound=3)
    claim = read_card(folder)["claim"]
    releases = charged_releases(PrivacyLedger.read(folder / "privacy_ledger.jsonl").records)
    assert claim["user_level_epsilon"] == group_epsilon(releases, delta=claim["delta"], units=3) > claim["epsilon"]
    assert verify_card(read_card(folder), folder / "privacy_ledger.jsonl") == []


def test_a_bound_that_the_user_ids_contradict_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.max_units_per_user=2"):
        run(tmp_path, users=20, bound=2)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def test_where_no_user_is_known_the_bound_is_taken_as_declared(tmp_path: Path) -> None:
    assert read_card(run(tmp_path, users=None, bound=2))["claim"]["max_units_per_user"] == 2


def test_a_bound_on_units_that_people_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"datamodule\.duplicates=merge"):
        run(tmp_path, users=20, bound=3, duplicates="merge")
