"""What the card of a run with a coupled loss says, and what it must not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pair_stand_ins import Pairs, data_module
from stand_ins import fit

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.privacy.modes import BatchClip, LogitDP, PerExampleDuplicated

NOISE: dict[str, Any] = {"eps": 3.0, "delta": 1e-3, "noise_multiplier": 20.0, "n_max": 6}
SAMPLING: dict[str, Any] = {
    "sampling": "truncated_poisson", "cap": 6, "expected_batch_size": 4, "physical_batch_size": 6,
}  # fmt: skip
MODES: dict[str, Any] = {
    "logit_dp": lambda **settings: LogitDP(max_logit_grad_norm=0.1, **NOISE, **settings),
    "batch_clip": lambda **settings: BatchClip(max_grad_norm=0.1, **NOISE, **settings),
    "per_example_duplicated": lambda **settings: PerExampleDuplicated(max_grad_norm=0.1, **NOISE, **settings),
}


def card_of(folder: Path, module: Pairs) -> dict[str, Any]:
    fit(folder / "run", module, data_module(folder / "data", **SAMPLING), steps=2, extra=[PrivacyCard()])
    return dict(read_card(folder / "run" / "privacy_card.json"))


@pytest.mark.parametrize("name", MODES)
def test_the_card_states_the_mode_the_bound_and_a_claim_that_its_ledger_confirms(name: str, tmp_path: Path) -> None:
    card = card_of(tmp_path, Pairs(privacy=MODES[name](secret_file=tmp_path / "secret"), temperature=1.0))
    worth = {"logit_dp": 0.1 * 7.909, "batch_clip": 0.2, "per_example_duplicated": 1.1}[name]
    assert card["mechanism"]["mode"] == name
    assert card["mechanism"]["sensitivity"] == pytest.approx(worth, rel=1e-3)
    assert card["mechanism"]["noise_std"] == pytest.approx(20 * worth, rel=1e-3)
    assert card["mechanism"]["coupling"]["n_max"] == 6
    assert 0 < card["claim"]["epsilon"] < 3
    assert verify_card(card, tmp_path / "run" / "privacy_ledger.jsonl") == []
    page = (tmp_path / "run" / "privacy_card.md").read_text()
    assert "one query moves the sum by at most" in page


@pytest.mark.parametrize(
    ("name", "leak"),
    [("logit_dp", "noise_seed"), ("batch_clip", "log_private_loss"), ("per_example_duplicated", "log_private_loss")],
)
def test_a_declared_leak_leaves_no_epsilon_on_the_card(name: str, leak: str, tmp_path: Path) -> None:
    if leak == "noise_seed":
        module = Pairs(privacy=MODES[name](noise_seed=3))
    else:
        module = Pairs(privacy=MODES[name](secret_file=tmp_path / "secret"))
        module.log_private_loss = True
    card = card_of(tmp_path, module)
    assert card["claim"]["guarantee"] == "not_proved"
    assert card["claim"]["epsilon"] is None
