"""`task=fit`: train one module under one privacy mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_dpret.callbacks import MetricsFile
from lit_dpret.callbacks.refusals import refuse_broken_claims
from lit_dpret.canaries import CanarySuite
from lit_dpret.canaries.planting import plant_in_run
from lit_dpret.tasks.checkpoints import WholeCheckpoints, newest_checkpoint
from lit_dpret.tasks.parts import Parts, check_run_dir

CHECKPOINTS = "checkpoints"


class Fit:
    """Train ``model`` on ``datamodule`` under ``privacy``; write model, ledger and card.

    Args:
        min_free_mb: Refuse to start with less free disk than this.
    """

    def __init__(self, *, min_free_mb: float = 200) -> None:
        self.min_free_mb = min_free_mb

    def run(self, parts: Parts) -> dict[str, float]:
        """Build, train and export; returns the last logged metrics."""
        check_run_dir(parts.run_dir, min_free_mb=self.min_free_mb)
        L.seed_everything(parts.seed, verbose=False)
        privacy = parts.make_privacy()
        datamodule = parts.make_datamodule()
        module = parts.make_module(privacy=privacy)
        return train(
            module,
            datamodule,
            run_dir=parts.run_dir,
            make_trainer=parts.make_trainer,
            callbacks=parts.make_callbacks(),
            loggers=parts.make_loggers(),
            resume=parts.resume,
            canaries=parts.make_canaries(),
        )


def train(
    module: Any,
    datamodule: Any,
    *,
    run_dir: Path,
    make_trainer: Any,
    callbacks: list[Any],
    loggers: list[Any],
    resume: bool,
    canaries: CanarySuite | None = None,
) -> dict[str, float]:
    """Train ``module`` in ``run_dir``, from the newest whole checkpoint there if ``resume``.

    Guarantees:
        - Checkpoints are written whole or not at all, unless ``make_trainer`` brings a way of its own.
        - A run that is killed at any moment goes on; one that was killed after its last step still
          gets its model and its card.
        - ``canaries`` are planted before anything reads the training data, and kept in ``canaries.json``.
    """
    trainer: L.Trainer = make_trainer(
        default_root_dir=str(run_dir), callbacks=callbacks, logger=[MetricsFile(run_dir), *loggers]
    )
    refuse_broken_claims(trainer, module, datamodule)  # before any data is read; the accountant asks again
    datamodule.prepare_data()
    datamodule.setup("fit")
    if canaries is not None:
        plant_in_run(datamodule, canaries, run_dir, resume=resume)
    if hasattr(module, "prepare"):
        module.prepare(datamodule)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeCheckpoints()
    checkpoint = newest_checkpoint(run_dir / CHECKPOINTS) if resume else None
    trainer.fit(
        module,
        datamodule=datamodule,
        ckpt_path=None if checkpoint is None else str(checkpoint),
        weights_only=True,
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
