"""The training curve of one run, a line for each step, so that an interrupted run keeps what it saw.

A curve is computed from the rows that are trained on. Writing it is a release that no accountant counts:
it is for studies on public data, and the module has to declare it (``log_private_loss``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_dpret.datamodules.images import ImageRow
from lit_dpret.encoders.vision import AugmentedViews
from lit_dpret.errors import DataError, StorageError
from lit_dpret.evaluation_mode import evaluation_mode
from lit_dpret.losses import SoftmaxPairLoss

_NO_DRAW = 0


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What was observed after each step."""

    steps: list[int]  # optimizer steps taken
    losses: list[float]  # training loss of the step's batch, per example, as the variant's own loss counts it
    held_out: list[float]  # the same softmax loss for all variants, on images that were not trained on
    seconds: list[float]  # since the first step began, without the time that observing took


class HeldOutLoss:
    """The softmax loss at temperature 1 of fixed groups of images, which is comparable between variants.

    A training loss is not: it depends on how many negatives a row has, and on which loss is trained.

    Args:
        images: uint8, shape (n, channels, height, width); not those that are trained on.
        group: Images that are each other's negatives; a rest that fills no group is left out.
    """

    def __init__(self, images: Tensor, *, group: int) -> None:
        views = AugmentedViews(seed=0)
        rows = [ImageRow(f"held out {i}", image, 0, _NO_DRAW) for i, image in enumerate(images)]
        groups = range(0, len(rows) - group + 1, group)
        self._batches = [views(rows[start : start + group]) for start in groups]
        self._loss = SoftmaxPairLoss(temperature=1.0)
        if not self._batches:
            raise DataError(f"{len(rows)} held-out images fill no group of {group}. Lower task.held_out_group.")

    @torch.no_grad()
    def __call__(self, module: Any) -> float:
        """Return the mean over all images, in nats."""
        with evaluation_mode(module):
            losses = [
                self._loss.row_losses(
                    _unit(module, batch["query"], "query") @ _unit(module, batch["passage"], "passage").T
                )
                for batch in self._batches
            ]
        return float(torch.cat(losses).mean())


def _unit(module: Any, images: Tensor, side: str) -> Tensor:
    found: Tensor = torch.nn.functional.normalize(module.represent(images.to(module.device), side), dim=1).float()
    return found


class CurveRecorder(Callback):
    """Append a line to ``file`` after each step."""

    def __init__(self, file: Path, *, held_out: Callable[[Any], float]) -> None:
        self._file, self._held_out = file, held_out
        self._mark = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not batch.last:
            return
        line = {
            "step": batch.step + 1,
            "seconds": time.monotonic() - self._mark,
            "loss": float(trainer.callback_metrics["train/loss"]),
            "held_out": self._held_out(pl_module),
        }
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise StorageError(f"{self._file} could not be written: {error.strerror}.") from error
        self._mark = time.monotonic()


def read_curve(file: Path) -> Curve:
    """Read the curve that a `CurveRecorder` wrote, each step once."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = dict(sorted({line["step"]: line for line in lines}.items()))
    clock, seconds = 0.0, []
    for line in found.values():
        clock += line["seconds"]
        seconds.append(clock)
    return Curve(
        steps=list(found),
        losses=[line["loss"] for line in found.values()],
        held_out=[line["held_out"] for line in found.values()],
        seconds=seconds,
    )
