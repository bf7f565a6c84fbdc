"""dp-accounting's privacy loss distributions of the Gaussian, with its inverse found for all values at once.

The library inverts the privacy loss value by value in Python, which takes most of the time of an
epsilon. Here the same formulas run on arrays, and everything else is the library's own: tails,
discretisation, composition, mixtures. A test holds every delta against the library's.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import stats


class GaussianLoss(GaussianPrivacyLoss):  # type: ignore[misc]
    """The library's privacy loss of a sampled Gaussian of sensitivity 1.

    Guarantees:
        - ``get_delta_for_epsilon`` of many values is the library's, up to rounding.
        - Everything else is inherited.
    """

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        if np.ndim(epsilon) == 0:
            return super().get_delta_for_epsilon(epsilon)
        losses = np.asarray(epsilon, dtype=float)
        rate, kind = self.sampling_prob, self.adjacency_type
        inside = np.full(losses.shape, True)
        deltas = np.zeros(losses.shape)
        if rate < 1 and kind == AdjacencyType.ADD:
            inside = losses < -math.log1p(-rate)
        elif rate < 1 and kind == AdjacencyType.REMOVE:
            inside = losses > math.log1p(-rate)
            deltas[~inside] = -np.expm1(losses[~inside])
        chosen = losses[inside]
        points = self._points(chosen)
        deltas[inside] = self.mu_upper_cdf(points) - np.exp(chosen + self.mu_lower_log_cdf(points))
        return np.clip(deltas, 0, 1)

    def _points(self, losses: np.ndarray) -> np.ndarray:
        """Where the privacy loss has these values: the library's formulas for each adjacency."""
        rate, variance = self.sampling_prob, self._standard_deviation**2
        if self.adjacency_type == AdjacencyType.REPLACE:
            return self._points_of_replace(losses, rate, variance)
        towards = 1.0 if self.adjacency_type == AdjacencyType.REMOVE else -1.0
        unsampled = losses if rate == 1 else towards * _unsampled(towards * losses, rate)
        if towards > 0:
            return np.asarray(-0.5 - unsampled * variance)
        return np.asarray(0.5 - unsampled * variance)

    @staticmethod
    def _points_of_replace(losses: np.ndarray, rate: float, variance: float) -> np.ndarray:
        if rate == 1:
            return np.asarray(-losses * variance / 2)
        size = np.abs(losses)
        with np.errstate(divide="ignore"):
            log_sinh = size / 2 + np.log1p(-np.exp(-size)) - math.log(2)
        log = 0.5 / variance + math.log1p(-rate) - math.log(rate) + log_sinh
        # asinh(exp(log)), which for a large log is log + ln 2.
        asinh = np.where(log > 300, log + math.log(2), np.arcsinh(np.exp(np.minimum(log, 300))))
        return np.asarray(variance * (-np.sign(losses) * asinh - losses / 2))


def _unsampled(losses: np.ndarray, rate: float) -> np.ndarray:
    """log(1 + (exp(loss) - 1) / rate): the loss that the Gaussian without sampling has at the same point."""
    # In the library's order of operations, so that rounding is the library's too.
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = losses + np.log(1 / rate)
        return np.asarray(scaled + np.log1p(-np.exp(np.log(1 / rate - 1) - scaled)))


def gaussian_pld(noise: float, rate: float, relation: NeighboringRelation, width: float) -> PrivacyLossDistribution:
    """The library's ``from_gaussian_mechanism``: one release whose batch held each unit with probability ``rate``."""
    one_way = partial(_pmf, noise, rate, width)
    if relation == NeighboringRelation.REPLACE_ONE:
        return PrivacyLossDistribution(one_way(AdjacencyType.REPLACE))
    remove = one_way(AdjacencyType.REMOVE)
    # Without sampling both directions are the same distribution.
    return PrivacyLossDistribution(remove) if rate == 1 else PrivacyLossDistribution(remove, one_way(AdjacencyType.ADD))


def truncated_pld(
    noise: float, rate: float, cap: int, n: int, relation: NeighboringRelation, width: float
) -> PrivacyLossDistribution:
    """The library's ``from_truncated_subsampled_gaussian_mechanism`` (Ganesh et al. 2025, arXiv 2508.15089)."""
    whole = gaussian_pld(noise, rate, relation, width)
    cut = float(stats.binom.sf(cap - 1, n - 1, rate))
    if cut == 0.0:
        return whole
    drawn = float(stats.binom.sf(cap, n, rate)) * cap / cut / n
    return gaussian_pld(noise / 2, drawn, NeighboringRelation.REPLACE_ONE, width).compute_mixture(whole, cut)


def _pmf(noise: float, rate: float, width: float, kind: AdjacencyType) -> Any:
    loss = GaussianLoss(noise, sampling_prob=rate, adjacency_type=kind)
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / width), math.ceil(bounds.epsilon_upper / width)
    deltas = loss.get_delta_for_epsilon(np.arange(low, high + 1) * width)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(width, low, high, deltas)
