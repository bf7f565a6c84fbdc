"""What a loss leaves of private rows in attributes and their like: nobody reads it after the batch."""

from __future__ import annotations

import threading
import warnings
from argparse import Namespace
from array import array
from collections import Counter, UserDict
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import own_modules
import pytest
import torch
from omegaconf import OmegaConf
from own_modules import Classifier, data, fit, made, row_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lit_dpret import DPSGD, OptimizerSpec, PrivacyAccountant, PrivateModule, PublicValidation
from lit_dpret.errors import ConfigurationError, UnsupportedModelError


class Reads(L.Callback):
    """Reads after every batch with rows, and once before the first one, what the loss keeps."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read, self.seen = read, list[Any]()

    def on_train_start(self, *_: Any) -> None:
        self.seen.append(repr(self.read()))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.rows is not None:
            self.seen.append(repr(self.read()))


def keeping(*keeps: Any) -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        losses = row_loss(model, batch)
        for keep in keeps:
            keep(losses)
        return losses

    return loss


# -- where a loss may keep what it makes of rows: each place gives who writes there, and who reads it --------

Place = tuple[Callable[[Tensor], Any], Callable[[], Any]]
LOSSES: list[float] = []


class Note:
    last = 0.0


class Fields(dict[str, float]):
    __setattr__ = dict.__setitem__
    __getattr__ = dict.__getitem__


class History(list[float]):
    """A list of the user's own class."""


def mean(losses: Tensor) -> float:
    return float(losses.mean())


def held(model: Any, name: str, value: Any) -> Any:
    setattr(model, name, value)
    return value


def attribute(owner: Any, name: str, start: Any = 0.0, of: Callable[[Tensor], Any] = mean) -> Place:
    setattr(owner, name, start)
    return lambda losses: setattr(owner, name, of(losses)), lambda: getattr(owner, name)


def appended(kept: Any) -> Place:
    return lambda losses: kept.append(mean(losses)), lambda: kept


def of_many_rows_alone(model: Any) -> Place:
    model.largest_four = None

    def keep(losses: Tensor) -> None:
        if len(losses) > 4:
            model.largest_four = float(losses.topk(4).values.sum())

    return keep, lambda: model.largest_four


def in_a_tensor_in_place(model: Any) -> Place:
    kept = model.total = torch.zeros(())
    return lambda losses: kept.add_(losses.detach().mean()), lambda: kept


def in_parts_of_one_class(model: Any) -> Place:
    parts = [model.net[0], model.net[2]]

    def keep(losses: Tensor) -> None:
        for part in parts:
            part.features = losses.detach()

    return keep, lambda: [hasattr(part, "features") for part in parts]


def in_a_counter(model: Any) -> Place:
    model.kinds = Counter(far=3)
    return lambda losses: model.kinds.update({f"{float(losses.sum()):.6f}": 1}), lambda: model.kinds


def in_a_user_dict(model: Any) -> Place:
    model.user_dict = UserDict(last=0.0)
    return lambda losses: model.user_dict.update(last=mean(losses)), lambda: model.user_dict["last"]


def in_an_array_of_objects(model: Any) -> Place:
    model.cells = np.array([0.0, None], dtype=object)
    return lambda losses: model.cells.__setitem__(0, mean(losses)), lambda: model.cells[0]


def in_an_object_that_is_made_once(model: Any) -> Place:
    return attribute(model, "scale", None, lambda losses: model.scale or SimpleNamespace(first=mean(losses)))


def beside_large_tables(model: Any) -> Place:
    model.tables = [[(f"{a} {b}", a) for a in range(90)] for b in range(90)]
    return appended(held(model, "history", []))


def in_the_learning_rate(model: Any) -> Place:
    groups: list[Any] = []
    configure = model.configure_optimizers

    def optimizers() -> Any:
        model.optimizer = configure()[0][0]
        groups.extend(model.optimizer.param_groups)
        return model.optimizer

    model.configure_optimizers = optimizers
    keep = lambda losses: model.optimizer.param_groups[0].update(lr=mean(losses))  # noqa: E731
    return keep, lambda: [group["lr"] for group in groups or [{"lr": 1.0}]]


def in_an_attribute_of_a_function(model: Any) -> Place:
    def keep(losses: Tensor) -> None:
        keep.last = mean(losses)  # type: ignore[attr-defined]

    keep.last = 0.0  # type: ignore[attr-defined]
    return keep, lambda: keep.last  # type: ignore[attr-defined]


def in_a_default(model: Any) -> Place:
    def keep(losses: Tensor, kept: list[float] = []) -> None:  # noqa: B006
        kept.append(mean(losses))

    return keep, lambda: keep.__defaults__


def in_an_argument_of_a_partial(model: Any) -> Place:
    kept: dict[str, float] = {"last": 0.0}
    return partial(lambda kept, losses: kept.update(last=mean(losses)), kept), lambda: kept


def in_a_closure(model: Any) -> Place:
    last = 0.0

    def keep(losses: Tensor) -> None:
        nonlocal last
        last = mean(losses)

    return keep, lambda: last


def in_a_global(model: Any) -> Place:
    LOSSES.clear()
    return lambda losses: LOSSES.append(mean(losses)), lambda: LOSSES


def in_a_metric(metric: MeanMetric) -> Place:
    metric.update(1.0)
    return lambda losses: metric.update(losses.detach()), lambda: metric.mean_value


def in_a_hook_of_the_backward_pass(model: Any) -> Place:
    model.steepest = 0.0

    def note(gradient: Tensor) -> None:
        model.steepest = max(model.steepest, float(gradient.abs().max()))

    return lambda losses: losses.register_hook(note), lambda: model.steepest


PLACES: dict[str, Callable[[Any], Place]] = {
    "a number": lambda model: attribute(model, "last"),
    "the largest number": lambda m: attribute(m, "largest", of=lambda losses: max(m.largest, float(losses.max()))),
    "a number of the first row": lambda model: attribute(model, "first", of=lambda losses: float(losses[0])),
    "a number of many rows alone": of_many_rows_alone,
    "a tensor": lambda model: attribute(model, "tensor", torch.zeros(()), lambda losses: losses.detach().mean()),
    "a tensor in place": in_a_tensor_in_place,
    "parts of one class": in_parts_of_one_class,
    "a list": lambda model: appended(held(model, "losses", [])),
    "a counter": in_a_counter,
    "an object": lambda model: attribute(held(model, "note", Note()), "last"),
    "a new object": lambda m: attribute(m, "newest", None, lambda losses: SimpleNamespace(x=mean(losses))),
    "an object that is made once": in_an_object_that_is_made_once,
    "a class": lambda model: attribute(type("Own", (Note,), {}), "last"),
    "a closure": in_a_closure,
    "a global": in_a_global,
    "a metric": lambda model: in_a_metric(held(model, "mean", MeanMetric())),
    "a metric outside": lambda model: in_a_metric(MeanMetric()),
    "a namespace": lambda model: attribute(held(model, "args", Namespace()), "last"),
    "a dict with attributes": lambda model: attribute(held(model, "fields", Fields()), "last"),
    "a list of the user's own class": lambda model: appended(held(model, "rates", History([0.0]))),
    "a user dict": in_a_user_dict,
    "what a thread has": lambda model: attribute(threading.local(), "last"),
    "an array of objects": in_an_array_of_objects,
    "a name that the run has as well": lambda model: appended(held(model, "_losses", [0.0])),
    "an attribute of a function": in_an_attribute_of_a_function,
    "a module of the user's own": lambda model: attribute(own_modules, "last"),
    "a default": in_a_default,
    "an argument of a partial": in_an_argument_of_a_partial,
    "a hook of the backward pass": in_a_hook_of_the_backward_pass,
}
PLACES_APART = {"beside large tables": beside_large_tables, "the learning rate": in_the_learning_rate}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What callbacks read at each place, of two runs whose losses write to all of theirs."""
    found: dict[str, list[Any]] = {}
    for places in (PLACES, PLACES_APART):
        model = Classifier()
        both = {name: place(model) for name, place in places.items()}
        reads = {name: Reads(read) for name, (_, read) in both.items()}
        private = made(model, per_row_loss=keeping(*(keep for keep, _ in both.values())))
        with pytest.warns(UserWarning, match="private rows"):
            fit(tmp_path_factory.mktemp("run"), private, callbacks=[*reads.values()], max_steps=4)
        found |= {name: each.seen for name, each in reads.items()}
    return found


@pytest.mark.costly
@pytest.mark.parametrize("place", [*PLACES, *PLACES_APART])
def test_no_callback_reads_what_the_loss_keeps_of_rows_in(place: str, seen: dict[str, list[Any]]) -> None:
    assert len(seen[place]) > 4 and len({*seen[place]}) == 1, seen[place]


class Scheduled(Classifier):
    """With a learning rate that follows from what ``read`` gives."""

    last = 0.0

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.read = read

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + self.read(self)))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.costly
def test_no_schedule_reads_what_the_loss_keeps_of_rows(tmp_path: Path) -> None:
    model = Scheduled(lambda model: model.last)
    keep, _ = attribute(model, "last")
    with pytest.warns(UserWarning, match="Scheduled.last"):
        trainer = fit(tmp_path, made(model, per_row_loss=keeping(keep)))
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
    with pytest.raises(UnsupportedModelError, match="learning rates"):
        fit(tmp_path, made(Scheduled(lambda _: read()), per_row_loss=keeping(lambda losses: write(mean(losses)))))


def test_what_cannot_be_put_back_is_refused(tmp_path: Path) -> None:
    model = Classifier()
    model.config = OmegaConf.create({"last": 0.0})
    with pytest.raises(UnsupportedModelError, match="config, which cannot be put back"):
        fit(tmp_path, made(model, per_row_loss=keeping(lambda losses: model.config.update(last=mean(losses)))))


class Warmup:
    """A rule of a schedule that counts by itself."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return 1 / self.asked


def counting_rules() -> list[Any]:
    """One rule for each parameter of a `Classifier`."""
    rule, asked = Warmup(), 0

    def counts(step: int) -> float:
        nonlocal asked
        asked += 1
        return 1 / asked

    return [rule, Warmup().__call__, counts, partial(Warmup.__call__, Warmup())]


class Helped(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: Any) -> None:
        self.helper = Warmup()
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [self.helper(0) for _ in self.optimizer.param_groups]


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["rules that count", "own schedule"])
def test_a_schedule_that_is_stepped_on_trial_goes_on_as_before(kind: str, tmp_path: Path) -> None:
    class Counting(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD([{"params": [each]} for each in self.parameters()], lr=1.0)
            own = kind == "own schedule"
            first = Helped(optimizer) if own else torch.optim.lr_scheduler.LambdaLR(optimizer, counting_rules())
            schedules = [first, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [4])
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def rates(optimizer: Any) -> list[float]:
        return [group["lr"] for group in optimizer.param_groups]

    expected, found = [], {}
    (optimizer,), (alone,) = Counting().configure_optimizers()
    for _ in range(6):
        expected.append(rates(optimizer))
        optimizer.step()
        alone["scheduler"].step()

    class Notes(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            found[trainer.global_step] = rates(trainer.optimizers[0])

    fit(tmp_path, made(Counting()), callbacks=[Notes()], max_steps=6)
    assert [found[step] for step in range(6)] == [pytest.approx(each) for each in expected]


def test_a_schedule_that_a_loss_moves_itself_stands_still(tmp_path: Path) -> None:
    class Plateau(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.0)
            return optimizer

    model = Plateau()
    private = made(model, per_row_loss=keeping(lambda losses: model.plateau.step(mean(losses))))
    with pytest.warns(UserWarning, match="ReduceLROnPlateau"):
        trainer = fit(tmp_path, private)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1


@pytest.mark.costly
def test_what_hooks_of_layers_keep_in_their_closures_is_put_back(tmp_path: Path) -> None:
    model, kept = Classifier(), {"forward": 0.0, "forward_pre": 0.0, "full_backward": 0.0}
    for kind in kept:

        def hook(*given: Any, kind: str = kind) -> None:
            kept[kind] = max(float(each.detach().abs().max()) for each in given[-1] if each is not None)

        getattr(model.net[2], f"register_{kind}_hook")(hook)
    reads = Reads(lambda: {*kept.values()})
    with pytest.warns(UserWarning, match=r"hook\.kept"):
        fit(tmp_path, made(model, engine="loop"), callbacks=[reads], max_steps=3)
    assert {*reads.seen} == {"{0.0}"}


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


@pytest.mark.costly
def test_the_first_batches_of_one_unit_keep_nothing_before_they_are_compared(tmp_path: Path) -> None:
    model = Classifier()
    keep, read = appended(held(model, "history", []))
    reads = Reads(read)
    one = data(expected_batch_size=1, physical_batch_size=1)
    with pytest.warns(UserWarning, match="history"):
        fit(tmp_path, made(model, per_row_loss=keeping(keep)), one, callbacks=[reads], max_steps=8)
    assert {*reads.seen} == {"[]"}


@pytest.mark.costly
def test_what_is_kept_from_a_later_step_on_is_put_back_but_for_a_view_of_a_weight_beside_it(tmp_path: Path) -> None:
    model = Classifier()
    model.last = 0.0
    model.shown = {"weight": model.net[0].weight.detach(), "loss": 0.0}
    before = model.net[0].weight.detach().clone()

    def loss(model: Any, batch: Any) -> Tensor:
        losses = row_loss(model, batch)
        if private.trainer.global_step > 2:
            model.last = model.shown["loss"] = mean(losses)
        return losses

    reads = Reads(lambda: (model.last, model.shown["loss"]))
    private = made(model, per_row_loss=loss, noise_multiplier=4.0)
    with pytest.warns(UserWarning, match=r"Classifier\.last, Classifier\.shown "):
        fit(tmp_path, private, callbacks=[reads], max_steps=16)
    assert reads.seen[-1] == "(0.0, 0.0)"
    assert not torch.equal(before, model.net[0].weight)


def test_what_is_declared_stays(tmp_path: Path) -> None:
    class Declares(Classifier):
        public_metrics = ("history",)

    model = Declares()
    keep, read = appended(held(model, "history", []))
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


def test_a_name_that_a_public_validation_measures_declares_nothing_else_of_that_name(tmp_path: Path) -> None:
    class Logs(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            module.log("val/loss", 1.0)

    public = DataLoader(TensorDataset(torch.ones(6, 4), torch.ones(6).long()), 3)
    model, validates = Classifier(), PublicValidation(public, metrics=["val/loss"])
    setattr(model, "val/loss", 0.0)
    loss = keeping(lambda losses: setattr(model, "val/loss", mean(losses)))
    with pytest.warns(UserWarning, match="val/loss"):
        fit(tmp_path / "kept", made(model, per_row_loss=loss), callbacks=[validates], max_steps=2)
    with pytest.raises(ConfigurationError, match="val/loss"):
        fit(tmp_path / "logged", made(Classifier()), callbacks=[validates, Logs()], max_steps=2)


def test_a_table_of_pandas_that_a_loss_reads_is_nothing_that_it_keeps(tmp_path: Path) -> None:
    model = Classifier()
    model.table = pytest.importorskip("pandas").DataFrame({"weight": [1.0, 2.0, 3.0]})

    def loss(model: Any, batch: Any) -> Tensor:
        weights = model.table["weight"]
        return row_loss(model, batch) * float(weights.loc[1] * weights.iloc[1] * weights[1])

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "per_row_loss of")
        fit(tmp_path, made(model, per_row_loss=loss), max_steps=2)


def test_what_a_callback_keeps_beside_it_stays(tmp_path: Path) -> None:
    model = Classifier()
    model.state = {"batches": 0, "last": 0.0}

    class Counts(L.Callback):
        batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1
            model.state["batches"] += 1

    counts = Counts()
    loss = keeping(lambda losses: model.state.update(last=mean(losses)))
    with pytest.warns(UserWarning, match="state"):
        fit(tmp_path, made(model, per_row_loss=loss), callbacks=[counts], max_steps=4)
    assert model.state == {"batches": counts.batches, "last": 0.0} and counts.batches > 1


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
