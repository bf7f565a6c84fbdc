"""One run for each way to lose the guarantee, with a pattern that its refusal must match.

Imported by path through ``conftest.py``; not a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
)
from stand_ins import Numbers, Regression, dp
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_dpret.callbacks import PrivacyAccountant, examine
from lit_dpret.callbacks.doctor import Examination
from lit_dpret.privacy.batches import copied_rows
from lit_dpret.privacy.ledger.trained import TrainedIn, mark_trained, note_built
from lit_dpret.privacy.modes import SyntheticData
from lit_dpret.privacy.noise import load_secret
from lit_dpret.tasks.fit import Training, train


@dataclass
class Case:
    """A run that keeps the guarantee except for what a test changes in it."""

    folder: Path
    mode: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    accountant: bool = True
    cap: int | None = None
    wrap: Callable[[Any], Any] = lambda module: module
    make_data: Callable[..., Any] = Numbers
    make_mode: Callable[[], Any] | None = None
    make_module: Callable[..., Any] = Regression

    def module(self) -> Any:
        torch.manual_seed(0)
        mode = self.make_mode() if self.make_mode else dp(self.folder, **{"noise_multiplier": 4.0} | self.mode)
        module = self.wrap(self.make_module(privacy=mode))
        note_built(module)
        return module

    def data_module(self) -> Any:
        data = self.make_data(**{"sampling": "poisson"} | self.data)
        if self.cap is not None:
            data.cap = self.cap
        return data

    def make_trainer(self, **settings: Any) -> L.Trainer:
        given: dict[str, Any] = {
            "accelerator": "cpu", "devices": 1, "max_steps": 2, "max_epochs": -1, "enable_progress_bar": False,
            "enable_model_summary": False, "logger": False,
            "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in self.callbacks),
        }  # fmt: skip
        return L.Trainer(**given | settings | self.trainer)

    def all_callbacks(self) -> list[Any]:
        accountant = [PrivacyAccountant(run_dir=self.folder / "run", eps_log_points=1)] if self.accountant else []
        return [*accountant, *self.callbacks]

    def examined(self) -> Examination:
        trainer = self.make_trainer(default_root_dir=self.folder / "run", callbacks=self.all_callbacks())
        return examine(trainer, self.module(), self.data_module())

    def fitted(self) -> None:
        """Train as ``task=fit`` does."""
        (self.folder / "run").mkdir(exist_ok=True)
        train(
            self.module(),
            self.data_module(),
            Training(run_dir=self.folder / "run", make_trainer=self.make_trainer, callbacks=self.all_callbacks()),
        )


def case_of(folder: Path, change: Any) -> Case:
    return Case(folder, **(change(folder) if callable(change) else change))


def with_loss(change: Callable[[Any, Any, Tensor], Tensor]) -> Callable[[Any], Any]:
    def wrap(module: Any) -> Any:
        honest = module.per_row_loss
        module.per_row_loss = lambda rows: change(module, rows, honest(rows))
        return module

    return wrap


def used_twice(module: Any, rows: Any, losses: Tensor) -> Tensor:
    return losses + F.linear(rows["inputs"], module.net[0].weight).sum(1)


def by_pairs(module: Any) -> Any:
    """Set up as ``logit_dp`` does: its bound assumes that a record does not change the gradients of other pairs."""
    module.privacy.candidates = "batch"
    return module


class Padding(Regression):
    """A module that places rows itself, in batches as wide as their longest row."""

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        # Many lengths, so that the few rows that the doctor draws are unlikely to have the same length.
        lengths = [1 + sum(map(ord, row.query)) % 13 for row in rows]
        letters = nn.utils.rnn.pad_sequence([torch.ones(length) for length in lengths], batch_first=True)
        return super().collate_rows(rows) | {"letters": letters}

    def place_rows(self, features: Any, places: Any, rows: int) -> Any:
        return copied_rows(features, places, rows)


def coupled(module: Any, rows: Any, losses: Tensor) -> Tensor:
    return losses / losses.mean().detach()


def coupled_in_training(module: Any, rows: Any, losses: Tensor) -> Tensor:
    return losses * losses.mean().detach() if module.training else losses


def divided_in_training(module: Any, rows: Any, losses: Tensor) -> Tensor:
    return losses / len(losses) if module.training else losses


def remembering(module: Any, rows: Any, losses: Tensor) -> Tensor:
    before, module.before = getattr(module, "before", 1.0), rows["target"].mean()
    return losses * before


def logged(module: Any, rows: Any, losses: Tensor) -> Tensor:
    module.log("train/own", losses.mean().detach())
    return losses


def told_to_a_logger(module: Any, rows: Any, losses: Tensor) -> Tensor:
    module.logger.log_metrics({"train/own": float(losses.mean())})
    return losses


def buffered(module: Any) -> Any:
    module.register_buffer("queue", torch.zeros(1))

    def remember(module: Any, rows: Any, losses: Tensor) -> Tensor:
        module.queue += rows["target"][:1]
        return losses

    return with_loss(remember)(module)


class Shared(Regression):
    """A module whose position embedding is looked up once for the whole batch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.positions = nn.Embedding(3, 1)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) + self.positions(torch.arange(3)).sum()


def normalised(module: Any) -> Any:
    module.net.insert(1, nn.BatchNorm1d(8))
    return module


def bare(module: Any) -> Any:
    module.temperature = nn.Parameter(torch.ones(()))
    return module


def watched(module: Any) -> Any:
    module.net[0].weight.register_hook(lambda gradient: gradient)
    return module


def retied(module: Any) -> Any:
    """Replace its last layer in the first forward pass, as a resized vocabulary does."""

    def replace(module: Any, rows: Any, losses: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not hasattr(module, "resized"):
            module.resized = True
            module.net[3] = nn.Linear(8, 1)
        return losses

    return with_loss(replace)(module)


def declared_coupled(module: Any) -> Any:
    module.coupled_loss = True
    return module


def stopping_by_itself(module: Any) -> Any:
    module.configure_callbacks = lambda: EarlyStopping(monitor="train/loss")
    return module


class Validating(Regression):
    def validation_step(self, batch: Any, index: int) -> None: ...


class Foreign(L.LightningModule):
    """A module that takes a privacy mode and ignores it."""

    def __init__(self, privacy: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Swapped(Numbers):
    def train_dataloader(self) -> Any:
        honest = super().train_dataloader()
        return DataLoader(honest.dataset, batch_sampler=list(self.batch_sampler), collate_fn=self.collate_fn)


class Repeating(Numbers):
    """A data set in which the second half of the units repeats the first half."""

    def train_dataloader(self) -> Any:
        honest = super().train_dataloader()
        half = self.size // 2

        class Halved:
            def __getitem__(self, draw: Any) -> Any:
                return draw, honest.dataset[replace(draw, unit=draw.unit % half)][1] if draw.unit >= 0 else []

            def __len__(self) -> int:
                return 2 * half

        return DataLoader(Halved(), batch_sampler=self.batch_sampler, collate_fn=self.collate_fn)  # type: ignore[arg-type]


class Lawless(L.LightningDataModule):
    def __init__(self, **settings: Any) -> None:
        super().__init__()


def with_secret_in_the_run(folder: Path) -> dict[str, Any]:
    return {"mode": {"secret_file": folder / "run" / "secret"}}


def with_secret_for_all(folder: Path) -> dict[str, Any]:
    if not (folder / "secret").exists():
        load_secret(folder / "secret")
    (folder / "secret").chmod(0o644)
    return {}


def with_private_start(folder: Path) -> dict[str, Any]:
    (folder / "earlier").mkdir(exist_ok=True)
    (folder / "earlier" / "privacy_card.json").write_text("{}", encoding="utf-8")

    def wrap(module: Any) -> Any:
        module.pretrained = str(folder / "earlier")
        return module

    return {"wrap": wrap}


def trained_before(module: Any) -> Any:
    mark_trained(module, [TrainedIn("another run", "none")])
    return module


class Thawing(BaseFinetuning):
    """Finetuning that trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


DECLARED: dict[str, Any] = {"neighbours": "add_or_remove", "delta": 1e-3}
NO_DELTA: dict[str, Any] = {"neighbours": "add_or_remove"}
RATE: dict[str, Any] = {"sample_rate": 0.1}
CUT: dict[str, Any] = {"sampling": "truncated_poisson"}
PRV: dict[str, Any] = {"accountant": "prv"}
BAD: list[tuple[str, str, Any]] = [
    ("T1", r"sampling=shuffle, privacy.accountant=prv", {"data": {"sampling": "shuffle"}, "mode": PRV}),
    ("T1", r"datamodule=", {"make_data": Lawless}),
    ("T2", r"trainer.limit_train_batches", {"trainer": {"limit_train_batches": 0.5}}),
    ("T2", r"trainer.overfit_batches", {"trainer": {"overfit_batches": 1}}),
    ("T2", r"batch sampler was replaced", {"make_data": Swapped}),
    ("T3", r"trainer.strategy=ddp_spawn", {"trainer": {"devices": 2, "strategy": "ddp_spawn"}}),
    ("T5", r"declare datamodule.sample_rate", {"mode": DECLARED}),
    ("T5", r"Set as constants: privacy.delta", {"mode": NO_DELTA, "data": RATE}),
    (
        "T5",
        r"constants: datamodule.expected_batch_size",
        {"mode": DECLARED, "data": RATE | {"expected_batch_size": None}},
    ),
    ("T6", r"datamodule.sampling=poisson", {"mode": DECLARED, "data": RATE | CUT, "cap": 40}),
    ("T6", r"sampling=truncated_poisson, privacy.accountant=prv", {"data": CUT, "mode": PRV}),
    ("T7", r"trainer.precision=16-true: the loss scaler", {"trainer": {"precision": "16-true"}}),
    ("T7", r"Foreign is not a PrivateModule", {"make_module": Foreign}),
    ("T7", r"has no privacy accountant", {"accountant": False}),
    ("T9", r"net.0.weight is also used outside", {"wrap": with_loss(used_twice)}),
    ("T10", r"no batch axis", {"make_module": Shared}),
    ("T11", r"its loss couples the examples", {"wrap": declared_coupled}),
    ("T11", r"when other rows are in the batch", {"wrap": with_loss(coupled)}),
    ("T11", r"when other rows are in the batch", {"wrap": with_loss(coupled_in_training)}),
    ("T11", r"are not there", {"wrap": with_loss(divided_in_training)}),
    ("T11", r"keeps of one batch", {"wrap": with_loss(remembering)}),
    ("T11", r"net.1 is a BatchNorm1d", {"wrap": normalised}),
    ("T11", r"Buffer queue", {"wrap": buffered}),
    ("T12", r"trainer.accumulate_grad_batches=2", {"trainer": {"accumulate_grad_batches": 2}}),
    ("T12", r"trainer.accumulate_grad_batches", {"callbacks": [GradientAccumulationScheduler({1: 2})]}),
    ("T13", r"Parameter temperature is not covered", {"wrap": bare}),
    ("T14", r"net.0.weight has a gradient hook", {"wrap": watched}),
    ("T14", r"net.3.weight was replaced", {"wrap": retied}),
    ("T14", r"Thawing", {"callbacks": [Thawing()]}),
    ("T14", r"ModelPruning", {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}),
    ("T16", r"trainer.gradient_clip_val=1", {"trainer": {"gradient_clip_val": 1.0}}),
    ("T39", r"trainer.precision=bf16-mixed", {"trainer": {"precision": "bf16-mixed"}, "wrap": by_pairs}),
    ("T39", r"letters.*trainer\.precision", {"trainer": {"precision": "bf16-mixed"}, "make_module": Padding}),
    ("T21", r"is inside the run folder", with_secret_in_the_run),
    ("T21", r"can be read by others", with_secret_for_all),
    ("T25", r"trainer.detect_anomaly=true", {"trainer": {"detect_anomaly": True}}),
    ("T25", r"EarlyStopping", {"callbacks": [EarlyStopping(monitor="train/loss")]}),
    ("T25", r"EarlyStopping", {"wrap": stopping_by_itself}),
    ("T25", r"ModelCheckpoint", {"callbacks": [ModelCheckpoint(monitor="train/loss")]}),
    ("T25", r"LearningRateFinder trains on private data", {"callbacks": [LearningRateFinder()]}),
    ("T25", r"validation_step computes metrics", {"make_module": Validating}),
    ("T27", r"Choose datamodule=synthetic", {"make_mode": SyntheticData}),
    ("T29", r"privacy.delta=0.5 is not below 1/n", {"mode": {"delta": 0.5}}),
    ("T30", r"carries a privacy card", with_private_start),
    ("T30", r"holds weights that a run under privacy=none", {"wrap": trained_before}),
    ("T35", r"trainer\.max_steps", {"trainer": {"max_time": "00:01:00:00"}}),
    ("T35", r"every_n_train_steps", {"callbacks": [ModelCheckpoint(train_time_interval=timedelta(hours=1))]}),
    ("T35", r"callbacks=with_throughput", {"callbacks": [DeviceStatsMonitor()]}),
    ("T25", r"model\.log_private_loss", {"wrap": with_loss(logged)}),
    ("T25", r"model\.log_private_loss", {"wrap": with_loss(told_to_a_logger)}),
    ("T38", r"datamodule.train_dataloader", {"make_data": Repeating}),
]
