"""Where a loss may keep what it makes of rows, and who reads it. Imported by path; not a test."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections import Counter, UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import own_modules
import torch
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


def in_a_namespace(model: Any) -> tuple[Any, Any]:
    model.args = Namespace(last=0.0)
    return lambda losses: setattr(model.args, "last", float(losses.mean())), lambda: model.args.last


class Fields(dict[str, float]):
    __setattr__ = dict.__setitem__
    __getattr__ = dict.__getitem__


def in_a_dict_with_attributes(model: Any) -> tuple[Any, Any]:
    model.fields = Fields(last=0.0)
    return lambda losses: setattr(model.fields, "last", float(losses.mean())), lambda: model.fields.last


class History(list[float]):
    """A list of one's own."""


def in_a_list_of_ones_own(model: Any) -> tuple[Any, Any]:
    model.history = History([0.0])
    return lambda losses: model.history.append(float(losses.mean())), lambda: model.history


def in_a_user_dict(model: Any) -> tuple[Any, Any]:
    model.fields = UserDict(last=0.0)
    return lambda losses: model.fields.update(last=float(losses.mean())), lambda: model.fields["last"]


def in_what_a_thread_has(model: Any) -> tuple[Any, Any]:
    own = threading.local()
    own.last = 0.0
    return lambda losses: setattr(own, "last", float(losses.mean())), lambda: own.last


def in_an_array_of_objects(model: Any) -> tuple[Any, Any]:
    model.cells = np.array([0.0, None], dtype=object)
    return lambda losses: model.cells.__setitem__(0, float(losses.mean())), lambda: model.cells[0]


def beside_large_tables(model: Any) -> tuple[Any, Any]:
    model.tables = [[(f"{a} {b}", a) for a in range(90)] for b in range(90)]
    return in_a_list(model)


def in_a_name_that_the_run_has_as_well(model: Any) -> tuple[Any, Any]:
    model._losses = [0.0]
    return lambda losses: model._losses.append(float(losses.mean())), lambda: model._losses


def in_an_attribute_of_a_function(model: Any) -> tuple[Any, Any]:
    def keep(losses: Tensor) -> None:
        keep.last = float(losses.mean())  # type: ignore[attr-defined]

    keep.last = 0.0  # type: ignore[attr-defined]
    return keep, lambda: keep.last  # type: ignore[attr-defined]


def in_a_module_of_ones_own(model: Any) -> tuple[Any, Any]:
    own_modules.last = 0.0  # type: ignore[attr-defined]
    return lambda losses: setattr(own_modules, "last", float(losses.mean())), lambda: own_modules.last  # type: ignore[attr-defined]


def in_the_learning_rate(model: Any) -> tuple[Any, Any]:
    groups: list[Any] = []
    configure = model.configure_optimizers

    def optimizers() -> Any:
        model.optimizer = configure()[0][0]
        groups.extend(model.optimizer.param_groups)
        return model.optimizer

    model.configure_optimizers = optimizers
    keep = lambda losses: model.optimizer.param_groups[0].update(lr=float(losses.mean()))  # noqa: E731
    return keep, lambda: [group["lr"] for group in groups or [{"lr": 1.0}]]


def in_a_default(model: Any) -> tuple[Any, Any]:
    def keep(losses: Tensor, kept: list[float] = []) -> None:  # noqa: B006
        kept.append(float(losses.mean()))

    return keep, lambda: keep.__defaults__


def in_an_argument_of_a_partial(model: Any) -> tuple[Any, Any]:
    kept: dict[str, float] = {"last": 0.0}
    return partial(lambda kept, losses: kept.update(last=float(losses.mean())), kept), lambda: kept


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
    in_a_new_attribute, in_parts_of_one_class, in_a_list, in_a_counter, in_an_object, in_a_new_object, in_a_class,
    in_a_closure, in_a_global, in_a_metric, in_a_metric_outside, in_a_namespace, in_a_dict_with_attributes,
    in_a_list_of_ones_own, in_a_user_dict, in_what_a_thread_has, in_an_array_of_objects, beside_large_tables,
    in_a_name_that_the_run_has_as_well, in_an_attribute_of_a_function, in_a_module_of_ones_own, in_the_learning_rate,
    in_a_default, in_an_argument_of_a_partial,
]  # fmt: skip
