"""Stand-ins that fit on a screen: a linear module and a data set of invented rows.

Imported by path through ``conftest.py``; not a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_dpret.audit.testing import assert_private
from lit_dpret.callbacks import MetricsFile, PrivacyAccountant
from lit_dpret.errors import ResumeError
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import DPSGD, PrivacyMode


@dataclass(frozen=True)
class Line:
    query_id: str
    query: str
    passage_id: str
    passage: str
    positives: frozenset[str]


class Units:
    """``size`` units with one to three rows each."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def rows(self, unit: int) -> list[Line]:
        names = [f"p{unit}.{i}" for i in range(1 + unit % 3)]
        return [Line(f"q{unit}", f"{unit}", name, f"{i}", frozenset(names)) for i, name in enumerate(names)]


class _Items:
    def __init__(self, units: Units) -> None:
        self._units = units

    def __getitem__(self, draw: Any) -> Any:
        return draw, self._units.rows(draw.unit) if draw.unit >= 0 else []

    def __len__(self) -> int:
        return len(self._units)


class Numbers(L.LightningDataModule):
    """The DataModule interface that the accountant needs, over `Units`."""

    def __init__(self, size: int = 200, *, sampling: str = "truncated_poisson", expected_batch_size: int | None = 20,
                 sample_rate: float | None = None, physical_batch_size: int = 16, rows_per_unit: str = "one",
                 content: str = "a") -> None:  # fmt: skip
        super().__init__()
        self.size, self.sampling, self.content = size, sampling, content
        self.expected_batch_size, self.sample_rate, self.cap = expected_batch_size, sample_rate, None
        self.physical_batch_size, self.rows_per_unit = physical_batch_size, rows_per_unit
        self.batch_sampler: Any = None
        self.duplicates = "keep"
        self.unit_by: str | None = None

    def use_unit(self, unit: str, neighbours: str | None = None) -> None:
        self.unit = unit

    @property
    def n_units(self) -> int:
        return self.size

    def data_fingerprint(self, key: bytes) -> str:
        return f"{self.content}{self.size}"

    def attach(self, batch_sampler: Any, collate_fn: Any) -> None:
        self.batch_sampler, self.collate_fn = batch_sampler, collate_fn

    def train_dataloader(self) -> Any:
        return DataLoader(_Items(Units(self.size)), batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)


class Regression(PrivateModule):
    """Fit row numbers with a small network with dropout; deterministic given the run's streams."""

    def __init__(
        self, *, privacy: PrivacyMode, lr: float = 0.05, dropout: float = 0.1, optimizer: OptimizerSpec | None = None
    ) -> None:
        super().__init__(privacy=privacy, optimizer=optimizer or OptimizerSpec(name="adam", lr=lr))
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        numbers = torch.tensor([[float(row.query), float(row.passage)] for row in rows])
        inputs = torch.stack([numbers[:, 0].sin(), numbers[:, 0].cos(), numbers[:, 1], torch.ones(len(rows))], dim=1)
        return {"inputs": inputs, "target": numbers[:, 0].sin() + numbers[:, 1]}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return (self.net(rows["inputs"]).squeeze(-1) - rows["target"]).square()


class Words(PrivateModule):
    """Tokens through an embedding that few rows touch, and two weights of equal shape."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        chosen = {"eps": 1.0, "max_grad_norm": 0.5} | settings
        super().__init__(privacy=DPSGD(**chosen), optimizer=OptimizerSpec(name="adam", lr=0.05))
        self.lookup = nn.Embedding(9, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return (self.second(self.first(self.lookup(rows["token"])).tanh()) - rows["target"]).square().sum(1)

    def check(self, **settings: Any) -> None:
        """Test it on six rows, with just enough releases to refute the claim."""
        targets = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        rows = {"token": torch.arange(6) % 5, "target": targets}
        assert_private(self, rows, 1.0, 1e-5, **{"trials": 60} | settings)


# With it, six steps of `Numbers` cost epsilon 2.92 and seven 3.10; calibrating takes longer than the runs themselves.
CALIBRATED = 0.645


def dp(tmp_path: Path, **settings: Any) -> DPSGD:
    """Return DP-SGD whose six steps over `Numbers` just fit the budget, and seven do not."""
    chosen = {"eps": 3.0, "max_grad_norm": 1.0, "noise_multiplier": CALIBRATED, "secret_file": tmp_path / "secret"}
    return DPSGD(**chosen | settings)


def fit(folder: Path, module: Any, data: Any | None = None, *, steps: int = 6, resume: bool = False,
        accountant: PrivacyAccountant | None = None, extra: list[Any] | None = None, save_every: int = 2,
        **trainer: Any) -> L.Trainer:  # fmt: skip
    """Do one run in ``folder`` as `train.py` would."""
    accountant = accountant or PrivacyAccountant(run_dir=folder, resume=resume, eps_log_points=1)
    checkpoint = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=save_every, save_last=True)
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_steps": steps, "max_epochs": -1, "enable_progress_bar": False,
        "enable_model_summary": False, "log_every_n_steps": 1, "logger": [MetricsFile(folder)],
        "callbacks": [accountant, checkpoint, *(extra or [])], "default_root_dir": folder,
    }  # fmt: skip
    runner = L.Trainer(**settings | trainer)
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / "checkpoints" / "last.ckpt"
    runner.fit(module, datamodule=data or Numbers(), ckpt_path=str(last) if resume and last.exists() else None)
    return runner


class Texts(Regression):
    """A module that trains on the lengths of texts."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        lengths = torch.tensor([[float(len(row.query)), float(len(row.passage))] for row in rows]).reshape(-1, 2)
        return {"inputs": torch.cat([lengths.sin(), lengths.cos()], dim=1), "target": lengths[:, 0] / 50}


class Killed(BaseException):
    """Simulates kill -9: no code can clean up."""


class KillAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if batch.last and batch.step + 1 == self.step:
            raise Killed


class Stopped(ResumeError, RuntimeError):
    """An error of a class that no private row can cause."""


class StopAfter(Callback):
    """A callback that ends the run with `Stopped` after some number of logical steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if batch.last and batch.step + 1 == self.steps:
            raise Stopped("stop")


def records(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a run's ledger, of one kind or all."""
    found = PrivacyLedger.read(folder / "privacy_ledger.jsonl").records
    return [record for record in found if kind in (None, record["kind"])]


def granted(folder: Path) -> list[tuple[int, int]]:
    """Return the attempt and number of each step that a run announced."""
    return [(record["attempt"], record["step"]) for record in records(folder, "intent")]


def weights(module: torch.nn.Module) -> Tensor:
    """Return all parameters of a module in one row."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])
