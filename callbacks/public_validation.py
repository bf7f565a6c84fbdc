"""Validation within a private run by a module's own ``validation_step``, on public data.

Lightning's validation loop is refused there, since nothing says whose its rows are. A metric of public rows costs
nothing; this callback runs the step, and the hooks around it, on a loader that is declared public. What the loss keeps
of private rows, as in a metric that both steps update, is put back before (`CouplingCheck`).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities.data import extract_batch_size
from torch import nn
from torch.utils.data import Subset
from torchmetrics import Metric

from lit_dpret.callbacks.averages import averaged
from lit_dpret.callbacks.log_gate import tell
from lit_dpret.callbacks.planning import accountant_of, ledger_of
from lit_dpret.callbacks.same_rows import count_equal_rows
from lit_dpret.callbacks.shared_files import refuse_shared_files
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.ledger.judgement import DECLARED_EVENT
from lit_dpret.privacy.user_generators import kept_generators
from lit_dpret.settings import require_whole

#: What Lightning calls around the steps of a validation.
_BEFORE, _AFTER = ("on_validation_start", "on_validation_epoch_start"), ("on_validation_epoch_end", "on_validation_end")


class PublicValidation(Callback):
    """Run the ``validation_step`` of the module in `make_private` on public data, every few steps.

    Guarantees:
        - What is logged has a name in ``metrics``, which declares it to be of public rows; the card says so.
        - Rows of the training data set are refused, also held-out ones and those that another object gives, as far as
          their content is found (`count_equal_rows`); what was not compared, the card names.
        - Nothing is drawn from any random stream, so that the run is the same with and without it.
        - Once before the first step all of it is tried; the result, and what the module kept of it, are discarded.
        - An `EarlyStopping` that monitors one of the metrics is asked after each validation.

    Args:
        dataloader: Batches as ``validation_step`` takes them, of public rows. Every process reads all of them.
        metrics: The names that the module logs by ``self.log`` or ``self.log_dict``: numbers, which are averaged over
            rows, or metrics and collections of torchmetrics.
        every_n_steps: Validate after every so many logical steps, and after the last one.
        equal_rows: How many of the rows may hold what a row of the training holds, as public short texts do by
            coincidence; the card says so.

    Raises:
        ConfigurationError: A setting is out of range, or the module logs other names.
    """

    #: Nobody else may log a number, or keep one in an attribute or checkpoint, by declaring one of these names.
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
        if not isinstance(inner, L.LightningModule) or not _has_step(inner):
            raise ConfigurationError(
                "PublicValidation runs the validation_step of the LightningModule that make_private wraps, and "
                f"{type(module if inner is None else inner).__name__} has none."
            )
        trained = getattr(data, "dataset", None)
        if trained is not None and _whole(getattr(self.dataloader, "dataset", None)) is _whole(trained):
            raise ConfigurationError(
                "PublicValidation reads the data set of the training: its rows are private, also those that are held "
                "out, and a metric of them is an uncounted release. Give it public rows, or validate after the run.",
                trap="T25",
            )

    def refuse_protected(self, module: Any, data: Any) -> None:
        """Refuse rows that hold what rows of the training hold, whichever object gives them."""
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
                f"PublicValidation reads {found} rows that hold what rows of the training data set hold: these are "
                "private, also those that are held out, and a metric of them is an uncounted release. Give it public "
                "rows, or validate after the run. If they are public and equal by coincidence, as short texts can "
                f"be, declare it: PublicValidation(..., equal_rows={found}), which the card states.",
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
        """Return what the module logs in one pass over the public data, by name."""
        private: Any = pl_module
        inner: Any = private.module
        logged = _Logged()
        metrics = [each for each in inner.modules() if isinstance(each, Metric)]
        training = {each: each.training for each in inner.modules()}
        synced = [each.sync_on_compute for each in metrics]
        plugin = trainer.precision_plugin
        with ExitStack() as undo:
            undo.callback(_restore, training, metrics, synced)
            undo.callback(inner.__dict__.pop, "log", None)
            whole = (private.validating(on_trial=on_trial), averaged(trainer, pl_module), private.whole())
            for context in (*whole, kept_generators(), torch.no_grad()):
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
                f"PublicValidation(metrics={list(self.public_metrics)}) and {type(inner).__name__}.validation_step, "
                f"which logs {sorted(found)}, differ in {other[0]!r}. Name what it logs, all of it.",
                trap="T25",
            )
        return found


class _Logged:
    """Takes what a validation logs, as Lightning does: numbers weighted by rows, and metrics at the end."""

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
                f"self.log({name!r}, reduce_fx={how}): PublicValidation knows mean, sum, min, max."
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
    """Return each `EarlyStopping` that monitors one of ``names``, which is then not asked at the end of an epoch.

    Lightning asks it there where no validation loop runs; its patience would count epochs of physical batches, in the
    place of validations.
    """
    found = [each for each in trainer.callbacks if isinstance(each, EarlyStopping) and each.monitor in names]  # type: ignore[attr-defined]
    for each in found:
        each._check_on_train_epoch_end = False
    return found


def ask_stoppers(trainer: L.Trainer, module: L.LightningModule, names: Collection[str]) -> None:
    """Let each `EarlyStopping` decide that monitors one of ``names``, as after a validation loop of Lightning's."""
    for each in stop_by(trainer, names):
        each.on_validation_end(trainer, module)


def _has_step(module: L.LightningModule) -> bool:
    own = inspect.getattr_static(type(module), "validation_step", None)
    return own is not inspect.getattr_static(L.LightningModule, "validation_step", None)


def _whole(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _restore(training: dict[nn.Module, bool], metrics: Sequence[Metric], synced: Sequence[bool]) -> None:
    for module, before in training.items():
        module.training = before
    for metric, before in zip(metrics, synced, strict=True):
        metric.sync_on_compute = before
