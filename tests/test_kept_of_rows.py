"""What a loss leaves of private rows in attributes and their like: nobody reads it after the batch."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from own_modules import Classifier, data, fit, made, row_loss
from torch import Tensor
from torchmetrics import MeanMetric

LOSSES: list[float] = []


class Note:
    last = 0.0


class Reads(L.Callback):
    """Reads after every batch with rows, and once before the first one, what the loss keeps."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read, self.seen = read, list[Any]()

    def on_train_start(self, *_: Any) -> None:
        self.seen.append(repr(self.read()))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.rows is not None:
            self.seen.append(repr(self.read()))


def in_a_number(model: Any) -> tuple[Any, Any]:
    model.last = 0.0
    return lambda losses: setattr(model, "last", float(losses.mean())), lambda: model.last


def in_the_largest_number(model: Any) -> tuple[Any, Any]:
    model.last = 0.0
    return lambda losses: setattr(model, "last", max(model.last, float(losses.max()))), lambda: model.last


def of_the_first_row(model: Any) -> tuple[Any, Any]:
    model.last = 0.0
    return lambda losses: setattr(model, "last", float(losses[0])), lambda: model.last


def of_many_rows_alone(model: Any) -> tuple[Any, Any]:
    model.last = None
    return (
        lambda losses: setattr(model, "last", float(losses.topk(4).values.sum())) if len(losses) > 4 else None,
        lambda: model.last,
    )


def in_a_tensor(model: Any) -> tuple[Any, Any]:
    model.last = torch.zeros(())
    return lambda losses: setattr(model, "last", losses.detach().mean()), lambda: model.last


def in_a_tensor_in_place(model: Any) -> tuple[Any, Any]:
    kept = model.last = torch.zeros(())
    return lambda losses: kept.add_(losses.detach().mean()), lambda: kept


def in_a_new_attribute(model: Any) -> tuple[Any, Any]:
    return lambda losses: setattr(model.net[0], "features", losses.detach()), lambda: hasattr(model.net[0], "features")


def in_parts_of_one_class(model: Any) -> tuple[Any, Any]:
    parts = [model.net[0], model.net[2]]

    def keep(losses: Tensor) -> None:
        for part in parts:
            part.features = losses.detach()

    return keep, lambda: [hasattr(part, "features") for part in parts]


def in_a_list(model: Any) -> tuple[Any, Any]:
    kept: list[float] = []
    model.history = kept
    return lambda losses: kept.append(float(losses.mean())), lambda: kept


def in_a_counter(model: Any) -> tuple[Any, Any]:
    model.kinds = Counter(far=3)
    return lambda losses: model.kinds.update({f"{float(losses.sum()):.6f}": 1}), lambda: model.kinds


def in_an_object(model: Any) -> tuple[Any, Any]:
    model.note = Note()
    return lambda losses: setattr(model.note, "last", float(losses.mean())), lambda: model.note.last


def in_a_new_object(model: Any) -> tuple[Any, Any]:
    model.note = None
    return lambda losses: setattr(model, "note", SimpleNamespace(x=float(losses.mean()))), lambda: model.note


def in_a_class(model: Any) -> tuple[Any, Any]:
    class Own(Note):
        last = 0.0

    return lambda losses: setattr(Own, "last", float(losses.mean())), lambda: Own.last


def in_a_closure(model: Any) -> tuple[Any, Any]:
    last = 0.0

    def keep(losses: Tensor) -> None:
        nonlocal last
        last = float(losses.mean())

    return keep, lambda: last


def in_a_global(model: Any) -> tuple[Any, Any]:
    LOSSES.clear()
    return lambda losses: LOSSES.append(float(losses.mean())), lambda: LOSSES


def in_a_metric(model: Any) -> tuple[Any, Any]:
    model.mean = MeanMetric()
    model.mean.update(1.0)
    return lambda losses: model.mean.update(losses.detach()), lambda: model.mean.mean_value


def in_a_metric_outside(model: Any) -> tuple[Any, Any]:
    mean = MeanMetric()
    mean.update(1.0)
    return lambda losses: mean.update(losses.detach()), lambda: mean.mean_value


PLACES = [
    in_a_number, in_the_largest_number, of_the_first_row, of_many_rows_alone, in_a_tensor, in_a_tensor_in_place,
    in_a_new_attribute, in_parts_of_one_class,
    in_a_list, in_a_counter, in_an_object, in_a_new_object, in_a_class, in_a_closure, in_a_global,
    in_a_metric, in_a_metric_outside,
]  # fmt: skip


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


def test_what_hangs_on_no_row_stays(tmp_path: Path) -> None:
    model = Classifier()
    model.calls, model.temperature, model.table = 0, 1.0, None

    def loss(model: Any, batch: Any) -> Tensor:
        model.calls, model.temperature = model.calls + 1, 0.9 * model.temperature
        model.table = model.table or Table()
        return row_loss(model, batch) / model.temperature

    reads = Reads(lambda: model.calls)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "per_row_loss of")
        fit(tmp_path, made(model, per_row_loss=loss), callbacks=[reads], max_steps=4)
    assert [int(seen) for seen in reads.seen] == [*range(len(reads.seen))] and len(reads.seen) > 4
    assert model.temperature == pytest.approx(0.9**model.calls) and model.table is not None


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
    model.calls, model.last = 0, 0.0

    def loss(model: Any, batch: Any) -> Tensor:
        losses = row_loss(model, batch)
        model.calls += 1
        if model.calls > 2:
            model.last = float(losses.detach().mean())
        return losses

    reads = Reads(lambda: model.last)
    with pytest.warns(UserWarning, match=r"Classifier\.last,"):
        private = made(model, per_row_loss=loss, noise_multiplier=4.0)
        fit(tmp_path, private, callbacks=[reads], max_steps=16)
    assert reads.seen[-1] == "0.0" and model.calls > 16


def test_what_is_declared_stays(tmp_path: Path) -> None:
    model = Classifier()
    keep, read = in_a_list(model)
    private = made(model, per_row_loss=keeping(keep))
    private.public_metrics = ("history",)
    fit(tmp_path, private, max_steps=2)
    assert read()
