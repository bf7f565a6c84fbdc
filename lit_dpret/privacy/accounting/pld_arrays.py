"""Composing dp-accounting's privacy loss distributions and reading epsilon and delta off them, on arrays.

The library walks through some 100,000 values of the loss in Python for each question. These are the
same sums, taken from the largest loss down in the same order. And before it composes, it bounds the
result by forty logarithms of sums of exponentials that never leave the range of floating point; here
they are powers of one array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import fft

_TAIL = 1e-15
_ORDERS = 20


def compose_times(distribution: Any, count: int) -> PrivacyLossDistribution:
    """The library's ``self_compose``: the distribution of ``count`` releases, tails above its Chernoff bounds lost."""
    remove = _times(distribution._pmf_remove.to_dense_pmf(), count)
    if distribution._symmetric:
        return PrivacyLossDistribution(remove)
    return PrivacyLossDistribution(remove, _times(distribution._pmf_add.to_dense_pmf(), count))


def _times(pmf: Any, count: int) -> Any:
    probs = np.asarray(pmf._probs)
    low, high = _bounds(probs, count)
    length = fft.next_fast_len(max(high - low + 1, len(probs)))
    whole = np.real(fft.ifft(fft.fft(probs, length) ** count))
    infinite = _TAIL - math.expm1(count * math.log1p(-pmf._infinity_mass))
    first = pmf._lower_loss * count + low
    return DensePLDPmf(
        pmf._discretization, first, np.roll(whole, -low)[: high - low + 1], infinite, pmf._pessimistic_estimate
    )


def _bounds(probs: np.ndarray, count: int) -> tuple[int, int]:
    """Outside of them lies less than `_TAIL` of the mass of the composition, by Chernoff's bound."""
    low, high = 0, (len(probs) - 1) * count
    base = np.exp(np.arange(len(probs)) / len(probs))
    for power in (base, 1 / base):
        sign = 1 if power is base else -1
        weighed = probs
        for k in range(1, _ORDERS + 1):
            weighed = weighed * power
            order = sign * k / len(probs)
            bound = (count * math.log(float(weighed.sum())) + math.log(2 / _TAIL)) / order
            if sign > 0:
                high = min(high, math.ceil(bound))
            else:
                low = max(low, math.floor(bound))
    return low, high


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
