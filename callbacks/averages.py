"""Averages of the weights over steps, which are evaluated, saved and exported if a callback keeps one.

Each step of a private run releases its weights, so an average of them is post-processing: it costs nothing, and the
card says so. Lightning's `WeightAveraging`, `EMAWeightAveraging` and `StochasticWeightAveraging` are used unchanged;
this module adds what a private run needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_dpret.callbacks.strategies import strategy_name
from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import require_whole

_WHOLE = ("one_device", "ddp")


def exponential_average(
    *,
    decay: float,
    update_every_n_steps: int = 1,
    update_starting_at_step: int | None = None,
    use_buffers: bool = False,
) -> EMAWeightAveraging:
    """Build Lightning's `EMAWeightAveraging`, for ``callbacks=with_averaging``.

    Args:
        decay: The share of the average that each update keeps, from 0 to below 1.
        update_every_n_steps: Steps from one update to the next.
        update_starting_at_step: The first step that is averaged; null for all of them.
        use_buffers: Average the buffers too.
    """
    _refuse_decay("callbacks.averaging.decay", decay)
    _refuse_steps("callbacks.averaging", every=update_every_n_steps, first=update_starting_at_step)
    return EMAWeightAveraging(
        decay=decay, update_every_n_steps=update_every_n_steps, update_starting_at_step=update_starting_at_step,
        use_buffers=use_buffers,
    )  # fmt: skip


def averaging(trainer: L.Trainer) -> Any:
    """Return the callback that averages the weights; None without one."""
    kinds = (WeightAveraging, StochasticWeightAveraging)
    return next((c for c in trainer.callbacks if isinstance(c, kinds)), None)  # type: ignore[attr-defined]


@contextmanager
def averaged(trainer: L.Trainer, module: nn.Module) -> Iterator[None]:
    """Put the averaged weights into ``module`` within the block, if a callback has begun an average."""
    callback = averaging(trainer)
    if isinstance(callback, WeightAveraging) and isinstance(module, L.LightningModule):
        # The callback may come later in the list of callbacks; it takes a step's weights only once.
        callback.on_train_batch_end(trainer, module, None, None, 0)
    average = _average_of(callback)
    if average is None:
        yield
        return
    _swap(average, module)
    try:
        yield
    finally:
        _swap(average, module)


def describe(trainer: L.Trainer) -> dict[str, str]:
    """Describe for the card what was averaged and how; empty without averaging."""
    callback = averaging(trainer)
    if callback is None:
        return {}
    how = type(callback).__name__
    if isinstance(callback, EMAWeightAveraging) and (decay := _decay_of(callback)) is not None:
        how += f", decay {decay:g}"
    begun = "" if _average_of(callback) is not None else ", which had not begun"
    return {
        "averaging": f"{how} over the released weights of the steps{begun}: post-processing, which costs no privacy"
    }


def refuse_averages(trainer: L.Trainer, module: Any, callbacks: list[Any]) -> None:
    """Refuse an average that would read private rows, or would not be of the weights."""
    found = [c for c in callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]
    for callback in found:
        name = type(callback).__name__
        if len(found) > 1:
            raise ConfigurationError(f"callbacks: {len(found)} callbacks average the weights ({name}). Keep one.")
        if isinstance(callback, EMAWeightAveraging) and (decay := _decay_of(callback)) is not None:
            _refuse_decay(f"callbacks: {name}.decay", decay)
        first, epoch = (getattr(callback, f"update_starting_at_{what}", None) for what in ("step", "epoch"))
        every = getattr(callback, "update_every_n_steps", 1)
        _refuse_steps(f"callbacks: {name}", every=every, first=first, epoch=epoch)
        if (strategy := strategy_name(trainer)) not in _WHOLE:
            raise ConfigurationError(
                f"callbacks: {name} under trainer.strategy={strategy} would average the weights of one process, which "
                "may not hold all of them. Choose trainer=cpu, gpu or ddp."
            )
        if str(trainer.precision) == "bf16-true":
            raise ConfigurationError(
                f"callbacks: {name} with trainer.precision=bf16-true would average weights with 8 bits of precision, "
                "where rounding loses most updates. Set trainer.precision=bf16-mixed."
            )
        if isinstance(callback, StochasticWeightAveraging):
            if any(isinstance(part, _BatchNorm) for part in module.modules()):
                raise ConfigurationError(
                    "callbacks: StochasticWeightAveraging passes over the private rows again to update BatchNorm's "
                    "statistics. Replace BatchNorm by GroupNorm, or use Lightning's EMAWeightAveraging.",
                    trap="T11",
                )
        elif (first or 0) >= trainer.max_steps > 0:
            raise ConfigurationError(
                f"callbacks: {name}.update_starting_at_step={first} is never reached in trainer.max_steps="
                f"{trainer.max_steps}: the model would keep its initial weights. Lower it, or set it to null."
            )
        elif every > max(trainer.max_steps, 1):
            raise ConfigurationError(
                f"callbacks: {name}.update_every_n_steps={every} exceeds trainer.max_steps={trainer.max_steps}: the "
                "average would be the initial weights. Set it to 1."
            )
        elif getattr(callback, "_use_buffers", False) and any(not b.is_floating_point() for b in module.buffers()):
            raise ConfigurationError(
                f"callbacks: {name}(use_buffers=True) would average integer buffers, such as positions, and round "
                "them down. Set use_buffers=False: buffers are then copied unchanged."
            )


def go_on_averaging(trainer: L.Trainer, module: Any) -> None:
    """Resume `StochasticWeightAveraging` from a checkpoint at once; Lightning waits for the next epoch."""
    callback = averaging(trainer)
    if not isinstance(callback, StochasticWeightAveraging) or callback._scheduler_state is None:
        return
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    before = [group["lr"] for group in groups]
    callback.on_train_epoch_start(trainer, module)
    for group, rate in zip(groups, before, strict=True):  # a new schedule takes a step when it is created
        group["lr"] = rate


def _refuse_steps(where: str, *, every: object, first: object, epoch: object = None) -> None:
    require_whole(where, {"update_every_n_steps": every}, 1)
    require_whole(where, {"update_starting_at_step": first, "update_starting_at_epoch": epoch}, 0, null=True)


def _refuse_decay(knob: str, decay: Any) -> None:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ConfigurationError(
            f"{knob}={decay!r} is not a number in [0, 1), the share of the average that an update keeps: 0.9 averages "
            "about the last ten updates."
        )


def _average_of(callback: Any) -> nn.Module | None:
    model: Any = getattr(callback, "_average_model", None)
    if isinstance(callback, StochasticWeightAveraging):
        count = callback._init_n_averaged if callback.n_averaged is None else callback.n_averaged  # of the checkpoint
        return model if int(count) > 0 else None
    return None if model is None or int(model.n_averaged) == 0 else model.module


def _decay_of(callback: EMAWeightAveraging) -> float | None:
    """Return the decay, which Lightning keeps only in a closure."""
    average: Any = callback._kwargs.get("avg_fn")
    cells = getattr(getattr(average, "__wrapped__", average), "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, int | float)), None)


@torch.no_grad()
def _swap(average: nn.Module, module: nn.Module) -> None:
    for mean, own in zip(chain(average.parameters(), average.buffers()), chain(module.parameters(), module.buffers()),
                         strict=True):  # fmt: skip
        before = own.detach().clone()
        own.copy_(mean)
        mean.copy_(before)
