"""One's own training step and data, counted by lit-dpret's accountant.

    python train.py --folder runs/own_loop

A module that is not a `PrivateModule` may still be counted, on one process. It asks the accountant's guard for a permit
before it draws noise, lets the privacy mode clip and noise, and tells the guard what it did. Its DataModule says how
many units there are and takes the sampler that draws them. This is all of the contract, written out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.privacy.budget import EACH_ROW
from lit_dpret.privacy.modes import DPSGD, PrivacyMode


class Points(Dataset[Any]):
    """Each point is one unit; the accountant's sampler asks for it by a draw."""

    def __init__(self, count: int) -> None:
        coins = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 8, generator=coins)
        self.y = self.x @ torch.arange(8.0) + 0.1 * torch.randn(count, generator=coins)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, draw: Any) -> tuple[Any, list[Any]]:
        return draw, [] if draw.unit < 0 else [(self.x[draw.unit], self.y[draw.unit])]


class PointsData(L.LightningDataModule):
    """What the accountant reads of a DataModule: how to draw, how many units, and a fingerprint of them."""

    sampling, expected_batch_size, sample_rate = "truncated_poisson", 64, None
    physical_batch_size, cap, rows_per_unit = 32, None, "one"
    unit_by = EACH_ROW

    def __init__(self, count: int = 1000) -> None:
        super().__init__()
        self.points = Points(count)
        self.n_units = count

    def use_unit(self, unit: str, neighbours: str) -> None:
        """Every unit has one row, so it is the same for all of them."""

    def data_fingerprint(self, key: bytes) -> str:
        rows = torch.cat([self.points.x, self.points.y[:, None]], dim=1)  # all that a step reads, labels too
        return hashlib.blake2b(rows.numpy().tobytes(), key=key, digest_size=16).hexdigest()

    def attach(self, batch_sampler: Any, collate_fn: Any) -> None:
        self._sampler, self._collate = batch_sampler, collate_fn

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.points, batch_sampler=self._sampler, collate_fn=self._collate)


class Regression(L.LightningModule):
    """A plain LightningModule with a private step of its own."""

    log_private_loss = False
    coupled_loss = False

    def __init__(self, privacy: PrivacyMode) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.privacy = privacy
        self.layer = nn.Linear(8, 1)

    def collate_rows(self, rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return (self.layer(rows["x"])[:, 0] - rows["y"]) ** 2

    def receive_guard(self, guard: Any) -> None:
        self.guard = guard

    def training_step(self, batch: Any, _: int) -> None:
        if batch.rows is not None:  # an empty draw still takes its step
            self.privacy.add(lambda: self.per_row_loss(batch.rows), batch.unit_ids, batch.mask)
        if not batch.last:
            return
        units, sums = self.privacy.counts.units, self.privacy.take()
        sums |= self.privacy.extra_sums()
        permit = self.guard.authorise(batch.attempt, batch.step, units, sums)
        update = self.privacy.privatize(sums, attempt=permit.attempt, step=permit.step, salt=permit.salt)
        for name, parameter in self.named_parameters():
            parameter.grad = update.gradients[name]
        self.guard.record(permit, update)
        self.optimizers().step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path("runs/own_loop"))
    given = options.parse_args()
    L.seed_everything(0)
    module = Regression(DPSGD(eps=3, max_grad_norm=1.0))
    trainer = L.Trainer(accelerator="cpu", max_steps=100, max_epochs=-1, default_root_dir=given.folder, logger=False,
                        enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[PrivacyAccountant(), PrivacyCard()])  # fmt: skip
    trainer.fit(module, datamodule=PointsData())
    card = json.loads((given.folder / "privacy_card.json").read_text(encoding="utf-8"))
    print(
        f"epsilon {card['claim']['epsilon']:.3f} at delta {card['claim']['delta']:.1e} in {trainer.global_step} steps"
    )


if __name__ == "__main__":
    main()
