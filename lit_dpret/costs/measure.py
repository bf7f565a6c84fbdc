"""Measure the time and memory of a private step on random token ids, without data or releases."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_dpret.costs.memory import LinearCost
from lit_dpret.distributed.handover import gradient_slot
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.budget import NoiseName
from lit_dpret.privacy.clipping.ghost import PHASES, PREFIX
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PrivacyPlan

TIMED_BATCHES = 2
#: Roughly the number of operations that a core does per second.
SECOND_OF_A_CORE = 20_000_000_000

# Rows of the batches whose tensors are counted. In a slice of one layer, embeddings weigh more than in the whole model:
# with fewer rows their gradients, not the activations, would set the peak of the engine's self-checking pass.
_COUNTED_ROWS = (4, 6)


@dataclass(frozen=True)
class Measured:
    """Time and memory of a step."""

    first_batch: float  # seconds of the first physical batch of a run, in which the engine checks itself
    batch: float  # seconds of a physical batch; the fastest of `TIMED_BATCHES`
    update: float  # seconds of noise and optimizer together
    clipping: int  # peak bytes of a batch in which the engine checks itself, including weights and states
    updating: int  # peak bytes during the update, including weights and states

    @property
    def peak(self) -> int:
        """Bytes at the peak of a step."""
        return max(self.clipping, self.updating)


def measure_step(
    module: Any, plan: PrivacyPlan, device: torch.device, *, rows: int, autocast: bool = False, secure_rng: bool = False
) -> Measured:
    """Clip, noise and update as in later steps of a run, and measure time and peak memory; this trains ``module``.

    The optimizer's states exist before memory is measured, as they do from the second step on.
    """
    base = resident(device)
    if device.type == "cpu":
        base -= sum(p.numel() * p.element_size() for p in module.parameters())
    step = TrialStep(module, plan, device, autocast=autocast, secure_rng=secure_rng)
    first = seconds(lambda: step.clip(rows), device)
    step.update()
    step.attach()  # a self-checking batch recurs when the pattern of calls changes
    reset_peak(device)
    step.clip(rows)
    clipping = peak(device) - base
    batches = [seconds(lambda: step.clip(rows), device) for _ in range(TIMED_BATCHES)]
    reset_peak(device)
    updating = seconds(step.update, device)
    return Measured(first, min(batches), updating, clipping, peak(device) - base)


@dataclass(frozen=True)
class Held:
    """Bytes of tensors that each phase of a physical batch allocates and holds, in the order of `PHASES`."""

    clipped: tuple[LinearCost, ...]  # when the sum of clipped gradients already exists
    # In a batch in which the engine checks itself, the first one of a run, which also allocates the sum.
    checked: tuple[LinearCost, ...]

    def __add__(self, other: Held) -> Held:
        return Held(*(tuple(map(add, *both)) for both in zip(self._both(), other._both(), strict=True)))

    def __mul__(self, factor: float) -> Held:
        return Held(*(tuple(line * factor for line in lines) for lines in self._both()))

    def _both(self) -> tuple[tuple[LinearCost, ...], tuple[LinearCost, ...]]:
        return self.clipped, self.checked


def held_bytes(module: Any, plan: PrivacyPlan, device: torch.device, *, autocast: bool = False) -> Held:
    """Count the bytes that clipping holds in each phase, from batches of two sizes; tensors, not process pages."""
    TrialStep(module, plan, device, autocast=autocast).clip(1)  # allocate first what is kept for later batches
    found: list[tuple[dict[str, int], dict[str, int]]] = []
    for rows in _COUNTED_ROWS:
        step = TrialStep(module, plan, device, autocast=autocast)
        first, later = LiveBytes(), LiveBytes()
        with first:
            step.clip(rows)
        with later:
            step.clip(rows)
        found.append((first.peaks, later.peaks))
    (checked, clipped), (more_checked, more_clipped) = found
    return Held(clipped=_lines(clipped, more_clipped), checked=_lines(checked, more_checked))


def _lines(few: dict[str, int], many: dict[str, int]) -> tuple[LinearCost, ...]:
    """Return the straight lines through the peaks of each phase; zero for a phase that did not occur."""
    low, high = _COUNTED_ROWS
    found = []
    for name in PHASES:
        row = (many.get(name, 0) - few.get(name, 0)) / (high - low)
        found.append(LinearCost(few.get(name, 0) - low * row, row))
    return tuple(found)


class TrialStep:
    """One module, trained on random rows without data, ledger or Trainer."""

    def __init__(
        self, module: Any, plan: PrivacyPlan, device: torch.device, *, autocast: bool = False, secure_rng: bool = False
    ) -> None:
        self._module, self._plan, self._device, self._autocast = module.to(device), plan, device, autocast
        self._stream = KeyedStream(os.urandom(32), run_id="costs", secure_rng=secure_rng)
        self.attach()
        built = module.optimizer_spec.build(
            module.parameters(), steps=plan.steps, noise_std=self._mode.gradient_noise_std
        )
        self._optimizer: Any = built[0][0] if isinstance(built, tuple) else built

    def attach(self) -> None:
        """Restart: the next batch includes the engine's self-check, and the sum is empty."""
        self._mode = DPSGD(eps=self._plan.budget.eps)
        self._mode.attach(self._module, self._plan, self._stream)

    def clip(self, rows: int) -> None:
        """Add the clipped gradients of a physical batch with this many rows."""
        batch = {name: values.to(self._device) for name, values in self._module.longest_rows(rows).items()}
        units = torch.arange(rows, device=self._device)
        with torch.autocast(self._device.type, dtype=torch.bfloat16) if self._autocast else nullcontext():
            self._mode.add(lambda: self._module.per_row_loss(batch), units, torch.ones_like(units, dtype=torch.bool))

    def update(self) -> None:
        """Noise the sum and step the optimizer."""
        gradients = self._mode.privatize(self._mode.take(), attempt=0, step=0).gradients
        for name, parameter in self._module.named_parameters():
            if name in gradients:
                slot = gradient_slot(self._optimizer, parameter)
                slot.grad = gradients[name].to(slot.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def seconds_per_normal(device: torch.device, noise: NoiseName = "gaussian", *, secure_rng: bool = False) -> float:
    """Return the seconds to draw one coordinate's noise on a device."""
    stream, count = KeyedStream(os.urandom(32), run_id="costs", secure_rng=secure_rng), 400_000
    drawn: Callable[..., Tensor] = stream.normal if noise == "gaussian" else partial(stream.rounded_normal, bits=30)

    def draw() -> None:
        drawn(torch.Size((count,)), attempt=0, step=0, parameter="x", device=device)

    return min(seconds(draw, device) for _ in range(3)) / count


def seconds_per_value(device: torch.device) -> float:
    """Return the mean seconds per value of three memory-bound operations."""
    values = torch.randn(4_000_000, device=device)

    def work() -> None:
        values.exp().mul_(values).add_(values)

    return min(seconds(work, device) for _ in range(3)) / (3 * values.numel())


def product_rate(tokens: int, inputs: int, outputs: int, device: torch.device, *, half: bool = False) -> float:
    """Return operations per second of a linear layer of this shape: forward, and gradients of inputs and weight."""
    if device.type == "cpu":  # the rate stops rising with the tokens once a product takes a second
        tokens = min(tokens, max(256, SECOND_OF_A_CORE // (6 * inputs * outputs)))
    dtype = torch.bfloat16 if half else torch.float32
    x = torch.randn(tokens, inputs, device=device, dtype=dtype)
    w = torch.randn(outputs, inputs, device=device, dtype=dtype)
    g = torch.randn(tokens, outputs, device=device, dtype=dtype)

    def work() -> None:
        torch.mm(x, w.T)
        torch.mm(g, w)
        torch.mm(g.T, x)

    work()
    return 6 * tokens * inputs * outputs / min(seconds(work, device) for _ in range(2))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time ``work``: on a GPU until it finishes, on a CPU as processor time with one thread, else as wall time.

    Processor time, since the machine may be shared: a step that waits for a core takes no more of it.
    """
    if device.type == "cpu":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        begun = clock()
        work()
        return clock() - begun
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def resident(device: torch.device, field: str = "VmRSS") -> int:
    """Return the bytes in use now, or at the peak with ``VmHWM``."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise ConfigurationError(
            "task.measure reads the memory of a process from /proc, which this system does not have. "
            "Set task.measure=false for an estimate."
        ) from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the current usage."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(device: torch.device) -> int:
    """Return the most bytes in use since `reset_peak`."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else resident(device, "VmHWM")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the live storages that operations create while active, as `torch.cuda.max_memory_allocated` does.

    ``peaks`` holds the most live bytes inside each phase of clipping. Memory that a kernel allocates and frees within
    one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.peaks: dict[str, int] = {}
        self._inside: list[str] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.profiler._record_function_enter_new.default:
            self._inside.append(args[0])
        elif func is torch.ops.profiler._record_function_exit._RecordFunction and self._inside:
            self._inside.pop()
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._note(leaf.untyped_storage(), given)
        return made

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in given:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        for name in self._inside:
            if name.startswith(PREFIX):
                phase = name.removeprefix(PREFIX)
                self.peaks[phase] = max(self.peaks.get(phase, 0), self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
