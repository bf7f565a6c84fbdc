"""Measure the noise of every step before the step counts, without trusting the privacy mode.

Update times denominator minus sum, over the planned deviation, is standard normal if the mode follows the plan. By
Ville's inequality, an honest run of any length raises an alarm with probability at most `LEVEL`; docs/derivations.md
has level, power and alternatives. The measurements stay inside the job; the verdict is public.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_dpret.distributed.shards import place_of
from lit_dpret.distributed.xla import fetch, is_lazy
from lit_dpret.privacy import clip_fraction
from lit_dpret.privacy.modes import Update
from lit_dpret.privacy.plan import PrivacyPlan

LEVEL = 1e-9
"""Probability of a false alarm in one process, over a run of any length."""

BLOCK = 4096
"""The number of coordinates of a parameter that are tested together, in addition to the whole parameter."""

SAMPLE = 64
"""The number of leading coordinates of a parameter whose noise is compared with other noise."""

RATIOS = np.array([1e-3, 1e-2, 0.1, 0.25, *(1 - 0.5 ** np.arange(1, 11))])
CORRELATIONS = np.array([0.5, 0.9, 0.999, -0.5, -0.9, -0.999])

_SOURCES = ("its own noise in the step before", "the noise of another parameter", "its neighbouring coordinate")


class NoiseCheck:
    """Test the noise of each step against the plan.

    Guarantees:
        - Nothing that a mode reports makes noise look larger than it was. If it reports a smaller deviation (and is
          charged for it), that deviation is tested.
        - The sums are kept by reference, from `expect` to `verdict`. Apart from them, the check uses the memory of one
          parameter at a time.
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        self._plan = plan
        self._sums: dict[str, tuple[Tensor, int | None]] = {}
        self._state: _State | None = None
        self._of_rank: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(len(CORRELATIONS)))

    def expect(self, sums: Mapping[str, Tensor]) -> None:
        # By reference: a copy of all sums would double their memory.
        self._sums = {name: (total, _version(total)) for name, total in sums.items()}

    def verdict(self, update: Update) -> str | None:
        """Return the fault in the noise of the step, without any measured number; None if there is none."""
        sums, self._sums = self._sums, {}
        # A mode that reports less noise is charged for less; one that reports more is still held to the plan.
        std = min(self._plan.noise_std, update.noise_std)
        if not std > 0:
            return None  # it is charged as reported: no noise
        noises: list[Tensor] = []
        parameters: list[_Parameter] = []
        for name in sorted(update.gradients):
            gradient = place_of(update.gradients[name])[0].detach().reshape(-1)
            if not gradient.numel():
                continue
            total, version = sums.get(name, (None, None))
            if total is None:
                return f"{name} was released, but its clipped sum was not shown"
            # If the sum was changed in place, it is lost, and the difference below would be zero or meaningless noise.
            if version != _version(total):
                return f"the sum of {name} was changed in place, so its noise cannot be measured: return new tensors"
            total = place_of(total)[0].detach().reshape(-1)
            if total.shape != gradient.shape:
                return f"{name} has {gradient.numel()} coordinates and its clipped sum {total.numel()}"
            noises.append(self._look(gradient, total, std))
            parameters.append(_Parameter(name, tuple(update.gradients[name].shape), gradient.numel()))
        seen = _on_host(noises)
        if update.clip_fraction is not None and clip_fraction.NAME in sums:
            noise = (self._coordinate(update.clip_fraction) - float(sums[clip_fraction.NAME][0])) / std
            seen = np.append(seen, [noise**2, noise])
            parameters.append(_Parameter(clip_fraction.NAME, (), 1))
        if not parameters:
            return None
        if self._state is None:
            self._state = _State(parameters)
        if self._state.parameters != parameters:
            return "the update has other parameters than the one before"
        return self._state.judge(seen)

    def sample(self) -> dict[str, np.ndarray]:
        """Return the first coordinates of the last step's noise, by parameter; secret, for `compare` only."""
        return {} if self._state is None else self._state.latest()

    def compare(self, samples: Sequence[Mapping[str, np.ndarray]]) -> str | None:
        """Return the fault in noise that several processes drew in parts, from their samples."""
        latest: dict[str, np.ndarray] = {}
        for rank, own in enumerate(samples):
            for name, noise in own.items():
                other = latest.get(name, noise[:0])
                common = min(len(noise), len(other))
                self._of_rank[rank] += _gains(noise[:common], other[:common]).sum(0)
                latest[name] = noise
            if _average(self._of_rank[rank]) >= math.log(len(samples) / LEVEL):
                return f"process {rank} added noise that another process added elsewhere"
        return None

    def _look(self, gradient: Tensor, total: Tensor, std: float) -> Tensor:
        """Return the energy of each block of the standardised noise, and its first coordinates."""
        wide = torch.promote_types(torch.promote_types(gradient.dtype, total.dtype), torch.float32)
        # (gradient * denominator - sum) / std in one temporary: standard normal, if the plan was followed.
        noise = torch.sub(total.to(wide), gradient, alpha=self._plan.denominator).div_(-std)
        # Blocks too: weak noise on a small part of a large parameter does not show in the whole.
        whole = len(noise) - len(noise) % BLOCK
        energies = [torch.linalg.vector_norm(noise[:whole].view(-1, BLOCK), dim=1)]
        if whole < len(noise):
            energies.append(torch.linalg.vector_norm(noise[whole:])[None])
        return torch.cat([*(energy.square() for energy in energies), noise[:SAMPLE]])

    def _coordinate(self, fraction: float) -> float:
        plan = self._plan
        return clip_fraction.coordinate_of(
            fraction, max_grad_norm=plan.max_grad_norm, share=plan.clip_fraction_budget, denominator=plan.denominator
        )


@dataclass(frozen=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]
    size: int

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK)

    @property
    def sampled(self) -> int:
        return min(self.size, SAMPLE)


class _State:
    """The logarithms of all statistics of a run, and the values from which they are computed."""

    def __init__(self, parameters: Sequence[_Parameter]) -> None:
        self.parameters = list(parameters)
        blocks, sampled = [p.blocks for p in parameters], [p.sampled for p in parameters]
        kinds = np.concatenate([[True] * b + [False] * s for b, s in zip(blocks, sampled, strict=True)])
        self._of_blocks, self._of_sample = np.flatnonzero(kinds), np.flatnonzero(~kinds)
        self._first_block = np.cumsum([0, *blocks[:-1]])
        self._first_sampled = np.cumsum([0, *sampled[:-1]])
        sizes = [min(BLOCK, p.size - BLOCK * block) for p in parameters for block in range(p.blocks)]
        self._per_step = np.concatenate([sizes, [p.size for p in parameters]]).astype(float)
        self._energy = np.zeros_like(self._per_step)
        self._steps = 0
        self._others, self._neighbours = self._references()
        self._before: np.ndarray | None = None
        self._repeated = np.zeros((len(_SOURCES), len(parameters), len(CORRELATIONS)))
        # A union bound over all statistics; each is a martingale, so the level holds for all steps at once (Ville).
        self._alarm = math.log((len(self._per_step) + self._repeated[..., 0].size) / LEVEL)

    def _references(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each sampled coordinate that of another parameter and the one before it; -1 if there is none."""
        others, neighbours = [], []
        latest: dict[tuple[int, ...], int] = {}
        for index, parameter in enumerate(self.parameters):
            # Of equal shape if possible: a mode that keys noise by shape would give both the same.
            other = latest.get(parameter.shape, index - 1)
            latest[parameter.shape] = index
            common = min(parameter.sampled, self.parameters[other].sampled) if index else 0
            place = np.arange(parameter.sampled)
            others.append(np.where(place < common, self._first_sampled[other] + place, -1))
            neighbours.append(np.where(place > 0, self._first_sampled[index] + place - 1, -1))
        return np.concatenate(others), np.concatenate(neighbours)

    def judge(self, seen: np.ndarray) -> str | None:
        self._steps += 1
        blocks, sample = seen[self._of_blocks], seen[self._of_sample]
        self._energy += np.concatenate([blocks, np.add.reduceat(blocks, self._first_block)])
        terms = -np.log(RATIOS) * (self._steps * self._per_step)[:, None]
        terms -= self._energy[:, None] * (RATIOS**-2 - 1) / 2
        if (weak := np.flatnonzero(~(_average(terms) < self._alarm))).size:  # NaN is an alarm too
            return f"{self._name(int(weak[-1]))} got less noise than planned"
        none = np.full_like(sample, np.nan)
        for source, reference in enumerate((
            none if self._before is None else self._before,
            np.where(self._others < 0, np.nan, sample[self._others]),
            np.where(self._neighbours < 0, np.nan, sample[self._neighbours]),
        )):  # fmt: skip
            gains = np.nan_to_num(_gains(sample, reference))
            self._repeated[source] += np.add.reduceat(gains, self._first_sampled, axis=0)
        self._before = sample
        for source, index in np.argwhere(_average(self._repeated) >= self._alarm)[:1]:
            return f"the noise of {self.parameters[index].name} repeats {_SOURCES[source]}"
        return None

    def latest(self) -> dict[str, np.ndarray]:
        sample = self._before if self._before is not None else np.zeros(0)
        return dict(zip((p.name for p in self.parameters), np.split(sample, self._first_sampled[1:]), strict=True))

    def _name(self, cell: int) -> str:
        """Return the parameter that a statistic of the scale is about; blocks come before whole parameters."""
        blocks = len(self._per_step) - len(self.parameters)
        index = cell - blocks if cell >= blocks else int(np.searchsorted(self._first_block, cell, side="right")) - 1
        return self.parameters[index].name


def _gains(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the evidence of each coordinate that x repeats y, for each correlation."""
    x, y, left = x[:, None], y[:, None], 1 - CORRELATIONS**2
    found: np.ndarray = (x**2 - (x - CORRELATIONS * y) ** 2 / left - np.log(left)) / 2
    return found


def _average(evidence: np.ndarray) -> np.ndarray:
    # logsumexp: evidence grows with every step and would overflow.
    top = evidence.max(-1)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore", over="ignore"):  # no evidence at all is -inf, unbounded evidence inf
        found: np.ndarray = np.log(np.exp(evidence - top[..., None]).mean(-1)) + top
    return found


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None where PyTorch does not count."""
    local = place_of(tensor)[0]
    return None if local.is_inference() else int(local._version)


def _on_host(parts: Sequence[Tensor]) -> np.ndarray:
    if not parts:
        return np.zeros(0)
    joined = torch.cat([part.to(parts[0].device) for part in parts])
    [found] = fetch([joined]) if is_lazy(joined.device) else [joined.cpu()]
    return found.double().numpy()
