"""Fits of a dual encoder from the command line: once under every privacy mode, and one that audits itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from configured import composed
from memoriser import write_large_log
from test_cli import ROOT, call, refused
from tiny_models import WORDS, tiny_bert, tiny_tokenizer
from tiny_tasks import write_log, write_synthetic

from lit_dpret.cards.file import read_card
from lit_dpret.cli import run
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.losses import SigmoidPairLoss, SoftmaxPairLoss
from lit_dpret.privacy.modes.per_example_duplicated import duplicated_sensitivity

COUPLED = ["privacy.sub_batches=2", "privacy.n_max=19", "privacy.delta=0.001"]
BOUND, N_MAX = 0.1, 19  # of configs/privacy, and above
MODES: dict[str, tuple[list[str], float]] = {
    "batch_clip": ([*COUPLED], 2 * BOUND),
    "per_example_duplicated": ([*COUPLED], BOUND * duplicated_sensitivity(N_MAX, "add_or_remove")),
    "logit_dp": ([*COUPLED], BOUND * SoftmaxPairLoss(temperature=1.0).sensitivity(N_MAX, relation="add_or_remove")),
    "logit_dp sigmoid": (
        [*COUPLED, "loss=sigmoid"],
        BOUND * SigmoidPairLoss(temperature=1.0, n0=4.0).sensitivity(N_MAX, relation="add_or_remove"),
    ),
    "public_passages": (["privacy.pool_size=8", "privacy.delta=0.001"], BOUND),
    "public_passages ghost_bf16": (["privacy.pool_size=8", "privacy.delta=0.001", "privacy.engine=ghost_bf16"], BOUND),
}


def settings(folder: Path, *overrides: str) -> list[str]:
    """A tiny BERT and a tiny log; two steps of eight queries."""
    for part in (tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), tiny_tokenizer()):
        part.save_pretrained(folder / "bert")
    write_log(folder / "log", WORDS)
    return [
        "model=dual_encoder", f"model.encoder={folder / 'bert'}", "model.max_query_length=6",
        "model.max_passage_length=8", "model.temperature=1", "datamodule=pairs", f"datamodule.folder={folder / 'log'}",
        "datamodule.expected_batch_size=8", "datamodule.physical_batch_size=16", "trainer.max_steps=2", *overrides,
    ]  # fmt: skip


def private(folder: Path, case: str) -> list[str]:
    return settings(folder, f"privacy={case.split()[0]}", f"privacy.secret_file={folder / 'secret'}", *MODES[case][0])


def check(folder: Path, case: str) -> None:
    card = json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))
    mechanism = card["mechanism"]
    assert mechanism["mode"] == case.split()[0] and mechanism["steps_done"] == 2
    assert mechanism["sensitivity"] == pytest.approx(MODES[case][1])
    assert card["claim"]["guarantee"] == "dp" and 0 < card["claim"]["epsilon"] <= 3.0
    assert mechanism["noise_std"] == pytest.approx(mechanism["noise_multiplier"] * mechanism["sensitivity"])
    assert (folder / "model" / "privacy_card.json").exists()
    low = case.partition(" ")[2].startswith("ghost")  # what the device is assumed to do stands on the card
    assert any("2^22" in each["text"] for each in card["assumptions"]) == low


#: The others are one setting apart from these.
SOON = ("batch_clip", "logit_dp", "public_passages ghost_bf16")


@pytest.mark.costly
@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in SOON else pytest.mark.slow) for case in MODES])
def test_a_dual_encoder_trains_and_its_card_states_mode_sensitivity_and_epsilon(case: str, tmp_path: Path) -> None:
    run(composed(f"run_dir={tmp_path / 'run'}", *private(tmp_path, case)))
    check(tmp_path / "run", case)


def test_a_dual_encoder_trained_without_privacy_claims_none(tmp_path: Path) -> None:
    run(composed(f"run_dir={tmp_path / 'run'}", *settings(tmp_path, "privacy=none")))
    card = json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["claim"]["guarantee"] == "none" and card["claim"]["epsilon"] is None


def test_a_dual_encoder_trained_on_synthetic_queries_inherits_their_claim(tmp_path: Path) -> None:
    known = [item for item in settings(tmp_path) if not item.startswith("datamodule")]
    folder = write_synthetic(tmp_path / "made", PairsDataModule(folder=tmp_path / "log"))
    data = ["datamodule=synthetic", f"datamodule.folder={folder}", "datamodule.expected_batch_size=8",
            f"datamodule.corpus={tmp_path / 'log' / 'corpus.jsonl'}"]  # fmt: skip
    run(composed(f"run_dir={tmp_path / 'run'}", *known, "privacy=synthetic", *data))
    card, parent = (
        json.loads((path / "privacy_card.json").read_text(encoding="utf-8")) for path in (tmp_path / "run", folder)
    )
    assert card["claim"]["epsilon"] == parent["claim"]["epsilon"] and math.isfinite(card["claim"]["epsilon"])
    assert card["mechanism"]["kind"] == "post_processing"


HONEST = "from lit_dpret.cli import main; main()"
LYING = f"import pytest, memoriser; memoriser.without_noise(pytest.MonkeyPatch()); {HONEST}"
# An encoder tells real words apart, and four hundred pairs are few enough for a linear map to learn them by heart.
REAL_WORDS = [
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
    folder = f"datamodule.folder={write_large_log(tmp_path / 'log', vocabulary=REAL_WORDS)}"
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
