"""Train one retriever as a stage of a longer task: resumable, with a ledger and a card of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard, StepProgress
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME
from lit_dpret.tasks.fit import train
from lit_dpret.tasks.parts import Parts


def stage_callbacks(
    folder: Path, *, resume: bool, label: str, save_every: int = 5, trial_of: Any = None,
    start: Mapping[str, Any] | None = None, **tuning: Any,
) -> list[Any]:  # fmt: skip
    """What every training inside a longer task needs; one that was not begun yet begins, also where ``resume``.

    ``start`` goes to `PrivacyAccountant`: the run that this one starts from; ``tuning`` goes to `PrivacyCard`.
    """
    return [
        PrivacyAccountant(run_dir=folder, resume=is_begun(folder, resume), trial_of=trial_of, **(start or {})),
        PrivacyCard(run_dir=folder, **tuning),
        ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=save_every, save_last=True, save_top_k=1),
        StepProgress(label),
    ]


def is_begun(folder: Path, resume: bool) -> bool:
    """Whether a training inside a longer task goes on, and does not begin."""
    return resume and (folder / LEDGER_NAME).exists()


def train_retriever(
    model: Any, data: PairsDataModule, folder: Path, *, parts: Parts, steps: int, batch: int, callbacks: list[Any],
    resume: bool,
) -> None:  # fmt: skip
    """Train ``model`` for ``steps`` logical steps of ``batch`` units on average, or of all where there are fewer."""
    data.setup("fit")
    data.use_unit(model.privacy.unit, model.privacy.neighbours)
    data.expected_batch_size = min(batch, data.n_units)

    def make_trainer(**settings: Any) -> L.Trainer:
        made: L.Trainer = parts.make_trainer(max_steps=steps, **settings)
        return made

    train(
        model, data, run_dir=folder, make_trainer=make_trainer, callbacks=callbacks, loggers=[], resume=resume,
    )  # fmt: skip
