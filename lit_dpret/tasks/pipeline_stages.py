"""Train one retriever as a stage of a longer task: resumable, with its own ledger and card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard, StepProgress
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.tasks.fit import Training, train
from lit_dpret.tasks.parts import Parts


def stage_callbacks(
    folder: Path, *, resume: bool, label: str, save_every: int = 5, accountant: Mapping[str, Any] | None = None,
    **tuning: Any,
) -> list[Any]:  # fmt: skip
    """Return the callbacks of a stage's training; a stage that has not begun starts fresh, even on ``resume``.

    ``accountant`` are settings of `PrivacyAccountant`, the first callback; ``tuning`` goes to `PrivacyCard`.
    """
    goes_on = resume and (folder / LEDGER_NAME).exists()
    return [
        PrivacyAccountant(run_dir=folder, resume=goes_on, **(accountant or {})),
        PrivacyCard(run_dir=folder, **tuning),
        ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=save_every, save_last=True, save_top_k=1),
        StepProgress(label),
    ]


def set_batch(data: PairsDataModule, mode: Any, batch: int) -> None:
    """Set batches of ``batch`` units, or of all units if there are fewer and their number is public."""
    data.use_unit(mode.unit, mode.neighbours)
    data.expected_batch_size = batch if mode.neighbours == "add_or_remove" else min(batch, data.n_units)


def train_retriever(
    model: Any, data: PairsDataModule, folder: Path, *, parts: Parts, steps: int, batch: int, callbacks: list[Any],
    resume: bool,
) -> None:  # fmt: skip
    """Train ``model`` for ``steps`` logical steps of ``batch`` units on average, set by `set_batch`."""
    data.setup("fit")
    set_batch(data, model.privacy, batch)

    def make_trainer(**settings: Any) -> L.Trainer:
        made: L.Trainer = parts.make_trainer(max_steps=steps, **settings)
        return made

    train(model, data, Training(run_dir=folder, make_trainer=make_trainer, callbacks=callbacks, resume=resume))
