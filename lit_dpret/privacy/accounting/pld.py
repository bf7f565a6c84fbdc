"""dp-accounting's privacy loss distributions of the Gaussian, built, composed and evaluated on whole arrays.

The library inverts the privacy loss value by value in Python, and walks through some 100,000 values for each question.
Here the same formulas run on arrays, in the same order of operations; tails, discretisation and mixtures are the
library's own. Tests compare every number with the library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import fft, optimize, special, stats

from lit_dpret.errors import AccountingMemoryError

P = ParamSpec("P")
T = TypeVar("T")


def within_memory(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that runs out of memory say what needs less, in place of a library's ``std::bad_alloc``."""

    @wraps(function)
    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except MemoryError as error:
            raise AccountingMemoryError(
                "Memory ran out while epsilon was computed (privacy.accountant=pld). The need for memory grows with "
                "epsilon and the number of steps: free memory, lower privacy.eps or plan fewer steps "
                "(trainer.max_steps, max_epochs), or set privacy.accountant=rdp with datamodule.sampling=poisson, "
                "which needs almost no memory and gives a larger epsilon. If training had begun, continue it with "
                "resume=true."
            ) from error

    return told


class GaussianLoss(GaussianPrivacyLoss):  # type: ignore[misc]
    """The library's privacy loss of a sampled Gaussian of sensitivity 1; deltas of many epsilons at once."""

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        if np.ndim(epsilon) == 0:
            return super().get_delta_for_epsilon(epsilon)
        return deltas_at(self, self._points, np.asarray(epsilon, dtype=float), self.sampling_prob)

    def _points(self, losses: np.ndarray) -> np.ndarray:
        rate, variance = self.sampling_prob, self._standard_deviation**2
        if self.adjacency_type == AdjacencyType.REPLACE:
            return self._points_of_replace(losses, rate, variance)
        towards = 1.0 if self.adjacency_type == AdjacencyType.REMOVE else -1.0
        # The loss of adding is minus that of removing, read from the other side.
        unsampled = losses if rate == 1 else towards * _unsampled(towards * losses, rate)
        if towards > 0:
            return np.asarray(-0.5 - unsampled * variance)
        return np.asarray(0.5 - unsampled * variance)

    @staticmethod
    def _points_of_replace(losses: np.ndarray, rate: float, variance: float) -> np.ndarray:
        if rate == 1:
            return np.asarray(-losses * variance / 2)
        # By size and sign: the loss of replacing is an odd function.
        size = np.abs(losses)
        with np.errstate(divide="ignore"):
            # log(sinh(size / 2)) without the exponential, which would overflow.
            log_sinh = size / 2 + np.log1p(-np.exp(-size)) - math.log(2)
        log = 0.5 / variance + math.log1p(-rate) - math.log(rate) + log_sinh
        # asinh(exp(log)), which for a large log is log + ln 2.
        asinh = np.where(log > 300, log + math.log(2), np.arcsinh(np.exp(np.minimum(log, 300))))
        return np.asarray(variance * (-np.sign(losses) * asinh - losses / 2))


def _unsampled(losses: np.ndarray, rate: float) -> np.ndarray:
    """Return log(1 + (exp(loss) - 1) / rate): the loss of the Gaussian without sampling at the same point."""
    # In the library's order of operations, so that the rounding is the library's too.
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = losses + np.log(1 / rate)
        return np.asarray(scaled + np.log1p(-np.exp(np.log(1 / rate - 1) - scaled)))


def deltas_at(loss: Any, points: Callable[[np.ndarray], np.ndarray], epsilons: np.ndarray, rate: float) -> np.ndarray:
    """Return deltas as the library's ``get_delta_for_epsilon`` does; ``points`` finds where the loss has a value."""
    inside = np.full(epsilons.shape, True)
    deltas = np.zeros(epsilons.shape)
    if rate < 1 and loss.adjacency_type == AdjacencyType.ADD:
        inside = epsilons < -math.log1p(-rate)
    # Sampling bounds the loss on one side: beyond that bound there is no point to look up.
    elif rate < 1 and loss.adjacency_type == AdjacencyType.REMOVE:
        inside = epsilons > math.log1p(-rate)
        deltas[~inside] = -np.expm1(epsilons[~inside])
    chosen = epsilons[inside]
    found = points(chosen)
    deltas[inside] = loss.mu_upper_cdf(found) - np.exp(chosen + loss.mu_lower_log_cdf(found))
    # A difference of two nearly equal numbers may come out a little below zero.
    return np.clip(deltas, 0, 1)


@within_memory
def gaussian_pld(noise: float, rate: float, relation: NeighboringRelation, width: float) -> PrivacyLossDistribution:
    """Return the library's ``from_gaussian_mechanism``: one release that held each unit with probability ``rate``."""
    one_way = partial(_pmf, noise, rate, width)
    if relation == NeighboringRelation.REPLACE_ONE:
        return PrivacyLossDistribution(one_way(AdjacencyType.REPLACE))
    remove = one_way(AdjacencyType.REMOVE)
    # Without sampling both directions are the same distribution.
    return PrivacyLossDistribution(remove) if rate == 1 else PrivacyLossDistribution(remove, one_way(AdjacencyType.ADD))


@within_memory
def truncated_pld(
    noise: float, rate: float, cap: int, n: int, relation: NeighboringRelation, width: float
) -> PrivacyLossDistribution:
    """Return the library's ``from_truncated_subsampled_gaussian_mechanism`` (Ganesh et al. 2025, arXiv 2508.15089)."""
    whole = gaussian_pld(noise, rate, relation, width)
    p_truncated = float(stats.binom.sf(cap - 1, n - 1, rate))
    if p_truncated == 0.0:
        return whole
    # As in the library: where the batch was cut, a missing unit lets another one in, which is a replacement.
    drawn = float(stats.binom.sf(cap, n, rate)) * cap / p_truncated / n
    return gaussian_pld(noise / 2, drawn, NeighboringRelation.REPLACE_ONE, width).compute_mixture(whole, p_truncated)


def _pmf(noise: float, rate: float, width: float, kind: AdjacencyType) -> Any:
    loss = GaussianLoss(noise, sampling_prob=rate, adjacency_type=kind)
    bounds = loss.connect_dots_bounds()
    # Outwards to the grid, so that no loss is left out.
    low, high = math.floor(bounds.epsilon_lower / width), math.ceil(bounds.epsilon_upper / width)
    return connect_dots(width, low, loss.get_delta_for_epsilon(np.arange(low, high + 1) * width))


def connect_dots(width: float, low: int, deltas: np.ndarray) -> Any:
    """Return the library's ``create_pmf_pessimistic_connect_dots_fixed_gap``: losses from ``low`` on, ``width`` apart.

    The library refuses deltas that rise: lowering them would understate the loss.
    """
    if len(deltas) <= _SPARSE or np.any(np.diff(deltas) > _ROUNDING):  # few are kept and composed in another way
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(width, low, low + len(deltas) - 1, deltas)
    # Rises within rounding are evened out downwards; larger rises went to the library above.
    deltas = np.minimum.accumulate(deltas)
    steps = np.diff(deltas)
    probs = np.empty_like(deltas)
    probs[0] = 1 - deltas[0] + steps[0] / math.expm1(width)
    probs[1:-1] = (steps[1:] - steps[:-1] * math.exp(width)) / math.expm1(width)
    probs[-1] = steps[-1] / math.expm1(-width)
    return DensePLDPmf(width, low, np.maximum(0.0, probs), deltas[-1], True)


_SPARSE, _ROUNDING = 1000, 1e-12
_TAIL = 1e-15
_ORDERS = 20
_ROUNDOFF = 2.0**-53
_TILT = 1e-8  # where the tail is exact; it is nearly exact for every delta that people choose


@within_memory
def compose_times(distribution: Any, count: int) -> PrivacyLossDistribution:
    """Return the distribution of ``count`` releases; tails above Chernoff's bounds are lost.

    No loss has less mass than in exact arithmetic: the amount that rounding may have taken is added. The library's
    ``self_compose`` is off by ``count`` roundoffs anywhere, so at a delta no larger than that its epsilon can be too
    small.
    """
    remove = _times(distribution._pmf_remove.to_dense_pmf(), count)
    if distribution._symmetric:
        return PrivacyLossDistribution(remove)
    return PrivacyLossDistribution(remove, _times(distribution._pmf_add.to_dense_pmf(), count))


def _times(pmf: Any, count: int) -> Any:
    probs = np.maximum(np.asarray(pmf._probs), 0.0)
    low, high = _bounds(probs, count)
    infinite = _TAIL - math.expm1(count * math.log1p(-pmf._infinity_mass))
    whole = _power(probs, count, low, high)
    # Rounding is as large in the far tail as in the middle, and a small delta is read from the tail. The tail is the
    # middle of the distribution tilted by exp(order * loss). Both results bound every probability, and so does their
    # minimum.
    order = _order(probs, count)
    tilted = probs * np.exp(order * np.arange(len(probs)))
    scale = float(tilted.sum())
    tilted = tilted / scale
    # The tilted distribution has its own bounds, wider above: what wraps around would land where undoing the tilt
    # multiplies by a large factor.
    wide = max(high, _bounds(tilted, count)[1])
    back = _power(tilted, count, low, wide)[: high - low + 1]
    slack = 1 + 8 * (count + 8) * _ROUNDOFF * (1 + abs(math.log(scale)) + order * len(probs))
    with np.errstate(over="ignore"):
        back *= np.exp(count * math.log(scale) - order * np.arange(low, high + 1)) * slack
    first = pmf._lower_loss * count + low
    return DensePLDPmf(pmf._discretization, first, np.minimum(whole, back), infinite, pmf._pessimistic_estimate)


@within_memory
def compose_with(first: Any, second: Any) -> PrivacyLossDistribution:
    """Return the library's composition of two distributions; what rounding may have taken is added to every loss."""

    def together(one: Any, other: Any) -> Any:
        found = pld_pmf.compose_pmfs(one, other, 0.0).to_dense_pmf()
        sizes = [float(np.linalg.norm(pmf.to_dense_pmf()._probs)) for pmf in (one, other)]
        off = 3 * _error(one.size + other.size) * sizes[0] * sizes[1]
        raised = np.maximum(np.asarray(found._probs), 0.0) + off
        return DensePLDPmf(
            found._discretization, found._lower_loss, raised, found._infinity_mass, found._pessimistic_estimate
        )

    remove = together(first._pmf_remove, second._pmf_remove)
    if first._symmetric and second._symmetric:
        return PrivacyLossDistribution(remove)
    return PrivacyLossDistribution(remove, together(first._pmf_add, second._pmf_add))


def _error(length: int) -> float:
    """Bound a transform's relative error (Higham, Accuracy and Stability of Numerical Algorithms, Theorem 24.2)."""
    return 8 * math.log2(length) * _ROUNDOFF


def _power(probs: np.ndarray, count: int, low: int, high: int) -> np.ndarray:
    """Return the ``count``-fold convolution at indices ``low`` to ``high``, each raised by its possible rounding error.

    What is outside these indices is added somewhere inside. With p the probabilities, F their transform of length L
    and e the relative error of a transform, a value is off by at most

        (1 / L) sum |F^ - F| n |F|^(n - 1)  <=  n e |p| sqrt(sum |F|^(2n - 2) / L)

    by Cauchy and Schwarz and Parseval, with Euclidean norms; plus what the power and the inverse transform add.
    """
    length = fft.next_fast_len(max(high - low + 1, len(probs)))
    half = fft.rfft(probs, length)
    powers = half**count
    error = _error(length)
    # The powers of the sizes come from those of the transform, with room for their rounding: two fewer powers to
    # compute.
    sizes, raised = np.abs(half), np.abs(powers)
    del half
    room = (1 + 4 * count * _ROUNDOFF) * math.sqrt(2 / len(sizes))
    mean = room * float(np.linalg.norm(raised))
    before = room * float(np.linalg.norm(np.divide(raised, sizes, out=np.zeros_like(raised), where=sizes > 0)))
    off = count * error * float(np.linalg.norm(probs)) * before + (8 * count * _ROUNDOFF + error) * mean
    del sizes, raised
    # The other half is the mirror image. The inverse gets both halves, because the inverse for one half rounds
    # differently.
    spectrum = np.empty(length, complex)
    spectrum[: len(powers)] = powers
    np.conj(powers[1 : (length + 1) // 2][::-1], out=spectrum[len(powers) :])
    del powers
    whole = np.roll(np.real(fft.ifft(spectrum, overwrite_x=True)), -low)[: high - low + 1]
    del spectrum
    return np.asarray(np.maximum(whole, 0.0) + off)


def _order(probs: np.ndarray, count: int) -> float:
    """Return the order at which Chernoff's bound on the composition is smallest, for a tail of `_TILT`."""
    places = np.arange(len(probs)) / len(probs)

    def reach(log_order: float) -> float:
        order = math.exp(log_order)
        return (count * math.log(float(probs @ np.exp(order * places))) - math.log(_TILT)) / order

    found = optimize.minimize_scalar(reach, bounds=(math.log(1e-3), math.log(300.0)), method="bounded")
    return math.exp(float(found.x)) / len(probs)


def _bounds(probs: np.ndarray, count: int) -> tuple[int, int]:
    """Return bounds outside of which the composition has less than `_TAIL` of its mass, by Chernoff's bound."""
    low, high = 0, (len(probs) - 1) * count
    # Orders of the moment generating function that keep exp() finite for any length.
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


@within_memory
def read_epsilon(distribution: Any, delta: float) -> float:
    """Return the least epsilon at ``delta``, as the library's ``get_epsilon_for_delta`` does."""
    return max(_epsilon(*mass, delta) for mass in _masses(distribution))


@within_memory
def read_deltas(distribution: Any, epsilons: Sequence[float]) -> np.ndarray:
    """Return the deltas at several epsilons, in any order, as the library's ``get_delta_for_epsilon`` does."""
    wanted = np.asarray(epsilons, dtype=float)
    return np.asarray(np.max([_deltas(*mass, wanted) for mass in _masses(distribution)], axis=0))


@lru_cache(maxsize=1)  # a card reads one distribution at many deltas
def _masses(distribution: Any) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return, for each direction, the losses in descending order, and the mass above them under both distributions."""
    both = (distribution._pmf_remove, distribution._pmf_add)
    found = []
    for pmf in both[:1] if distribution._symmetric else both:
        dense = pmf.to_dense_pmf()
        losses = ((np.arange(dense.size) + dense._lower_loss) * dense._discretization)[::-1]
        probs = np.asarray(dense._probs)[::-1]
        with np.errstate(over="ignore"):
            other = np.exp(-losses) * probs
        upper = np.cumsum(np.append(float(dense._infinity_mass), probs))
        found.append((losses, upper, np.cumsum(np.append(0.0, other))))
    return found


def _epsilon(losses: np.ndarray, upper: np.ndarray, lower: np.ndarray, delta: float) -> float:
    # An infinite loss alone has more mass than delta.
    if upper[0] > delta:
        return math.inf
    with np.errstate(all="ignore"):
        crossing = np.log((upper - delta) / lower)
    stops = np.flatnonzero((upper[:-1] > delta) & (lower[:-1] > 0) & (crossing[:-1] >= losses))
    stop = int(stops[0]) if stops.size else len(losses)
    # A loss so large that exp(-loss) is zero in floating point.
    vanished = np.flatnonzero((upper[1 : stop + 1] >= delta) & (lower[1 : stop + 1] == 0))
    if vanished.size:
        return max(0.0, float(losses[vanished[0]]))
    return 0.0 if upper[stop] <= lower[stop] + delta else float(crossing[stop])


def _deltas(losses: np.ndarray, upper: np.ndarray, lower: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    larger = np.searchsorted(-losses, -epsilons, side="left")
    with np.errstate(over="ignore", invalid="ignore"):
        weighed = np.where(lower[larger] > 0, np.exp(epsilons) * lower[larger], 0.0)
    return np.asarray(upper[larger] - weighed)


def log_ratio(chances: np.ndarray, shifts: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the log density of a mixture of unit normals at ``shifts`` over that of the one at 0, at each ``x``."""
    terms = shifts[:, None] * x[None, :] - shifts[:, None] ** 2 / 2
    return np.asarray(special.logsumexp(terms, axis=0, b=chances[:, None]))


def mean_loss(chances: np.ndarray, shifts: np.ndarray) -> float:
    """Return the average privacy loss of that mixture, its Kullback-Leibler divergence, by quadrature."""
    # Twelve deviations beyond all means: the rest is below rounding.
    x = np.linspace(-12, float(shifts.max()) + 12, 20_001)
    loss = log_ratio(chances, shifts, x)
    # The mixture's density is the normal's times exp(loss), which on its own may overflow.
    density = np.exp(loss - x**2 / 2) / math.sqrt(2 * math.pi)
    return float(np.sum(density * loss) * (x[1] - x[0]))
