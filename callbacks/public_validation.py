"""Validation within a private run by a module's own ``validation_step``, on public data.

Lightning's validation loop is refused in a private run, since nothing says whose rows it reads. A metric of public rows
costs nothing: this callback runs the step, and the hooks around it, on a loader that is declared public. State that the
loss keeps of private rows, as in a metric that both steps update, is reset first (`CouplingCheck`).
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from torchmetrics import Metric

from lit_dpret.callbacks.averages import averaged
from lit_dpret.callbacks.log_gate import tell
from lit_dpret.callbacks.planning import accountant_of, ledger_of
from lit_dpret.callbacks.shared_files import refuse_shared_files
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.content import digest_of_row, is_number, rows_of_batch
from lit_dpret.privacy.ledger.run_ledger import DECLARED_EVENT
from lit_dpret.privacy.user_generators import kept_generators, seed_everywhere
from lit_dpret.settings import require_whole

#: The hooks that Lightning calls before and after the steps of a validation.
_BEFORE, _AFTER = ("on_validation_start", "on_validation_epoch_start"), ("on_validation_epoch_end", "on_validation_end")


class PublicValidation(Callback):
    """Run the ``validation_step`` of the module in `make_private` on public data, every few steps.

    Guarantees:
        - Every logged name is in ``metrics``, which declares it to be of public rows; the card says so.
        - Rows of the training data set are refused if their content is found (`count_equal_rows`), including held-out
          rows and rows that another object returns. The card states what was not compared.
        - Nothing is drawn from any random stream, so the run is the same with and without validation.
        - Everything is tried once before the first step. The result, and what the module kept of it, are discarded.
        - An `EarlyStopping` that monitors one of the metrics decides after each validation.

    Args:
        dataloader: Batches of public rows, as ``validation_step`` takes them. Every process reads all of them.
        metrics: The names that the module logs by ``self.log`` or ``self.log_dict``: numbers, which are averaged over
            rows, or torchmetrics metrics and collections.
        every_n_steps: Validate each time this many logical steps are done, and after the last one.
        equal_rows: How many of the rows may equal a training row, as short public texts do by coincidence; the card
            states it.

    Raises:
        ConfigurationError: A setting is out of range, or the module logs other names.
    """

    #: No other code may declare one of these names to log a number, or to keep one in an attribute or checkpoint.
    tells_itself = True

    def __init__(
        self, dataloader: Iterable[Any], *, metrics: Sequence[str], every_n_steps: int = 100, equal_rows: int = 0
    ) -> None:
        require_whole("PublicValidation", {"every_n_steps": every_n_steps}, 1)
        require_whole("PublicValidation", {"equal_rows": equal_rows}, 0)
        self.dataloader, self.every_n_steps, self.equal_rows = dataloader, every_n_steps, equal_rows
        self._compared = False
        self.public_metrics = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        if not self.public_metrics:
            raise ConfigurationError("PublicValidation needs metrics: the names that validation_step logs.")
        self.last: dict[str, float] = {}

    def refuse_undeclared(self, module: Any, data: Any) -> None:
        inner = getattr(module, "module", None)
        own = inspect.getattr_static(type(inner), "validation_step", None)
        if not isinstance(inner, L.LightningModule) or own is L.LightningModule.validation_step:
            raise ConfigurationError(
                f"PublicValidation runs the validation_step of a LightningModule in make_private, and "
                f"{type(module if inner is None else inner).__name__} has none."
            )
        trained = getattr(data, "dataset", None)
        if trained is not None and _whole(getattr(self.dataloader, "dataset", None)) is _whole(trained):
            raise ConfigurationError(
                "PublicValidation reads the training data set, whose rows are private, including held-out ones. Give "
                "it public rows, or validate after the run.",
                trap="T25",
            )

    def refuse_protected(self, module: Any, data: Any) -> None:
        """Refuse rows whose content equals that of training rows, whichever object returns them."""
        found, self._compared = count_equal_rows(self.dataloader, data)
        rows: Any = getattr(self.dataloader, "dataset", None)
        if hasattr(rows, "__len__"):
            with kept_generators():
                refuse_shared_files(
                    self.dataloader, rows.__getitem__, len(rows), whose="The data set of PublicValidation",
                    knob="its DataLoader",
                )  # fmt: skip
        if found > self.equal_rows:
            raise ConfigurationError(
                f"PublicValidation reads {found} rows whose content equals that of rows in the training data set, "
                "which are private, including held-out ones. Give it public rows, or validate after the run; if they "
                f"are equal by coincidence, declare PublicValidation(..., equal_rows={found}), which the card states.",
                trap="T25",
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._measure(trainer, pl_module, on_trial=True)
        stop_by(trainer, self.public_metrics)
        Ranks.here().share(lambda: self._declare(trainer))

    def _declare(self, trainer: L.Trainer) -> None:
        if (ledger := ledger_of(trainer)) is not None:
            known = f"up to {self.equal_rows} of which may equal rows of the training" if self.equal_rows else ""
            known = known if self._compared else "not compared with those of the training"
            of = f"rows ({known})" if known else "rows"
            ledger.append("event", name=DECLARED_EVENT, data="public", split="validation", of=of)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not batch.last:
            return
        done = batch.step + 1
        last = getattr(accountant_of(trainer), "planned_steps", trainer.max_steps)
        if done % self.every_n_steps == 0 or done == last:
            self.last = self._measure(trainer, pl_module)
            tell(trainer, self.last, done)
            ask_stoppers(trainer, pl_module, self.public_metrics)

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule, *, on_trial: bool = False) -> dict[str, float]:
        """Return, by name, what the module logs in one pass over the public data."""
        private: Any = pl_module
        inner: Any = private.module
        logged = _Logged()
        metrics = [each for each in inner.modules() if isinstance(each, Metric)]
        training = {each: each.training for each in inner.modules()}
        synced = [each.sync_on_compute for each in metrics]
        plugin = trainer.precision_plugin
        with ExitStack() as undo:
            for each, before in training.items():
                undo.callback(setattr, each, "training", before)
            for metric, whole in zip(metrics, synced, strict=True):
                undo.callback(setattr, metric, "sync_on_compute", whole)
            undo.callback(inner.__dict__.pop, "log", None)
            placed = (private.validating(on_trial=on_trial), averaged(trainer, pl_module), private.whole())
            for context in (*placed, kept_generators(), torch.no_grad()):
                undo.enter_context(context)
            undo.enter_context(plugin.val_step_context())
            inner.eval()
            inner.__dict__["log"] = logged.log
            for metric in metrics:  # every process reads all rows
                metric.sync_on_compute = False
            for hook in _BEFORE:
                getattr(inner, hook)()
            for number, rows in enumerate(self.dataloader):
                batch = inner.transfer_batch_to_device(plugin.convert_input(rows), private.device, 0)
                logged.batch = batch
                inner.validation_step(batch, number)
            logged.batch = None
            for hook in _AFTER:
                getattr(inner, hook)()
            found = logged.means()
        if other := sorted({*found} ^ {*self.public_metrics}):
            raise ConfigurationError(
                f"PublicValidation(metrics={list(self.public_metrics)}) and validation_step, which logs "
                f"{sorted(found)}, differ in {other[0]!r}. Name exactly what it logs.",
                trap="T25",
            )
        return found


class _Logged:
    """Collects what a validation logs, as Lightning does: numbers weighted by rows, and metrics at the end."""

    def __init__(self) -> None:
        self.batch: Any = None
        self._numbers: dict[str, list[tuple[float, int]]] = {}
        self._metrics: dict[str, Metric] = {}
        self._reduced: dict[str, str] = {}

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *args: Any,
        batch_size: int | None = None,
        **unused: Any,
    ) -> None:
        if isinstance(value, Metric):
            self._metrics[name] = value
            return
        how = getattr(reduce_fx, "__name__", str(reduce_fx))
        if how not in ("mean", "sum", "min", "max"):
            raise ConfigurationError(
                f"self.log({name!r}, reduce_fx={how}): PublicValidation supports only mean, sum, min, max."
            )
        self._reduced[name] = how
        size = batch_size or (1 if self.batch is None else extract_batch_size(self.batch))
        self._numbers.setdefault(name, []).append((float(value), size))

    def means(self) -> dict[str, float]:
        found = {name: float(metric.compute()) for name, metric in self._metrics.items()}
        for metric in self._metrics.values():
            metric.reset()
        for name, given in self._numbers.items():
            values, how = [value for value, _ in given], self._reduced[name]
            if how == "mean":
                found[name] = sum(value * size for value, size in given) / sum(size for _, size in given)
            else:
                found[name] = sum(values) if how == "sum" else min(values) if how == "min" else max(values)
        return found


def stop_by(trainer: L.Trainer, names: Collection[str]) -> list[EarlyStopping]:
    """Return each `EarlyStopping` that monitors one of ``names``, and stop Lightning from asking it after an epoch.

    Without a validation loop Lightning asks it there, and its patience would count epochs of physical batches instead
    of validations.
    """
    found = [each for each in trainer.callbacks if isinstance(each, EarlyStopping) and each.monitor in names]  # type: ignore[attr-defined]
    for each in found:
        each._check_on_train_epoch_end = False
    return found


def ask_stoppers(trainer: L.Trainer, module: L.LightningModule, names: Collection[str]) -> None:
    """Let each `EarlyStopping` that monitors one of ``names`` decide, as after a validation loop of Lightning."""
    for each in stop_by(trainer, names):
        each.on_validation_end(trainer, module)


def _whole(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


_NOT_SETS = (str, bytes, list, tuple, Mapping, set, range, Tensor, np.ndarray, nn.Module, IterableDataset)


def count_equal_rows(loader: Any, data: Any) -> tuple[int, bool]:
    """Count the rows of ``loader`` that are rows of the training data set, including its held-out rows.

    Rows are compared in each form found: as the loader's data set returns them; as each data set inside it does
    (`Subset`, `ConcatDataset`, and attributes that hold a data set of the same length), which finds rows before a
    transform; and as stored in attributes with one value per row, such as ``data`` of torchvision data sets. Hugging
    Face data sets that are parts of one Arrow table count as one data set. If a loader has no data set, the rows of its
    batches are compared. Single numbers, such as labels, are ignored.

    Returns:
        The count, and whether every row could be compared.

    Guarantees:
        - The global generators are restored.
    """
    with kept_generators():
        seed_everywhere(0)
        trained = [*_sets_behind(getattr(data, "dataset", None))]
        found = [*_forms_of(loader, {id(each) for each in trained}.union(*map(_buffers, trained)))]
        wanted = {form for forms in found for form in forms or ()}
        met = wanted.intersection(_forms_trained_on(trained, data)) if wanted else set()
    equal = sum(forms is None or not met.isdisjoint(forms) for forms in found)
    return equal, bool(found) and all(forms is None or forms for forms in found)


def _forms_of(loader: Any, own: set[int]) -> Iterator[set[bytes] | None]:
    """Yield each row's digests, an empty set if unknown; None for a row that comes from a data set in ``own``."""
    dataset = getattr(loader, "dataset", None)
    if dataset is not None and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        part = cache(lambda number: not own.isdisjoint(_buffers(known[number])))
        known: dict[int, Any] = {}
        for index in range(len(dataset)):
            places = [*_places(dataset, index)]
            known |= {id(each): each for each, _ in places}
            same = any(id(each) in own or part(id(each)) for each, _ in places)
            yield None if same else {form for each, at in places for form in _forms(each, at)}
        return
    for given in loader if dataset is None else dataset:
        rows = rows_of_batch(given) if dataset is None else [given]
        yield from [set()] if rows is None else ({form for form in [digest_of_row(row)] if form} for row in rows)


def _forms_trained_on(trained: list[Any], data: Any) -> Iterator[bytes]:
    for each in trained:
        if not isinstance(each, (Subset, ConcatDataset)):  # their rows come from other data sets
            for index in range(len(each)):
                yield from _forms(each, index)
    if not trained:
        units = data.train_units()
        for unit in range(len(units)):
            yield from (form for form in map(digest_of_row, units.rows(unit)) if form)


def _forms(dataset: Any, index: int) -> Iterator[bytes]:
    """Yield the digests, where readable, of a row as the data set returns it and as its columns store it."""
    row = ()
    with suppress(Exception):  # a row that is never requested may be broken
        row = dataset[index]
    columns = [value for value in _attributes(dataset) if isinstance(value, (list, tuple, Tensor, np.ndarray))]
    raw = [value[index] for value in columns if getattr(value, "ndim", 1) and len(value) == len(dataset)]
    for form in (row, [value for value in raw if not is_number(value)]):
        if (digest := digest_of_row(form)) is not None:
            yield digest


def _places(dataset: Any, index: int, seen: tuple[int, ...] = ()) -> Iterator[tuple[Any, int]]:
    """Yield each data set that a row comes through, and its index there, as far as known."""
    yield dataset, index
    if isinstance(dataset, Subset):
        yield from _places(dataset.dataset, int(dataset.indices[index]), seen)
    elif isinstance(dataset, ConcatDataset):
        part = bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        yield from _places(dataset.datasets[part], index - before, seen)
    else:
        for inner in _inner(dataset):
            if id(inner) not in seen and len(inner) == len(dataset):
                yield from _places(inner, index, (*seen, id(dataset)))


def _buffers(dataset: Any) -> set[int]:
    """Return the memory addresses of a Hugging Face data set's Arrow buffers, which parts of one table share."""
    table: Any = getattr(getattr(dataset, "data", None), "table", None)
    chunks = () if not hasattr(table, "itercolumns") else (c for column in table.itercolumns() for c in column.chunks)
    return {each.address for chunk in chunks for each in chunk.buffers() if each is not None and each.size}


def _sets_behind(dataset: Any) -> Iterator[Any]:
    """Yield a data set and all data sets inside it, at any depth."""
    seen: set[int] = set()
    left = [] if dataset is None else [dataset]
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left.extend(_inner(each))


def _inner(dataset: Any) -> list[Any]:
    held: list[Any] = []
    for value in _attributes(dataset):
        several = isinstance(value, (list, tuple)) and 0 < len(value) <= 100
        held.extend(each for each in (value if several else [value]) if isinstance(each, Dataset) or not several)
    return [each for each in held if _is_set(each)]


def _attributes(dataset: Any) -> list[Any]:
    return [*getattr(dataset, "__dict__", {}).values()]


def _is_set(value: Any) -> bool:
    rows = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    return rows and not isinstance(value, (type, *_NOT_SETS))
