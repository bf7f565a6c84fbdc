"""A few local epochs by an ordinary Trainer, with the accountant that every run of this project has."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.callbacks.progress import StepProgress
from lit_dpret.files import write_whole
from lit_dpret.progress import without_progress


class RoundAccountant(PrivacyAccountant):
    """The accountant of one round, which goes on from the weights of earlier rounds: the silo composes them all."""

    counted_by_others = True


def fit_epochs(
    module: Any, data: Any, folder: Path, *, epochs: int = 1, callbacks: Sequence[Callback] = (),
    progress: StepProgress | None = None,
) -> None:  # fmt: skip
    """Train ``module`` on ``data`` for so many epochs, its ledger in ``folder``.

    Nothing is logged, validated or checkpointed: what comes out of a local epoch is the weights, and the ledger.

    Args:
        module: Of this project.
        data: Its DataModule.
        folder: New; it holds the round's own ledger.
        epochs: How many.
        callbacks: More of them.
        progress: Tells of the steps; null where a line above tells how far the work is.
    """
    told = [] if progress is None else [progress]
    quiet = logging.getLogger("lightning.pytorch")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        trainer = L.Trainer(
            accelerator="auto",
            devices=1,
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[RoundAccountant(run_dir=folder, eps_log_points=1), *told, *callbacks],
        )
        with nullcontext() if told else without_progress(), warnings.catch_warnings():
            # The sentence side is frozen in stage 2, by design.
            warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")
            trainer.fit(module, datamodule=data)
    finally:
        quiet.setLevel(level)


class KeepOptimizer(Callback):
    """Begins with the optimizer's state that an earlier fit ended with, and keeps its own at the end.

    Under a private mode the state is made of noised gradients alone; it stays on this machine either way.

    Args:
        before: Where the earlier state is; nothing where there is none.
        after: Where this one's goes.
    """

    def __init__(self, before: Path, after: Path) -> None:
        self._before, self._after = before, after

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._before.is_file():
            trainer.optimizers[0].load_state_dict(torch.load(self._before, weights_only=True))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        kept = io.BytesIO()
        torch.save(trainer.optimizers[0].state_dict(), kept)
        write_whole(self._after, kept.getvalue(), owner_only=True)


def attempt_folder(folder: Path) -> Path:
    """The first of ``attempt-0``, ``attempt-1`` and so on that does not exist.

    A round that was killed leaves a ledger whose releases stay charged; it is not gone on with but made again.
    """
    number = 0
    while (folder / f"attempt-{number}").exists():
        number += 1
    return folder / f"attempt-{number}"
