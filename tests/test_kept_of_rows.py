"""What a loss leaves of private rows in attributes and their like: nobody reads it after the batch."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from keeping_losses import PLACES, Reads, in_a_list
from omegaconf import OmegaConf
from own_modules import Classifier, data, fit, made, row_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dpret import DPSGD, OptimizerSpec, PrivacyAccountant, PrivateModule, PublicValidation
from lit_dpret.errors import ConfigurationError, UnsupportedModelError


def keeping(keep: Any) -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        losses = row_loss(model, batch)
        keep(losses)
        return losses

    return loss


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_no_callback_reads_what_the_loss_keeps_of_rows(place: Any, tmp_path: Path) -> None:
    model = Classifier()
    keep, read = place(model)
    reads = Reads(read)
    with pytest.warns(UserWarning, match="private rows"):
        fit(tmp_path, made(model, per_row_loss=keeping(keep)), callbacks=[reads], max_steps=4)
    assert len(reads.seen) > 4 and len({*reads.seen}) == 1, reads.seen


def test_no_schedule_reads_what_the_loss_keeps_of_rows(tmp_path: Path) -> None:
    class Scheduled(Classifier):
        last = 0.0

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + self.last))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    model = Scheduled()
    with pytest.warns(UserWarning, match="Scheduled.last"):
        trainer = fit(tmp_path, made(model, per_row_loss=keeping(lambda x: setattr(model, "last", float(x.mean())))))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1


def opaque_holders() -> dict[str, tuple[Callable[[float], Any], Callable[[], float]]]:
    cells, variable = array("d", [0.0]), ContextVar("last", default=0.0)

    def generator() -> Any:
        value = 0.0
        while True:
            value = (yield value) or value

    running = generator()
    next(running)
    return {
        "array": (lambda value: cells.__setitem__(0, value), lambda: cells[0]),
        "context": (variable.set, variable.get),
        "generator": (running.send, lambda: next(running)),
    }


@pytest.mark.parametrize("holder", ["array", "context", "generator"])
def test_a_schedule_that_reads_it_where_nothing_can_be_put_back_is_refused(holder: str, tmp_path: Path) -> None:
    write, read = opaque_holders()[holder]

    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + read()))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    with pytest.raises(UnsupportedModelError, match="learning rates"):
        fit(tmp_path, made(Scheduled(), per_row_loss=keeping(lambda losses: write(float(losses.mean())))))


def test_what_cannot_be_put_back_is_refused(tmp_path: Path) -> None:
    model = Classifier()
    model.config = OmegaConf.create({"last": 0.0})
    with pytest.raises(UnsupportedModelError, match="config, which cannot be put back"):
        fit(tmp_path, made(model, per_row_loss=keeping(lambda losses: model.config.update(last=float(losses.mean())))))


class Warmup:
    """A rule of a schedule that counts by itself."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return 1 / self.asked


def counting_rule(kind: str) -> Any:
    rule, asked = Warmup(), 0

    def counts(step: int) -> float:
        nonlocal asked
        asked += 1
        return 1 / asked

    return {"object": rule, "method": rule.__call__, "closure": counts, "partial": partial(Warmup.__call__, rule)}[kind]


class Helped(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: Any) -> None:
        self.helper = Warmup()
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [self.helper(0) for _ in self.optimizer.param_groups]


@pytest.mark.parametrize("kind", ["object", "method", "closure", "partial", "own schedule"])
def test_a_schedule_that_is_stepped_on_trial_goes_on_as_before(kind: str, tmp_path: Path) -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            own = kind == "own schedule"
            first = Helped(optimizer) if own else torch.optim.lr_scheduler.LambdaLR(optimizer, counting_rule(kind))
            schedules = [first,
                         torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]  # fmt: skip
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [4])
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    rates: list[float] = []
    alone = Scheduled().configure_optimizers()
    for _ in range(6):
        rates.append(alone[0][0].param_groups[0]["lr"])
        alone[0][0].step()
        alone[1][0]["scheduler"].step()
    model, found = Scheduled(), list[float]()
    reads = Reads(lambda: model.trainer.optimizers[0].param_groups[0]["lr"])
    reads.on_train_batch_start = lambda trainer, *_: found.append(  # type: ignore[method-assign]
        (trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"])
    )
    fit(tmp_path, made(model), callbacks=[reads], max_steps=6)
    assert [dict(found)[step] for step in range(6)] == pytest.approx(rates)


def test_a_schedule_that_a_loss_moves_itself_stands_still(tmp_path: Path) -> None:
    class Plateau(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.0)
            return optimizer

    model = Plateau()
    private = made(model, per_row_loss=keeping(lambda losses: model.plateau.step(float(losses.mean()))))
    with pytest.warns(UserWarning, match="ReduceLROnPlateau"):
        trainer = fit(tmp_path, private)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1


def test_what_a_hook_of_the_backward_pass_keeps_of_rows_is_put_back(tmp_path: Path) -> None:
    model = Classifier()
    model.steepest = 0.0

    def note(gradient: Tensor) -> None:
        model.steepest = max(model.steepest, float(gradient.abs().max()))

    def loss(model: Any, batch: Any) -> Tensor:
        losses = row_loss(model, batch)
        losses.register_hook(note)
        return losses

    reads = Reads(lambda: model.steepest)
    with pytest.warns(UserWarning, match="steepest"):
        fit(tmp_path, made(model, per_row_loss=loss), callbacks=[reads], max_steps=3)
    assert {*reads.seen} == {"0.0"}


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_what_a_hook_of_a_layer_keeps_in_its_closure_is_put_back(kind: str, tmp_path: Path) -> None:
    model, kept = Classifier(), {"last": 0.0}

    def hook(*given: Any) -> None:
        kept["last"] = max(float(each.detach().abs().max()) for each in given[-1] if each is not None)

    getattr(model.net[2], f"register_{kind}_hook")(hook)
    reads = Reads(lambda: kept)
    with pytest.warns(UserWarning, match=r"hook\.kept"):
        fit(tmp_path, made(model, engine="loop"), callbacks=[reads], max_steps=3)
    assert {*reads.seen} == {"{'last': 0.0}"}


class Scale:
    """Fitted at its first use."""

    def __init__(self, losses: Tensor) -> None:
        self.first = float(losses.mean())


def test_an_object_that_is_made_of_the_first_rows_and_read_by_no_loss_is_put_back(tmp_path: Path) -> None:
    model = Classifier()
    model.scale = None

    def keep(losses: Tensor) -> None:
        if model.scale is None:
            model.scale = Scale(losses)

    reads = Reads(lambda: model.scale)
    with pytest.warns(UserWarning, match="scale"):
        fit(tmp_path, made(model, per_row_loss=keeping(keep)), callbacks=[reads], max_steps=3)
    assert {*reads.seen} == {"None"}


class Table:
    """Made at its first use, of nothing that is in the rows."""

    made = 0

    def __init__(self) -> None:
        Table.made += 1
        self.places = torch.arange(4)


def test_what_is_made_once_and_hangs_on_no_row_stays(tmp_path: Path) -> None:
    model = Classifier()
    model.table, model.ready = None, False

    def loss(model: Any, batch: Any) -> Tensor:
        model.table, model.ready = model.table or Table(), True
        return row_loss(model, batch)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "per_row_loss of")
        fit(tmp_path, made(model, per_row_loss=loss), max_steps=4)
    assert model.table is not None and model.ready


@pytest.mark.parametrize("engine", ["ghost", "loop"])
def test_a_count_of_calls_is_put_back_since_it_tells_how_many_units_were_drawn(engine: Any, tmp_path: Path) -> None:
    model = Classifier()
    model.calls = 0

    def loss(model: Any, batch: Any) -> Tensor:
        model.calls += 1
        return row_loss(model, batch)

    with pytest.warns(UserWarning, match=r"Classifier\.calls.*global_step"):
        fit(tmp_path, made(model, per_row_loss=loss, engine=engine), max_steps=2)
    assert model.calls == 0


def test_a_loss_that_hangs_on_how_often_it_was_computed_is_refused(tmp_path: Path) -> None:
    model = Classifier()
    model.stats = {"step": 0, "loss": 0.0}

    def loss(model: Any, batch: Any) -> Tensor:
        model.stats["step"] += 1
        losses = row_loss(model, batch) * 0.9 ** model.stats["step"]
        model.stats["loss"] = float(losses.detach().mean())
        return losses

    with pytest.raises(UnsupportedModelError, match="global_step"):
        fit(tmp_path, made(model, per_row_loss=loss))


def test_the_first_batches_of_one_unit_keep_nothing_before_they_are_compared(tmp_path: Path) -> None:
    model = Classifier()
    keep, read = in_a_list(model)
    reads = Reads(read)
    one = data(expected_batch_size=1, physical_batch_size=1)
    with pytest.warns(UserWarning, match="history"):
        fit(tmp_path, made(model, per_row_loss=keeping(keep)), one, callbacks=[reads], max_steps=8)
    assert {*reads.seen} == {"[]"}


def test_what_is_kept_from_a_later_step_on_is_as_before_the_first_batch_once_it_was_seen(tmp_path: Path) -> None:
    model = Classifier()
    model.last = 0.0

    def loss(model: Any, batch: Any) -> Tensor:
        losses = row_loss(model, batch)
        if private.trainer.global_step > 2:
            model.last = float(losses.detach().mean())
        return losses

    reads = Reads(lambda: model.last)
    private = made(model, per_row_loss=loss, noise_multiplier=4.0)
    with pytest.warns(UserWarning, match=r"Classifier\.last "):
        fit(tmp_path, private, callbacks=[reads], max_steps=16)
    assert reads.seen[-1] == "0.0"


def test_what_is_declared_stays(tmp_path: Path) -> None:
    class Declares(Classifier):
        public_metrics = ("history",)

    keep, read = in_a_list(model := Declares())
    fit(tmp_path, made(model, per_row_loss=keeping(keep)), max_steps=2)
    assert read()


class LengthsOfTheirOwn(PrivateModule):
    """Keeps the longest text that it has seen, padded with the others, so that predictions are padded alike."""

    def __init__(self) -> None:
        super().__init__(
            privacy=DPSGD(eps=3.0, noise_multiplier=1.0, unit="record"), optimizer=OptimizerSpec(name="sgd", lr=0.1)
        )
        self.lookup = nn.Embedding(5, 2)
        self.longest, self.total, self.summed = 0, 0, 0.0

    def collate_rows(self, found: list[Any]) -> Any:
        texts = [torch.ones(3 + int(y), dtype=torch.long) for _, y in found]
        return {"ids": nn.utils.rnn.pad_sequence(texts, batch_first=True)}

    def per_row_loss(self, batch: Any) -> Tensor:
        self.longest = max(self.longest, batch["ids"].shape[1])
        self.total += batch["ids"].shape[1]
        losses = (self.lookup(batch["ids"]).sum(2) * (batch["ids"] > 0)).sum(1)
        return losses

    def note_loss(self, total: float | Tensor) -> None:
        super().note_loss(total)
        self.summed = float(total)


def test_what_own_methods_keep_of_a_batch_as_it_was_trained_on_is_put_back(tmp_path: Path) -> None:
    module = LengthsOfTheirOwn()
    reads = Reads(lambda: (module.longest, module.total, module.summed))
    with pytest.warns(UserWarning, match="longest.*summed.*total"):
        fit(tmp_path, module, callbacks=[PrivacyAccountant(), reads], max_steps=3)
    assert {*reads.seen} == {"(0, 0, 0.0)"}


def test_a_view_of_a_weight_beside_what_is_kept_from_a_later_step_on_is_not_put_back(tmp_path: Path) -> None:
    model = Classifier()
    model.shown = {"weight": model.net[0].weight.detach(), "loss": 0.0}
    before = model.net[0].weight.detach().clone()

    def loss(model: Any, batch: Any) -> Tensor:
        losses = row_loss(model, batch)
        if private.trainer.global_step > 2:
            model.shown["loss"] = float(losses.detach().mean())
        return losses

    private = made(model, per_row_loss=loss, noise_multiplier=4.0)
    with pytest.warns(UserWarning, match="shown"):
        fit(tmp_path, private, max_steps=16)
    assert not torch.equal(before, model.net[0].weight) and model.shown["loss"] == 0.0


def test_a_name_that_a_public_validation_measures_declares_nothing_else_of_that_name(tmp_path: Path) -> None:
    class Logs(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            module.log("val/loss", 1.0)

    public = DataLoader(TensorDataset(torch.ones(6, 4), torch.ones(6).long()), 3)
    model, validates = Classifier(), PublicValidation(public, metrics=["val/loss"])
    setattr(model, "val/loss", 0.0)
    loss = keeping(lambda losses: setattr(model, "val/loss", float(losses.mean())))
    with pytest.warns(UserWarning, match="val/loss"):
        fit(tmp_path / "kept", made(model, per_row_loss=loss), callbacks=[validates], max_steps=2)
    with pytest.raises(ConfigurationError, match="val/loss"):
        fit(tmp_path / "logged", made(Classifier()), callbacks=[validates, Logs()], max_steps=2)


@pytest.mark.parametrize("read", ["loc", "iloc", "column"])
def test_a_table_of_pandas_that_a_loss_reads_is_nothing_that_it_keeps(read: str, tmp_path: Path) -> None:
    table = pytest.importorskip("pandas").DataFrame({"weight": [1.0, 2.0, 3.0]})
    model = Classifier()
    model.table = table

    def loss(model: Any, batch: Any) -> Tensor:
        cells = model.table["weight"] if read == "column" else getattr(model.table["weight"], read)
        return row_loss(model, batch) * float(cells[1])

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "per_row_loss of")
        fit(tmp_path, made(model, per_row_loss=loss), max_steps=2)


def test_what_a_callback_keeps_beside_it_stays(tmp_path: Path) -> None:
    model = Classifier()
    model.state = {"stage": 0, "last": 0.0}

    class Stages(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            model.state["stage"] = trainer.global_step

    loss = keeping(lambda losses: model.state.update(last=float(losses.mean())))
    with pytest.warns(UserWarning, match="state"):
        fit(tmp_path, made(model, per_row_loss=loss), callbacks=[Stages()], max_steps=4)
    assert model.state == {"stage": 4, "last": 0.0}


class Slow(torch.optim.SGD):
    """An own optimizer with a state of its own."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["slow"] = weight.detach().clone()


def test_an_own_optimizer_may_be_an_attribute_of_the_module(tmp_path: Path) -> None:
    class Holds(Classifier):
        def configure_optimizers(self) -> Any:
            self.optimizer = Slow(self.parameters(), lr=0.1)
            return self.optimizer

    fit(tmp_path, made(Holds()), max_steps=4)
    assert (tmp_path / "model" / "weights.pt").exists()
