"""A whole sweep from the command line, W&B offline: cards, one total, and nothing private in W&B's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_dpret.cards.card import read_card

ROOT = Path(__file__).resolve().parent.parent.parent
SECRETS = ("PLANTEDQUERY", "PLANTEDPASSAGE", "PLANTEDFOLDER", "PLANTEDSECRET")


def call(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )


def planted(folder: Path) -> Path:
    """A log whose queries, passages and place can be told wherever they turn up."""
    place = folder / "PLANTEDFOLDER"
    place.mkdir()
    rows = [
        {"query": f"PLANTEDQUERY what is number {i}", "passage": f"PLANTEDPASSAGE number {i} comes after {i - 1}"}
        for i in range(40)
    ]
    (place / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return place


def written(folder: Path, place: Path) -> Path:
    """Two points, one of them without privacy, on that log."""
    content = {
        "program": "train.py",
        "parameters": {"point": {"values": ["eps8", "eps_inf"]}},
        "command": [
            "${env}", "${interpreter}", "${program}", "task=fit", "trainer.max_steps=2", "datamodule=pairs",
            f"datamodule.pairs={place / 'log.jsonl'}", "datamodule.expected_batch_size=8",
            "datamodule.physical_batch_size=8", "model.max_passage_length=16", "model.max_query_length=8",
            "logger=wandb", "trial_of=${envvar:LIT_DPRET_SWEEP}",
            "hydra.run.dir=${envvar:LIT_DPRET_SWEEP}/trials/${oc.env:WANDB_RUN_ID}", "${args_no_hyphens}",
        ],
    }  # fmt: skip
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return folder / "sweep.yaml"


@pytest.mark.slow
def test_a_sweep_is_refused_without_a_limit_and_tells_wandb_nothing_private(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    file, ledger = written(tmp_path, planted(tmp_path)), tmp_path / "data.jsonl"
    settings = ["sweep", str(file), f"hydra.run.dir={tmp_path / 's'}", f"task.dataset_ledger={ledger}"]
    refused = call(*settings, folder=tmp_path)
    assert refused.returncode == 2 and "all trials together cost epsilon" in refused.stderr, refused.stderr
    refused = call(*settings, "task.total_eps=1", folder=tmp_path)
    assert refused.returncode == 2 and "does not cover this sweep" in refused.stderr and not ledger.exists()

    done = call(*settings, "task.total_eps=9", "task.metric_data=public", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    cards = {
        path.parent.name: read_card(path.parent) for path in (tmp_path / "s" / "trials").glob("*/privacy_card.json")
    }
    claims = sorted(card["claim"]["guarantee"] for card in cards.values())
    assert claims == ["dp", "none"]
    private = next(card for card in cards.values() if card["claim"]["guarantee"] == "dp")
    assert private["tuning"]["sweep"]["trials"] == 2 and private["tuning"]["n_trials"] == 2
    assert "one of the 2 trials of sweep" in private["tuning"]["text"]

    logs = [path for path in (tmp_path / "s").rglob("wandb/**/*") if path.is_file() and not path.is_symlink()]
    assert sum(path.suffix == ".wandb" for path in logs) == 2
    assert any(b"model.optimizer.lr" in path.read_bytes() for path in logs), "what may be told is there"
    assert any(b"privacy/eps_spent" in path.read_bytes() for path in logs)
    assert any(path.suffix == ".html" for path in logs), "and so is the card"
    for path in logs:
        for secret in SECRETS:
            assert secret.encode() not in path.read_bytes(), f"{secret} in {path.name}"
