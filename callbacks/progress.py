"""Progress of a training run in words; the line itself is `lit_dpret.progress`."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_dpret.progress import Progress, ProgressLine

__all__ = ["Progress", "ProgressLine", "StepProgress"]


class StepProgress(Callback):
    """Logical steps done, with ETA and the epsilon spent so far.

    Args:
        label: What the line starts with.
        steps: In all, where the trainer is not told; null for what the trainer knows.
    """

    def __init__(self, label: str = "training", *, steps: int | None = None) -> None:
        self._label, self._steps = label, steps
        self._line: ProgressLine | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._line = ProgressLine(self._label) if trainer.is_global_zero else None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._line is None or not getattr(batch, "last", True):
            return
        known = trainer.max_steps if trainer.max_steps > 0 else trainer.num_training_batches
        total = int(known) if self._steps is None else self._steps
        spent = trainer.callback_metrics.get("privacy/eps_spent")
        self._line(trainer.global_step, total, f"eps {float(spent):.3f}" if spent is not None else "")
