"""Whole runs with noise on a grid: repeated bit by bit after a kill, and honest on the card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.errors import ResumeError
from lit_dpret.privacy.budget import ROUNDING_SHARE
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger
from lit_dpret.privacy.noise import KeyedStream


def regression(folder: Path, **settings: Any) -> Regression:
    L.seed_everything(0, verbose=False)
    return Regression(privacy=dp(folder, **{"noise_multiplier": 2.0, "noise": "discrete"} | settings))


def test_a_killed_run_repeats_its_step_bit_by_bit_and_ends_where_the_whole_one_does(tmp_path: Path) -> None:
    whole = regression(tmp_path, noise_seed=7)
    fit(tmp_path / "whole", whole)
    killed = regression(tmp_path, noise_seed=7)
    accountant = PrivacyAccountant(run_dir=tmp_path / "killed", eps_log_points=1)
    with pytest.raises(Killed):
        fit(tmp_path / "killed", killed, accountant=accountant, extra=[KillAt(3)])
    accountant.ledger.close()
    resumed = regression(tmp_path, noise_seed=7)
    fit(tmp_path / "killed", resumed, resume=True)
    for (name, one), two in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two), name
    kinds = [record["kind"] for record in PrivacyLedger.read(tmp_path / "killed" / LEDGER_NAME).records]
    assert kinds.count("replay") == 1 and kinds.count("intent") == 6


def test_a_run_that_goes_on_with_other_noise_is_refused(tmp_path: Path) -> None:
    fit(tmp_path / "run", regression(tmp_path), steps=2)
    with pytest.raises(ResumeError, match="noise"):
        fit(tmp_path / "run", regression(tmp_path, noise="gaussian"), resume=True, steps=2)


def test_the_card_of_a_run_says_which_noise_it_was_and_holds_against_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **key: Any) -> Tensor:
        raise RuntimeError("floating-point noise was drawn")

    monkeypatch.setattr(KeyedStream, "normal", never)
    folder = tmp_path / "run"
    fit(folder, regression(tmp_path, clip_fraction_budget=0.1, max_grad_norm=0.5), Numbers(sampling="poisson"), steps=2,
        extra=[PrivacyCard(run_dir=folder)])  # fmt: skip
    card = read_card(folder)
    assert verify_card(card, folder / LEDGER_NAME) == []
    assert card["randomness"]["rng"] == "ChaCha20" and card["randomness"]["secure"]
    assert not any("floating-point form" in gap or "generator" in gap for gap in card["not_covered"])
    assert card["mechanism"]["noise"] == "discrete"
    assert card["mechanism"]["sensitivity"] == pytest.approx(0.5 / 0.9**0.5 * (1 + ROUNDING_SHARE), rel=1e-12)


def test_the_ledger_states_the_planned_multiplier_whichever_noise_it_was(tmp_path: Path) -> None:
    found = {}
    for noise in ("gaussian", "discrete"):
        module = regression(tmp_path, noise=noise, noise_multiplier=200.0, eps=50.0)
        fit(tmp_path / noise, module, steps=3)
        records = PrivacyLedger.read(tmp_path / noise / LEDGER_NAME).records
        found[noise] = [r["noise_std"] / r["sensitivity"] for r in records if r["kind"] == "release"]
    assert found["gaussian"] == pytest.approx(found["discrete"], rel=1e-12)
