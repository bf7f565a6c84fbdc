"""A model that memorises rows, and a log with room for canaries. Imported by path; not a test."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_generator import WORDS
from tiny_tasks import trainer
from torch import Tensor, nn

from lit_dpret.callbacks import OneRunAudit, PrivacyAccountant, PrivacyCard
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.ledger.noise_check import NoiseCheck
from lit_dpret.privacy.modes import DPSGD, PrivacyMode
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.sampling import PrivateBatchSampler

QUERIES = 400
CANARIES = 300
PLACES = 2**18


class Memoriser(PrivateModule):
    """A module with one weight for each possible text: only the weights of trained texts move."""

    def __init__(self, privacy: PrivacyMode, lr: float = 1.0) -> None:
        super().__init__(privacy=privacy, optimizer=OptimizerSpec(name="sgd", lr=lr))
        self.weights = nn.Embedding(PLACES, 1)
        nn.init.zeros_(self.weights.weight)

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        return {"place": torch.tensor([zlib.crc32(f"{row.query}|{row.passage}".encode()) % PLACES for row in rows])}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return nn.functional.softplus(-self.weights(rows["place"]).squeeze(-1))

    def save_model(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), folder / "weights.pt")
        return folder


def write_large_log(
    folder: Path, *, queries: int = QUERIES, passages: int = 500, vocabulary: Sequence[str] = WORDS
) -> Path:
    """Write a BEIR folder of random words, with all queries for training."""
    draws = random.Random(7)

    def some(count: int) -> str:
        return " ".join(draws.choice(vocabulary) for _ in range(count))

    (folder / "qrels").mkdir(parents=True)
    for name, texts in (
        ("corpus", {f"p{i}": some(8) for i in range(passages)}),
        ("queries", {f"q{i}": some(3) for i in range(queries)}),
    ):
        lines = [json.dumps({"_id": key, "title": "", "text": text}) for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    judged = [f"q{i}\tp{i % passages}\t1" for i in range(queries)]
    text = "query-id\tcorpus-id\tscore\n" + "\n".join(judged) + "\n"
    (folder / "qrels" / "train.tsv").write_text(text, encoding="utf-8")
    return folder


def large_log(folder: Path, **settings: Any) -> PairsDataModule:
    defaults = {"sampling": "poisson", "expected_batch_size": 100, "physical_batch_size": 200}
    place = folder / "log"
    return PairsDataModule(folder=place if place.exists() else write_large_log(place), **defaults | settings)


def audited(
    folder: Path,
    *,
    module: Any = None,
    data: Any = None,
    steps: int = 20,
    resume: bool = False,
    callbacks: tuple[Any, ...] = (),
    audit: OneRunAudit | None = None,
    **privacy: Any,
) -> OneRunAudit:
    """Train with an audit in ``folder / "run"``; return the audit."""
    settings = {"eps": 2.0, "delta": 1e-5, "max_grad_norm": 1.0, "secret_file": folder / "secret"}
    run = folder / "run"
    audit = audit or OneRunAudit(canaries=CANARIES, max_share=0.9, seed=11)
    audit.run_dir, audit.resume = run, resume
    checkpoints = ModelCheckpoint(dirpath=run / "checkpoints", every_n_train_steps=5, save_last=True)
    last = run / "checkpoints" / "last.ckpt"
    found = trainer(
        max_steps=steps, logger=False, default_root_dir=str(run),
        callbacks=[PrivacyAccountant(run_dir=run, resume=resume), PrivacyCard(run_dir=run), checkpoints, audit,
                   *callbacks],
    )  # fmt: skip
    found.fit(
        module or Memoriser(DPSGD(**settings | privacy)),
        datamodule=data or large_log(folder),
        ckpt_path=str(last) if resume and last.exists() else None,
    )
    return audit


# -- mechanisms that do not do what their ledger says ------------------------------------------------


def without_noise(patch: pytest.MonkeyPatch) -> None:
    """Add no noise to the sums, while every record says that it was added, and disable the check of the gate."""
    normal = KeyedStream.normal
    patch.setattr(KeyedStream, "normal", lambda self, *a, **k: normal(self, *a, **k).mul_(0.0))
    patch.setattr(NoiseCheck, "verdict", lambda self, update: None)


def a_fixed_batch(patch: pytest.MonkeyPatch) -> None:
    """Make every batch of the last units, which are the canaries, while the sampler claims that coins drew it."""

    def fixed(self: Any, step: int) -> np.ndarray:
        return np.arange(self.units - round(self.units * self.law.sample_rate), self.units)

    patch.setattr(PrivateBatchSampler, "draw", fixed)
