"""The ratio of noise to batch size over batch sizes and epochs: the benefit of a larger batch.

At a fixed epsilon a larger batch lowers the ratio, but only to a point: amplification by Poisson sampling works best
where the noise is large. The floor of the ratio is sigma_T / n, where every one of T steps uses every unit and sigma_T
is the noise of T unsampled Gaussians. The *knee* is the smallest batch whose ratio is within a quarter of the floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dp_accounting.gaussian_mechanism import get_sigma_gaussian

from lit_dpret.privacy.accounting.composition import FINE, composable_parts, epsilon_of
from lit_dpret.privacy.accounting.releases import GaussianRelease, Poisson
from lit_dpret.privacy.budget import Neighbours

KNEE_FACTOR = 1.25
"""The knee is the smallest batch whose ratio is at most this many times the floor."""

LOOSENESS = 0.03
"""The noise of a cell exceeds the least noise that meets the budget by at most this share; a test checks this."""

_MOST_BATCHES = 9
_CLOSE = 0.985


def knee_table(
    *,
    n: int,
    eps: float,
    delta: float,
    neighbours: Neighbours,
    batch: int,
    epochs: float,
    heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the noise-to-batch ratio over batch sizes and passes at one budget, with the knee of each column.

    The table uses Poisson sampling and privacy loss distributions, whatever the plan's own law and accountant are. The
    noise of every cell meets the budget and is at most `LOOSENESS` above a calibrated one: the discretisation is
    coarse, but pessimistic.

    Args:
        n: The number of units, if public, or a constant used in its place.
        eps: The budget's epsilon.
        delta: The budget's delta.
        neighbours: The budget's neighbouring relation.
        batch: The planned batch size, which is one of the rows.
        epochs: The planned number of passes, which is one of the columns.
        heartbeat: Called after every cell.
    """
    batches, columns = batch_sizes(n, batch), _columns(epochs)
    table: list[dict[str, Any]] = []
    knees: list[dict[str, Any]] = []
    for passes in columns:
        noises: list[float] = []
        found: int | None = None
        for size in reversed(batches):
            cell = _cell(n, size, passes, eps, delta, neighbours, _aim(noises))
            noises += [] if cell["noise_multiplier"] is None else [cell["noise_multiplier"]]
            table.append(cell)
            heartbeat()
            if cell["over_floor"] is not None and cell["over_floor"] <= KNEE_FACTOR:
                found = size
        knees.append({"epochs": passes, "batch": found})
    return {
        "eps": eps,
        "factor": KNEE_FACTOR,
        "sampling": "poisson",
        "batches": batches,
        "epochs": columns,
        "cells": sorted(table, key=lambda cell: (cell["batch"], cell["epochs"])),
        "knees": knees,
    }


def batch_sizes(n: int, batch: int) -> list[int]:
    """Return the planned batch and its doublings, for a table up to half of the data."""
    doubled = [batch * 2.0**k for k in range(-3, 20)]
    sizes = [int(size) for size in doubled if 8 <= size <= n / 2 and size % 1 == 0]
    below = sum(size < batch for size in sizes)
    spare = max(0, len(sizes) - _MOST_BATCHES)
    sizes = sizes[min(spare, max(0, below - 1)) :][:_MOST_BATCHES]
    return sorted({batch, *sizes})


def _columns(epochs: float) -> list[float]:
    """Return the planned passes among fewer and more; if they are few already, only more."""
    lowest = -2 if epochs >= 10 else -1 if epochs >= 3 else 0
    factors = {-2: 0.1, -1: 1 / 3, 0: 1.0, 1: 3.0, 2: 10.0, 3: 30.0}
    return [factors[k] * epochs for k in range(lowest, lowest + 4)]


def _aim(noises: Sequence[float]) -> float | None:
    """Return a first guess for the noise of the next batch, which is half as large as the last one."""
    if len(noises) < 2:
        return noises[-1] if noises else None
    return noises[-1] * max(0.5, min(1.0, noises[-1] / noises[-2]))


def _cell(
    n: int, batch: int, epochs: float, eps: float, delta: float, neighbours: Neighbours, start: float | None
) -> dict[str, Any]:
    """Return one cell of the table, with a noise that meets the budget.

    The noise is None if no whole number of steps makes roughly that many passes, or if no noise meets the budget.
    """
    steps = max(1, round(epochs * n / batch))
    cell: dict[str, Any] = {"batch": batch, "epochs": epochs, "steps": 0}
    cell |= dict.fromkeys(("noise_multiplier", "noise_to_batch", "over_floor"))
    if not 0.75 < steps * batch / n / epochs < 1.34:
        return cell
    cell |= {"epochs": steps * batch / n, "steps": steps}
    # This many unsampled releases need noise of this multiplier (Balle and Wang 2018).
    factor = 2 if neighbours == "replace_one" else 1
    floor = float(get_sigma_gaussian(eps, delta)) * math.sqrt(steps) * factor / n
    noise = least_noise(
        rate=min(1.0, batch / n), steps=steps, eps=eps, delta=delta, neighbours=neighbours, start=start or floor * batch
    )
    if noise is not None:
        cell |= {"noise_multiplier": noise, "noise_to_batch": noise / batch, "over_floor": noise / batch / floor}
    return cell


def least_noise(
    *, rate: float, steps: int, eps: float, delta: float, neighbours: Neighbours, start: float
) -> float | None:
    """Return a noise multiplier within the budget, close to the least; None if there is none."""
    law = Poisson(sample_rate=rate)

    def spent(noise: float) -> float:
        parts = composable_parts([GaussianRelease(noise_multiplier=noise, law=law, count=steps)])
        return epsilon_of(parts, delta, neighbours, "pld", _width(noise, rate, eps)) if parts else math.inf

    noise = max(start, 0.2)
    good: tuple[float, float] | None = None
    bad: tuple[float, float] | None = None
    for _ in range(40):
        value = spent(noise)
        if _CLOSE * eps <= value <= eps:
            return noise
        if value <= eps:
            good = (noise, value)
        else:
            bad = (noise, value)
        noise = _next(good, bad, eps)
        if not 1e-3 < noise < 1e6:
            break
    return None if good is None else good[0]


def _width(noise: float, rate: float, eps: float) -> float:
    """Return a discretisation that is coarse relative to the budget and fine relative to the loss of one step."""
    one_step = rate * math.sqrt(math.expm1(min(noise**-2, 50.0)))
    return max(FINE, min(eps / 3000, one_step / 5))


def _next(good: tuple[float, float] | None, bad: tuple[float, float] | None, eps: float) -> float:
    if good is None or bad is None:
        noise, value = good or bad or (1.0, eps)
        step = 1.5 if value == math.inf or value <= 0 else min(2.0, max(1.02, abs(value / eps) ** 0.4))
        return noise * (step if good is None else 1 / max(1.02, min(2.0, (eps / max(value, 1e-12)) ** 0.4)))
    if not 0 < good[1] < bad[1] < math.inf:
        return math.sqrt(good[0] * bad[0])
    share = math.log(_CLOSE**0.5 * eps / good[1]) / math.log(bad[1] / good[1])
    share = min(0.95, max(0.05, share))
    return math.exp((1 - share) * math.log(good[0]) + share * math.log(bad[0]))
