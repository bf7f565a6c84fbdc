"""Reading epsilon and delta off dp-accounting's privacy loss distributions, on arrays.

The library walks through some 100,000 values of the loss in Python for each question. These are the
same sums, taken from the largest loss down in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def read_epsilon(distribution: Any, delta: float) -> float:
    """The library's ``get_epsilon_for_delta``: the least epsilon that the distribution satisfies at ``delta``."""
    return max(_epsilon(*mass, delta) for mass in _masses(distribution))


def read_deltas(distribution: Any, epsilons: Sequence[float]) -> np.ndarray:
    """The library's ``get_delta_for_epsilon`` at several epsilons, in any order."""
    wanted = np.asarray(epsilons, dtype=float)
    return np.asarray(np.max([_deltas(*mass, wanted) for mass in _masses(distribution)], axis=0))


def _masses(distribution: Any) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """For each direction: the mass at infinity, the losses from the largest down, and their probabilities."""
    both = (distribution._pmf_remove, distribution._pmf_add)
    found = []
    for pmf in both[:1] if distribution._symmetric else both:
        dense = pmf.to_dense_pmf()
        losses = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
        found.append((float(dense._infinity_mass), losses[::-1], np.asarray(dense._probs)[::-1]))
    return found


def _above(infinite: float, losses: np.ndarray, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mass of the 0, 1, 2, ... largest losses, infinity included, under either distribution."""
    with np.errstate(over="ignore"):
        other = np.exp(-losses) * probs
    return np.cumsum(np.append(infinite, probs)), np.cumsum(np.append(0.0, other))


def _epsilon(infinite: float, losses: np.ndarray, probs: np.ndarray, delta: float) -> float:
    if infinite > delta:
        return math.inf
    upper, lower = _above(infinite, losses, probs)
    with np.errstate(all="ignore"):
        crossing = np.log((upper - delta) / lower)
    stops = np.flatnonzero((upper[:-1] > delta) & (lower[:-1] > 0) & (crossing[:-1] >= losses))
    stop = int(stops[0]) if stops.size else len(losses)
    # A loss so large that exp(-loss) is zero in floating point.
    vanished = np.flatnonzero((upper[1 : stop + 1] >= delta) & (lower[1 : stop + 1] == 0))
    if vanished.size:
        return max(0.0, float(losses[vanished[0]]))
    return 0.0 if upper[stop] <= lower[stop] + delta else float(crossing[stop])


def _deltas(infinite: float, losses: np.ndarray, probs: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    upper, lower = _above(infinite, losses, probs)
    larger = np.searchsorted(-losses, -epsilons, side="left")
    with np.errstate(over="ignore", invalid="ignore"):
        weighed = np.where(lower[larger] > 0, np.exp(epsilons) * lower[larger], 0.0)
    return np.asarray(upper[larger] - weighed)
