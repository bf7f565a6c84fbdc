"""A Lightning user's module, loss and data set, made private by `make_private`. Not a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lit_dpret import UnitDataModule, make_private


class Classifier(L.LightningModule):
    """A module that a Lightning user already has; its training and validation step stay unchanged."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *extra, nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("The step of the module itself knows no privacy.")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", row_loss(self, batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        return [optimizer], [{"scheduler": steps, "interval": "step", "frequency": 2}, {"scheduler": epochs}]


def row_loss(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def rows(count: int = 60) -> TensorDataset:
    coins = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=coins)
    return TensorDataset(x, x[:, :3].argmax(1))


class RowsOf(Dataset[Any]):
    """Rows that a function computes on request."""

    def __init__(self, row: Callable[[int], Any], count: int = 60) -> None:
        self.row, self.count = row, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        return self.row(row)


def data(dataset: Any = None, **settings: Any) -> UnitDataModule:
    given = {"expected_batch_size": 20, "physical_batch_size": 16} | settings
    return UnitDataModule(rows() if dataset is None else dataset, **given)


def made(module: Any = None, **settings: Any) -> Any:
    given: dict[str, Any] = {"per_row_loss": row_loss, "eps": 3.0, "noise_multiplier": 1.0}
    return make_private(module or Classifier(), **given | settings)


def fit(folder: Path, module: Any, datamodule: Any = None, *, ckpt_path: Any = None, **trainer: Any) -> L.Trainer:
    given: dict[str, Any] = {"max_steps": 6, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    found = L.Trainer(default_root_dir=folder, enable_model_summary=False, **given | trainer)
    found.fit(module, datamodule=datamodule or data(), ckpt_path=ckpt_path)
    return found


def card_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "privacy_card.json").read_text(encoding="utf-8"))
    return found
