"""Progress and speed of a training run, on the terminal only.

The duration of a step depends on its private texts, so times are written nowhere else. Rates are computed from public
sizes: the expected batch at full lengths, never the tokens of the actual batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_dpret.callbacks.planning import accountant_of
from lit_dpret.costs.work import ACCELERATORS, accelerator, work_of
from lit_dpret.privacy.budget import show_epsilon
from lit_dpret.progress import Progress, ProgressLine
from lit_dpret.settings import require_choice, require_whole

__all__ = ["Progress", "ProgressLine", "StepProgress"]


class StepProgress(Callback):
    """Show finished logical steps, the remaining time and the epsilon spent so far.

    Args:
        label: The start of the line.
        steps: The total, if the trainer does not know it; null for the trainer's number.
    """

    def __init__(self, label: str = "training", *, steps: int | None = None) -> None:
        self._label, self._steps = label, steps
        self._line: ProgressLine | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._line = ProgressLine(self._label, begun=trainer.global_step) if trainer.is_global_zero else None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._line is None or not getattr(batch, "last", True):
            return
        known = trainer.max_steps if trainer.max_steps > 0 else trainer.num_training_batches
        total = int(known) if self._steps is None else self._steps
        spent = trainer.callback_metrics.get("privacy/eps_spent")
        self._line(trainer.global_step, total, f"eps {show_epsilon(float(spent))}" if spent is not None else "")


class _CountsSteps:
    """A mixin for progress bars that counts logical steps, since a step's number of physical batches may be private."""

    _steps_in_pass: int
    _trainer: L.Trainer | None

    @property
    def total_train_batches(self) -> int | float:
        trainer = self._trainer
        if trainer is None or trainer.max_steps < 0:
            return self._steps_in_pass
        before = trainer.global_step - trainer.global_step % self._steps_in_pass
        return min(self._steps_in_pass, trainer.max_steps - before)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if getattr(batch, "last", True):
            done = (trainer.global_step - 1) % self._steps_in_pass
            super().on_train_batch_end(trainer, pl_module, outputs, batch, done)  # type: ignore[misc]


def count_steps(trainer: L.Trainer, steps_per_epoch: int) -> None:
    """Make the progress bar count the logical steps of a pass, by changing its class: it has no setting for this."""
    bar: Any = trainer.progress_bar_callback
    if bar is None:
        return
    bar._steps_in_pass = steps_per_epoch
    if not isinstance(bar, _CountsSteps):
        kind = type(bar)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        bar.__class__ = type(kind.__name__, (_CountsSteps, kind), names)


class Throughput(Callback):
    """Show seconds per step, tokens per second at full lengths, model FLOP utilisation, clipping, and remaining time.

    The share of clipped units is the mean over the steps since the last line, and is shown only under
    ``privacy.clip_fraction_budget``: it is read from the logged releases, never from the gradients.

    Args:
        every: Logical steps between two lines.
        device: A name in `lit_dpret.costs.work.ACCELERATORS`, to whose peak the utilisation is relative; null
            shows no utilisation.
        clock: A function that returns seconds from any origin.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    def __init__(
        self, *, every: int = 10, device: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        require_whole("callbacks.throughput", {"every": every}, 1)
        if device is not None:
            require_choice("callbacks.throughput.device", device, ACCELERATORS)
        self.every = every
        self._peak = None if device is None else accelerator(device)
        self._clock = clock
        self._begun, self._steps = 0.0, 0
        self._clipped: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begun, self._steps = self._clock(), 0
        self._clipped.clear()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not getattr(batch, "last", True):
            return
        self._steps += 1
        if (clipped := trainer.callback_metrics.get("privacy/clip_fraction")) is not None:
            self._clipped.append(float(clipped))
        if self._steps % self.every:
            return
        found = self.rates(trainer, pl_module, (self._clock() - self._begun) / self._steps)
        if self._clipped:
            found["clip_fraction"] = sum(self._clipped) / len(self._clipped)
            self._clipped.clear()
        if trainer.is_global_zero:
            sys.stderr.write(f"{_line(found, self._peak.source if self._peak else '')}\n")
            sys.stderr.flush()

    def rates(self, trainer: Any, module: Any, seconds: float) -> dict[str, float]:
        """Return the rates for an average of ``seconds`` per step; unknown ones are omitted."""
        found = {"seconds_per_step": seconds}
        plan = getattr(accountant_of(trainer), "plan", None)
        outline = getattr(module, "outlined", None)
        if plan is None or outline is None:
            return found
        tokens = outline.max_passage_length + outline.max_query_length
        found["tokens_per_second"] = plan.denominator * tokens / seconds
        if self._peak is not None:
            done = work_of(outline).model_flops * plan.denominator / seconds
            found["model_flop_utilisation"] = done / (self._peak.bf16_flops * trainer.world_size)
        left = plan.steps - trainer.global_step
        return found | {"seconds_left": max(0, left) * seconds}


def _line(found: dict[str, float], source: str) -> str:
    parts = [f"{found['seconds_per_step']:.3g} s a step"]
    if "tokens_per_second" in found:
        parts.append(f"{found['tokens_per_second']:,.0f} tokens/s at full lengths and the expected batch")
    if "model_flop_utilisation" in found:
        parts.append(f"{found['model_flop_utilisation']:.1%} of the peak ({source})")
    if "clip_fraction" in found:
        parts.append(f"{found['clip_fraction']:.0%} of the units clipped (noised)")
    if "seconds_left" in found:
        parts.append(f"{found['seconds_left'] / 60:.3g} min left")
    return "speed: " + ", ".join(parts)
