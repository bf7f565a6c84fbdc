"""Hooks that write private numbers where the next loss reads them are refused; what is made of weights alone is not."""

from __future__ import annotations

import copy
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


class Centred(Regression):
    """Subtracts a number that somebody keeps between batches from each target."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("centre", torch.zeros(()))

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return (self.net(rows["inputs"]).squeeze(-1) - rows["target"] + self.centre).square()


def mean_of(batch: Any) -> Tensor:
    return torch.zeros(()) if batch.rows is None else batch.rows["target"].mean()


class WritesABuffer(Centred):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.centre.data.copy_(mean_of(batch))


class WritesASparseBuffer(Centred):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("table", torch.eye(2).to_sparse())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.table = (torch.ones(2, 2) * mean_of(batch)).to_sparse()


class ReplacesABuffer(Centred):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.centre = mean_of(batch)


class WritesBeforeTheStep(Centred):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.centre += mean_of(batch)
        super().training_step(batch, batch_idx)


class WritesAfterTheStep(Centred):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.centre += mean_of(batch)


class WritesAFrozenWeight(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.offset = nn.Parameter(torch.zeros(()), requires_grad=False)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return (self.net(rows["inputs"]).squeeze(-1) - rows["target"] + self.offset).square()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.offset.data += mean_of(batch)


class WritesATrainedWeight(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        next(self.net.parameters()).data += mean_of(batch)


class KeepsAnAttribute(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = {"targets": [mean_of(batch)]}


class CentredOnTheFirstBatch(Centred):
    """As one-class methods set their centre, before any batch was trained on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.centre = mean_of(batch)


class WritesWhileTheOptimizerSteps(Centred):
    last = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last = float(mean_of(batch)) or self.last

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.centre = torch.tensor(self.last)


class EditsTheNoisedGradient(Centred):
    """As a module does that centres or scales its gradients, here by a number of private rows."""

    leak = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.leak = float(mean_of(batch)) or self.leak

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        next(self.net.parameters()).grad.add_(self.leak)


class KeepsAnArray(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = mean_of(batch).numpy()


class Bank:
    def __init__(self) -> None:
        self.rows: list[Tensor] = []


class KeepsAnObject(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.bank = Bank()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.bank.rows.append(mean_of(batch))


class WritesAtTheEndOfEpochs(Centred):
    last = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last = float(mean_of(batch)) or self.last

    def on_train_epoch_end(self) -> None:
        self.centre = torch.tensor(self.last)


ATTACKS = [
    CentredOnTheFirstBatch, WritesWhileTheOptimizerSteps, KeepsAnArray, KeepsAnObject,
    WritesABuffer, WritesASparseBuffer, ReplacesABuffer, WritesBeforeTheStep, WritesAfterTheStep, WritesAFrozenWeight,
    WritesATrainedWeight, KeepsAnAttribute, EditsTheNoisedGradient,
]  # fmt: skip


@pytest.mark.parametrize("module", ATTACKS, ids=lambda module: module.__name__)
def test_what_is_written_between_two_batches_is_refused(module: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        fit(tmp_path / "run", module(privacy=dp(tmp_path, noise_seed=1)))
    assert refusal.value.trap == "T11"


def test_the_end_of_every_epoch_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_watch.Looks, "due", lambda *_: False)
    data = Numbers(40, expected_batch_size=20, physical_batch_size=40)
    with pytest.raises(UnsupportedModelError, match="centre"):
        module = WritesAtTheEndOfEpochs(privacy=dp(tmp_path, noise_seed=1, noise_multiplier=8.0))
        fit(tmp_path / "run", module, data, save_every=99, steps=9)


@pytest.mark.parametrize("module", [WritesABuffer, KeepsAnAttribute], ids=lambda module: module.__name__)
def test_without_a_guarantee_nothing_is_refused(module: Any, tmp_path: Path) -> None:
    fit(tmp_path / "run", module(privacy=NoPrivacy()))


class KeepsTheBatch(Callback):
    """Keeps Lightning's batch, of which the loss reads a statistic."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.batch = batch


class CentredByTheBatch(Regression):
    batch: Any = None

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return (self.net(rows["inputs"]).squeeze(-1) - rows["target"] + self.batch.rows["target"].mean()).square()


def test_a_batch_that_a_hook_keeps_is_seen(tmp_path: Path) -> None:
    module = CentredByTheBatch(privacy=dp(tmp_path, noise_seed=1))
    with pytest.raises(UnsupportedModelError, match="batch") as refusal:
        fit(tmp_path / "run", module, extra=[KeepsTheBatch()])
    assert refusal.value.trap == "T11"
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
            parameter.grad.mul_(3)


@pytest.mark.parametrize("callback", [WritesWhileItSteps, TimesThree])
@pytest.mark.parametrize("units", [2, 16], ids=["several parts", "one part"])
def test_the_first_update_is_watched_however_many_batches_its_step_has(
    callback: Any, units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_watch.HookWatch, "compare", lambda *_: None)  # which may see it in the next batch
    data = Numbers(sampling="full_batch", physical_batch_size=units)
    with pytest.raises(UnsupportedModelError, match="while the optimizer stepped") as refusal:
        fit(
            tmp_path / "run",
            Centred(privacy=dp(tmp_path, noise_seed=1, noise_multiplier=8.0)),
            data,
            extra=[callback()],
            steps=1,
        )
    assert refusal.value.trap == "T11"


class StepsOnceMore(Regression):
    """Makes an update of its own after the granted one, by an optimizer that Lightning does not know."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch.rows is not None:
            own = torch.optim.SGD(self.parameters(), lr=0.1)
            self.per_row_loss(batch.rows).mean().backward()
            own.step()


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_of_an_optimizer_of_ones_own_is_refused(every: int, tmp_path: Path) -> None:
    class Now(Regression):
        """Steps Lightning's optimizer in a way that Lightning does not hear of."""

        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if batch.rows is not None and batch.step % every == every - 1:
                raw: Any = self.optimizers(use_pl_optimizer=False)
                self.per_row_loss(batch.rows).mean().backward()
                raw.step()

    with pytest.raises(ConfigurationError) as refusal:
        fit(tmp_path / "run", Now(privacy=dp(tmp_path, noise_seed=1)))
    assert refusal.value.trap == "T7"
    with pytest.raises(UnsupportedModelError) as seen:
        fit(tmp_path / "other", StepsOnceMore(privacy=dp(tmp_path, noise_seed=1)))
    assert seen.value.trap == "T11"


def test_weighting_of_ones_own_is_refused(tmp_path: Path) -> None:
    class Weighs(Regression):
        def unit_loss(self, batch: Any) -> Any:
            return super().unit_loss(batch)

    with pytest.raises(ConfigurationError, match="unit_loss") as refusal:
        fit(tmp_path / "run", Weighs(privacy=dp(tmp_path)))
    assert refusal.value.trap == "T11"


class Moments(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for kept in trainer.optimizers[0].state.values():
            kept["exp_avg"].add_(mean_of(batch))


def test_what_is_written_into_the_state_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="exp_avg") as refusal:
        fit(tmp_path / "run", Regression(privacy=dp(tmp_path, noise_seed=1)), extra=[Moments()])
    assert refusal.value.trap == "T11"


class ReadsAMetric(Regression):
    """Scales its loss by a running mean that a hook keeps up."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.mean = MeanMetric()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.update(mean_of(batch))

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) * (1 + (self.mean.mean_value / self.mean.weight.clamp(min=1e-9)).square())


class KeepsAMetric(ReadsAMetric):
    per_row_loss = Regression.per_row_loss


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


GLOBAL = MeanMetric()


class CountsGlobally(CountsInItsLoss):
    def metric(self) -> MeanMetric:
        return GLOBAL


class ReadsGlobally(CountsGlobally):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) * (1 + (GLOBAL.mean_value / GLOBAL.weight.clamp(min=1e-9)).square())


def test_a_metric_that_the_loss_keeps_up_is_refused_where_the_loss_reads_it(tmp_path: Path) -> None:
    for kind in (CountsInItsLoss, CountsGlobally):
        fit(tmp_path / kind.__name__, kind(privacy=dp(tmp_path, noise_seed=1)))
    with pytest.raises(UnsupportedModelError) as refusal:
        fit(tmp_path / "read", ReadsGlobally(privacy=dp(tmp_path, noise_seed=1)))
    assert refusal.value.trap == "T11"


def test_a_loss_that_reads_a_metric_is_refused_and_a_metric_beside_it_is_not(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        fit(tmp_path / "read", ReadsAMetric(privacy=dp(tmp_path, noise_seed=1)))
    assert refusal.value.trap == "T11"
    fit(tmp_path / "kept", KeepsAMetric(privacy=dp(tmp_path, noise_seed=1)))


class BatchMean(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.centre.fill_(float(mean_of(batch)))


def test_a_callback_is_refused_as_a_hook_of_the_module_is(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="centre"):
        fit(tmp_path / "run", Centred(privacy=dp(tmp_path, noise_seed=1)), extra=[BatchMean()])


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


def test_a_declared_teacher_trains_and_an_undeclared_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path / "declared", Teacher(privacy=dp(tmp_path, noise_seed=1)))
    monkeypatch.setattr(Teacher, "public_metrics", ())
    with pytest.raises(UnsupportedModelError, match="teacher"):
        fit(tmp_path / "undeclared", Teacher(privacy=dp(tmp_path, noise_seed=1)))


class Normalises(Regression):
    """Makes something of the noised gradient alone, and says so."""

    public_metrics = ("grad",)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def test_what_is_made_of_noised_gradients_alone_may_be_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path / "declared", Normalises(privacy=dp(tmp_path, noise_seed=1)))
    monkeypatch.setattr(Normalises, "public_metrics", ())
    with pytest.raises(UnsupportedModelError, match=r"\.grad"):
        fit(tmp_path / "undeclared", Normalises(privacy=dp(tmp_path, noise_seed=1)))


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
    fit(tmp_path / "run", Anneals(privacy=dp(tmp_path, noise_seed=1)))
