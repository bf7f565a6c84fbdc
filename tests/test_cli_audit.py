"""Through the command line: a mechanism that lies to its ledger ends with an error, and the honest one with none."""

from __future__ import annotations

from pathlib import Path

import pytest
from memoriser import write_large_log
from test_cli import ROOT, call, refused

from lit_dpret.cards.file import read_card

HONEST = "from lit_dpret.cli import main; main()"
LYING = f"import pytest, memoriser; memoriser.without_noise(pytest.MonkeyPatch()); {HONEST}"
# An encoder tells real words apart, and four hundred pairs are few enough for a linear map to learn them by heart.
WORDS = [
    "river", "castle", "engine", "guitar", "winter", "banker", "violin", "desert", "pepper", "rocket", "tunnel",
    "jacket", "monkey", "garden", "laptop", "bishop", "hammer", "forest", "island", "coffee", "doctor", "candle",
    "dragon", "mirror", "police", "window", "market", "soccer", "camera", "rabbit", "planet", "bridge", "kitchen",
    "thunder", "lawyer", "museum", "ballet", "cactus", "tractor", "harbour",
]  # fmt: skip
SETTINGS = (
    "model=frozen_dual_encoder", "datamodule=pairs", "datamodule.sampling=poisson", "privacy.eps=2",
    "datamodule.expected_batch_size=200", "datamodule.physical_batch_size=256", "privacy.delta=1e-5",
    "privacy.max_grad_norm=1", "trainer.max_steps=200", "model.optimizer.lr=0.03", "callbacks=with_audit",
    "callbacks.audit.canaries=400", "callbacks.audit.max_share=1", "callbacks.audit.seed=5",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("program", [LYING, HONEST], ids=["no noise", "honest"])
def test_a_run_that_claims_eps_2_without_noise_ends_with_error_and_a_whole_card(program: str, tmp_path: Path) -> None:
    folder = f"datamodule.folder={write_large_log(tmp_path / 'log', vocabulary=WORDS)}"
    done = call(*SETTINGS, folder, folder=tmp_path, program=("-c", program), PYTHONPATH=f"{ROOT / 'tests'}:{ROOT}")
    card = read_card(tmp_path / "run" / "model")
    assert card["claim"]["epsilon"] <= 2.0 and len(card["empirical"]["results"]) == 2
    if program == LYING:
        assert "The audit contradicts the claim: with 400 canaries" in refused(done)
        assert "AN AUDIT CONTRADICTS THIS CLAIM" in card["claim"]["statement"]
        assert card["empirical"]["results"][0]["eps_lower"] > 3.0
    else:
        assert done.returncode == 0, done.stderr
        assert "CONTRADICTS" not in card["claim"]["statement"]
