"""Hooks that write private numbers where the next loss reads them are refused; what is made of weights alone is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from stand_ins import Numbers, Regression, dp, fit
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules import hook_watch
from lit_dpret.privacy.modes import NoPrivacy


def refused(
    folder: Path, module: Any, data: Any = None, *, match: str = "", trap: str = "T11", **settings: Any
) -> None:
    with pytest.raises((UnsupportedModelError, ConfigurationError), match=match) as refusal:
        fit(folder / "run", module, data, **settings)
    assert refusal.value.trap == trap


def private(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"privacy": dp(folder, noise_seed=1, **settings)}


class Bank:
    def __init__(self) -> None:
        self.rows: list[Tensor] = []


class Centred(Regression):
    """Has places to keep numbers in, of which two are part of each target."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("table", torch.eye(2).to_sparse())
        self.offset = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.bank = Bank()

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return (self.net(rows["inputs"]).squeeze(-1) - rows["target"] + self.centre + self.offset).square()


def mean_of(batch: Any) -> Tensor:
    return torch.zeros(()) if batch.rows is None else batch.rows["target"].mean()


class Writes(Centred):
    """Writes the mean of a batch somewhere, at some moment."""

    last = 0.0

    def __init__(self, write: Callable[[Any, Tensor], object], moment: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.write, self.moment = write, moment

    def now(self, moment: str, mean: Tensor) -> None:
        if moment == self.moment:
            self.write(self, mean)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last = float(mean_of(batch)) or self.last
        self.now("start" if batch_idx or self.moment == "start" else "first", mean_of(batch))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.now("before the step", mean_of(batch))
        super().training_step(batch, batch_idx)
        self.now("after the step", mean_of(batch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.now("optimizer", torch.tensor(self.last))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.now("end", mean_of(batch))

    def on_train_epoch_end(self) -> None:
        self.now("epoch", torch.tensor(self.last))


def replace_centre(module: Any, mean: Tensor) -> None:
    module.centre = mean


def replace_table(module: Any, mean: Tensor) -> None:
    module.table = (torch.ones(2, 2) * mean).to_sparse()


def keep_in_a_dict(module: Any, mean: Tensor) -> None:
    module.seen = {"targets": [mean]}


def keep_an_array(module: Any, mean: Tensor) -> None:
    module.seen = mean.numpy()


#: What is written, and when.
WRITES: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "a buffer, in place": (lambda module, mean: module.centre.data.copy_(mean), "end"),
    "another buffer": (replace_centre, "start"),
    "a centre, of the first batch alone": (replace_centre, "first"),
    "a sparse buffer": (replace_table, "end"),
    "a buffer before the step": (lambda module, mean: module.centre.add_(mean), "before the step"),
    "a buffer after the step": (lambda module, mean: module.centre.add_(mean), "after the step"),
    "a buffer while the optimizer steps": (replace_centre, "optimizer"),
    "a noised gradient": (lambda module, mean: next(module.net.parameters()).grad.add_(mean), "optimizer"),
    "a frozen weight": (lambda module, mean: module.offset.data.add_(mean), "end"),
    "a trained weight": (lambda module, mean: next(module.net.parameters()).data.add_(mean), "end"),
    "a dict": (keep_in_a_dict, "end"),
    "an array": (keep_an_array, "end"),
    "an object": (lambda module, mean: module.bank.rows.append(mean), "end"),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_between_two_batches_is_refused(name: str, tmp_path: Path) -> None:
    refused(tmp_path, Writes(*WRITES[name], **private(tmp_path)))


def test_the_end_of_every_epoch_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_watch.Looks, "due", lambda *_: False)
    data = Numbers(40, expected_batch_size=20, physical_batch_size=40)
    module = Writes(replace_centre, "epoch", **private(tmp_path, noise_multiplier=8.0))
    refused(tmp_path, module, data, match="centre", save_every=99, steps=9)


@pytest.mark.parametrize("name", ["a buffer, in place", "a dict"])
def test_without_a_guarantee_nothing_is_refused(name: str, tmp_path: Path) -> None:
    fit(tmp_path / "run", Writes(*WRITES[name], privacy=NoPrivacy()))


# -- callbacks -------------------------------------------------------------------------------


class KeepsTheBatch(Callback):
    """Keeps Lightning's batch, of which the loss reads a statistic."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.batch = batch


class CentredByTheBatch(Regression):
    batch: Any = None

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return (self.net(rows["inputs"]).squeeze(-1) - rows["target"] + self.batch.rows["target"].mean()).square()


class BatchMean(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.centre.fill_(float(mean_of(batch)))


class Moments(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for kept in trainer.optimizers[0].state.values():
            kept["exp_avg"].add_(mean_of(batch))


@pytest.mark.parametrize(
    ("module", "callback", "named"),
    [(CentredByTheBatch, KeepsTheBatch, "batch"), (Centred, BatchMean, "centre"), (Regression, Moments, "exp_avg")],
    ids=["a batch that it keeps", "a buffer", "the state of the optimizer"],
)
def test_what_a_callback_writes_is_refused(module: Any, callback: Any, named: str, tmp_path: Path) -> None:
    refused(tmp_path, module(**private(tmp_path)), match=named, extra=[callback()])
    if callback is KeepsTheBatch:
        assert '"intent"' not in (tmp_path / "run" / "privacy_ledger.jsonl").read_text()


class WritesWhileItSteps(Callback):
    """Keeps the mean of each step's rows, of as many physical batches as it has."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.mean = mean_of(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.centre.copy_(self.mean)


class TimesThree(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3)


@pytest.mark.costly
@pytest.mark.parametrize("callback", [WritesWhileItSteps, TimesThree])
@pytest.mark.parametrize("units", [2, 16], ids=["several parts", "one part"])
def test_the_first_update_is_watched_however_many_batches_its_step_has(
    callback: Any, units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_watch.HookWatch, "compare", lambda *_: None)  # which may see it in the next batch
    data = Numbers(sampling="full_batch", physical_batch_size=units)
    module = Centred(**private(tmp_path, noise_multiplier=8.0))
    refused(tmp_path, module, data, match="while the optimizer stepped", extra=[callback()], steps=1)


# -- updates and weights of the module's own --------------------------------------------------


class StepsOnceMore(Regression):
    """Makes an update of its own after the granted one, by an optimizer that Lightning does not know."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch.rows is not None:
            own = torch.optim.SGD(self.parameters(), lr=0.1)
            self.per_row_loss(batch.rows).mean().backward()
            own.step()


class StepsLightnings(Regression):
    """Steps Lightning's optimizer in every ``every``-th step, in a way that Lightning does not hear of."""

    every = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch.rows is not None and batch.step % self.every == self.every - 1:
            raw: Any = self.optimizers(use_pl_optimizer=False)
            self.per_row_loss(batch.rows).mean().backward()
            raw.step()


class Weighs(Regression):
    def unit_loss(self, batch: Any) -> Any:
        return super().unit_loss(batch)


@pytest.mark.parametrize(
    ("module", "every", "trap", "named"),
    [(StepsLightnings, 1, "T7", ""), (StepsLightnings, 3, "T7", ""), (StepsOnceMore, 1, "T11", ""),
     (Weighs, 1, "T11", "unit_loss")],
    ids=["Lightning's optimizer", "in every third step", "another optimizer", "weights of units"],
)  # fmt: skip
def test_a_step_or_a_weighting_of_its_own_is_refused(
    module: Any, every: int, trap: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepsLightnings, "every", every)
    refused(tmp_path, module(**private(tmp_path)), match=named, trap=trap)


# -- metrics ---------------------------------------------------------------------------------


GLOBAL = MeanMetric()


class KeepsAMetric(Regression):
    """A running mean that a hook keeps up beside the loss."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.mean = MeanMetric()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.update(mean_of(batch))


class ReadsAMetric(KeepsAMetric):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) * (1 + (self.mean.mean_value / self.mean.weight.clamp(min=1e-9)).square())


class CountsInItsLoss(Regression):
    """Keeps up a metric in its loss, which does not read it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.mean = MeanMetric()

    def metric(self) -> MeanMetric:
        return self.mean

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        losses = super().per_row_loss(rows)
        self.metric().update(losses.detach())
        return losses


class CountsGlobally(CountsInItsLoss):
    def metric(self) -> MeanMetric:
        return GLOBAL


class ReadsGlobally(CountsGlobally):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) * (1 + (GLOBAL.mean_value / GLOBAL.weight.clamp(min=1e-9)).square())


@pytest.mark.parametrize("module", [KeepsAMetric, CountsInItsLoss, CountsGlobally, ReadsAMetric, ReadsGlobally])
def test_a_metric_is_refused_where_the_loss_reads_it_and_not_beside_it(module: Any, tmp_path: Path) -> None:
    if module in (ReadsAMetric, ReadsGlobally):
        refused(tmp_path, module(**private(tmp_path)))
    else:
        fit(tmp_path / "run", module(**private(tmp_path)))


# -- what is made of weights alone ------------------------------------------------------------


class Teacher(Regression):
    """A running average of the trained weights, whose answers are half of each target."""

    public_metrics = ("teacher",)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.teacher.register_buffer("length", torch.zeros(()))

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        target = (rows["target"] + self.teacher(rows["inputs"]).squeeze(-1)) / 2
        return (self.net(rows["inputs"]).squeeze(-1) - target).square()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for kept, trained in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            kept.data.lerp_(trained.data, 0.1)
        self.teacher.length = sum(kept.norm() for kept in self.teacher.parameters())


class Normalises(Regression):
    """Makes something of the noised gradient alone, and says so."""

    public_metrics = ("grad",)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@pytest.mark.costly
@pytest.mark.parametrize(("module", "named"), [(Teacher, "teacher"), (Normalises, r"\.grad")])
def test_what_is_made_of_released_values_alone_may_be_declared_and_is_refused_undeclared(
    module: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path / "declared", module(**private(tmp_path)))
    monkeypatch.setattr(module, "public_metrics", ())
    refused(tmp_path, module(**private(tmp_path)), match=named)


class Anneals(Regression):
    """A schedule by numbers, and a validation in between that puts other weights in place and the old ones back."""

    sharpness = 1.0

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return self.sharpness * super().per_row_loss(rows)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sharpness *= 0.9
        kept = {name: value.clone() for name, value in self.state_dict().items()}
        for parameter in self.parameters():
            parameter.data.zero_()
        self.load_state_dict(kept)


def test_a_schedule_and_weights_that_are_put_back_are_not_refused(tmp_path: Path) -> None:
    fit(tmp_path / "run", Anneals(**private(tmp_path)))
