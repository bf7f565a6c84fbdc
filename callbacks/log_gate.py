"""The gate between a private run and all displays of numbers: loggers, ``callback_metrics``, the progress bar.

A logger leaks by what is logged, since a loss on private rows is an uncounted release; and by when, since the duration
of a step depends on its private texts, and most loggers stamp each number with the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from lit_dpret.callbacks.planning import accountant_of
from lit_dpret.privacy.ledger.gate import public_names, tells_progress, undeclared_metric

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def tell(trainer: L.Trainer, metrics: Mapping[str, float], step: int) -> None:
    """Log public numbers by logical step, since the number of physical batches may be private."""
    gate: LogGate | None = getattr(accountant_of(trainer), "log_gate", None)
    with nullcontext() if gate is None else gate.opened():
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=step)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})


class LogGate:
    """Allow only the declared numbers of one fit.

    Guarantees:
        - A number whose name is not declared public reaches no logger, no ``callback_metrics`` and no progress bar,
          unless ``declare`` has recorded it in the ledger.
        - A logger that stamps times gets its numbers when the fit ends, also by an exception; after a kill it gets
          none. ``metrics.jsonl`` has no times and is written at once.
        - A name is logged at most once per logical step, whatever its number of physical batches.
    """

    def __init__(
        self, trainer: Any, module: Any, *, step: Callable[[], int], declare: Callable[[str], None] | None = None
    ) -> None:
        self.trainer, self.every = trainer, trainer.log_every_n_steps
        self._module, self._step, self._declare = module, step, declare
        self.open = self.training = False
        self._last: dict[tuple[int, str], int] = {}
        for logger in trainer.loggers:
            _watch(logger, self)

    def watch_results(self) -> None:
        """Watch the Trainer's result dicts, once Lightning has created those of this fit."""
        connector = self.trainer._logger_connector
        for name in _SHOWN:
            setattr(connector, name, _Watched(getattr(connector, name), self))

    def log_every_batch(self) -> None:
        """Make Lightning log after each physical batch: the index of a batch may be private, the step is not."""
        self.trainer.log_every_n_steps = 1

    @contextmanager
    def opened(self) -> Iterator[None]:
        before, self.open = self.open, True
        try:
            yield
        finally:
            self.open = before

    def check(self, metrics: Mapping[str, Any]) -> None:
        if self.open:
            return
        callbacks = list(self.trainer.callbacks)
        known = set(public_names([self._module, *callbacks]))
        for monitor in callbacks:
            if isinstance(monitor, LearningRateMonitor):  # it logs what the schedule decides, not the data
                known |= {*monitor.lrs, *monitor.last_momentum_values, *monitor.last_weight_decay_values}
        for name, value in metrics.items():
            if name not in known and not tells_progress(name, value, self.trainer):
                self.private(repr(name))

    def private(self, what: str) -> None:
        if self._declare is None:
            raise undeclared_metric(what, self._module)
        self._declare(what)

    def new(self, logger: Any, metrics: Mapping[str, Any], step: int | None) -> tuple[dict[str, Any], int | None]:
        """Return the ``metrics`` not yet logged in this step, as plain numbers, and the step."""
        numbers = {key: value.item() if isinstance(value, Tensor) else value for key, value in metrics.items()}
        if self.open:
            return numbers, step
        step = self._step()
        found = {key: value for key, value in numbers.items() if self._last.get((id(logger), key)) != step}
        self._last |= {(id(logger), key): step for key in found}
        return found, step


@contextmanager
def rehearsed(trainer: L.Trainer, module: Any) -> Iterator[None]:
    """Send everything that ``module`` logs within the block through a gate; discard the values."""
    before, trainer.loggers = trainer.loggers, [_Nowhere()]
    declare = (lambda what: None) if module.log_private_loss else None
    gate = LogGate(trainer, module, step=lambda: 0, declare=declare)
    gate.training = True
    gate.watch_results()
    module.trainer = trainer
    try:
        yield
    finally:
        module.trainer = None
        trainer.loggers = before
        trainer._logger_connector.reset_metrics()


class _Nowhere(DummyLogger):
    writes_no_times = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("log_"):
            self._gate.private(f"logger.{name}")
        return super().__getattr__(name)


class _Watched(dict[str, Any]):
    """A dict of metrics that checks updates with the gate; a copy made by Lightning does not."""

    def __init__(self, content: Mapping[str, Any] = {}, gate: LogGate | None = None) -> None:
        super().__init__(content)
        self._gate = gate

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self.update({name: default})
        return self[name]

    def update(self, *content: Any, **named: Any) -> None:
        new = dict(*content, **named)
        if self._gate is not None:
            self._gate.check(new)
        super().update(new)

    def __ior__(self, content: Any) -> Any:  # type: ignore[misc]
        self.update(content)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # Lightning copies the metrics by which it may choose a checkpoint


class _Gated(Logger):
    """Wraps a logger's class while a private run trains."""

    _gate: LogGate
    _held: dict[Any, Callable[[], Any]]

    def log_metrics(self, metrics: Any, step: int | None = None, *args: Any, **kwargs: Any) -> None:
        self._gate.check(metrics)
        found, step = self._gate.new(self, metrics, step)
        if set(found) - {"epoch"}:
            below: Any = super()
            self._deliver(partial(below.log_metrics, found, step, *args, **kwargs))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if self._gate.training:  # before that, Lightning logs the arguments of the constructors
            self._gate.private(f"{type(self).__name__}.log_hyperparams")
        below: Any = super()
        self._deliver(partial(below.log_hyperparams, params, *args, **kwargs))

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        self._deliver(partial(super().log_graph, *args, **kwargs))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        name = ("checkpoint", id(checkpoint_callback))
        self._deliver(partial(super().after_save_checkpoint, checkpoint_callback), name)

    def save(self) -> None:
        self._deliver(super().save, "save")

    def finalize(self, status: str) -> None:
        held = _let_go(self)
        for call in held:
            call()
        self.finalize(status)

    @property
    def experiment(self) -> Any:
        below: Any = super()
        real = below.experiment
        return real if self._gate.open else _Refusing(real, self)

    def _deliver(self, call: Callable[[], Any], name: Any = None) -> None:
        """Make a call now, or when the run is over; a later call with the same name replaces an earlier one."""
        if getattr(self, "writes_no_times", None) is True or isinstance(self, CSVLogger):
            with self._gate.opened():
                call()
            return
        name = name or len(self._held)
        self._held.pop(name, None)
        self._held[name] = call


class _Refusing:
    """Wraps the service of a logger for all code except the logger itself."""

    def __init__(self, real: Any, logger: Any) -> None:
        self._real, self._logger = real, logger

    def __getattr__(self, name: str) -> Any:
        self._logger._gate.private(f"{type(self._logger).__name__}.experiment.{name}")
        return getattr(self._real, name)


class _GatedWriter:
    """Wraps a `CSVLogger`'s experiment, to which other code may hold a reference from before the fit."""

    _gate: LogGate

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and not self._gate.open:
            self._gate.private(f"experiment.{name}")
        return super().__getattribute__(name)


@cache
def _gated(kind: Any, front: type = _Gated) -> Any:
    return type(kind.__name__, (front, kind), {"__module__": kind.__module__})


def _watch(logger: Any, gate: LogGate) -> None:
    if isinstance(logger, _Gated):  # an earlier fit of the same Trainer ended without finalizing it
        _let_go(logger)
    writer: Any = logger._experiment if isinstance(logger, CSVLogger) else None
    kind: Any = type(logger)
    logger.__class__ = _gated(kind)
    logger._gate, logger._held = gate, {}
    if writer is not None:
        kind = type(writer)
        writer.__class__ = _gated(kind, _GatedWriter)
        writer._gate = gate


def _let_go(logger: Any) -> list[Callable[[], Any]]:
    """Restore the logger's class; return the calls that were held back."""
    logger._gate.trainer.log_every_n_steps = logger._gate.every
    logger.__class__ = type(logger).__mro__[2]
    if isinstance(writer := getattr(logger, "_experiment", None), _GatedWriter):
        writer.__class__ = type(writer).__mro__[2]
        del writer._gate
    held = list(logger._held.values())
    del logger._gate, logger._held
    return held
