"""The guarantee for a person with several units, or for a text that occurs several times.

A Poisson batch holds Binomial(k, q) of a user's k units, and j of them move the sum by at most j C: a mixture of
Gaussians (Choquette-Choo et al. 2024, arXiv 2310.15526, Corollary 4.7). Truncation is paid for out of delta;
docs/derivations.md has the argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MixtureGaussianPrivacyLoss
from scipy import stats

from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.privacy.accounting.accountant import truncation_delta
from lit_dpret.privacy.accounting.composition import (
    FINE,
    LARGEST_EPSILON,
    RELATIONS,
    Part,
    beyond_reach,
    composable_parts,
    delta_at,
    epsilon,
    simplest_law,
)
from lit_dpret.privacy.accounting.pld import (
    compose_times,
    compose_with,
    connect_dots,
    deltas_at,
    gaussian_pld,
    log_ratio,
    mean_loss,
    read_deltas,
    read_epsilon,
    within_memory,
)
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    Poisson,
    Release,
    SamplingLaw,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import Neighbours, require_delta
from lit_dpret.settings import is_whole

MOST_UNITS = 1000

# The maximum number of distinct values of the privacy loss, and of those times the parts of the mixture.
_MOST_BUCKETS = 200_000
_MOST_TERMS = 4_000_000


def group_epsilon(
    releases: Iterable[Release], *, delta: float, units: int, neighbours: Neighbours = "zero_out"
) -> float:
    """Return the epsilon of all ``releases`` for a person with up to ``units`` units, or for copies of one text.

    Guarantees:
        - It is a pessimistically discretised upper bound that rises with ``units``; for one unit it is `epsilon` by
          ``pld``.
        - Under Poisson sampling it is at most what group privacy derives from the curve for one unit (Vadhan 2017, "The
          Complexity of Differential Privacy", Lemma 2.2). Without sampling it is that of the noise multiplier divided
          by ``units``.
        - It is infinite above `LARGEST_EPSILON`, without privacy, and where truncation alone uses up ``delta``.
    """
    return epsilon_of_several([(releases, units)], delta=delta, neighbours=neighbours)


def epsilon_of_several(
    runs: Iterable[tuple[Iterable[Release], int]], *, delta: float, neighbours: Neighbours = "zero_out"
) -> float:
    """Return an upper bound on the epsilon of several runs for a person with a given maximum of units in each."""
    require_delta(delta)
    made = [(list(releases), units) for releases, units in runs]
    for _, units in made:
        check_max_units(units)
    releases = [release for own, _ in made for release in own]
    # One unit is the ordinary claim, which supports more laws and relations.
    if all(units == 1 for _, units in made):
        return epsilon(releases, delta=delta, neighbours=neighbours)
    for release in releases:
        if isinstance(release, GaussianRelease):
            _check_law(release.law, neighbours)
    together = composable_parts(releases)
    if together is None or beyond_reach(together, neighbours):
        return math.inf
    if not together:
        return 0.0
    # Run by run: each has its own number of units, and several runs may share a law.
    parts = [(part, units) for own, units in made for part in composable_parts(own) or ()]
    if all(isinstance(part.law, FullBatch) for part, _ in parts):
        wider = [GaussianRelease(noise_multiplier=p.noise_multiplier / units, law=p.law) for p, units in parts]
        return epsilon(wider, delta=delta, neighbours=neighbours)
    lost = [units * truncation_delta(p.law, p.count) for p, units in parts if isinstance(p.law, TruncatedPoisson)]
    # A cut batch may reveal each of the units; the rest of delta goes to the untruncated law.
    spare = delta - math.fsum(lost)
    return _composed_epsilon(tuple(parts), spare) if spare > 0 else math.inf


def check_max_units(units: int) -> None:
    """Refuse a number of units that is not a whole number from 1 to `MOST_UNITS`."""
    if not is_whole(units) or not 1 <= units <= MOST_UNITS:
        raise ConfigurationError(f"privacy.max_units_per_user={units!r} is not an integer from 1 to {MOST_UNITS}.")


def _check_law(law: SamplingLaw, neighbours: Neighbours) -> None:
    kinds: dict[Neighbours, tuple[str, ...]] = {
        "zero_out": ("poisson", "truncated_poisson", "shuffle", "full_batch"),
        "add_or_remove": ("poisson", "full_batch"),
        "replace_one": ("shuffle", "full_batch"),
    }
    law = simplest_law(law)
    if law.kind not in kinds[neighbours]:
        raise UnsupportedAccountingError(
            f"datamodule.sampling={law.kind} under privacy.neighbours={neighbours}: no epsilon for several units "
            f"together is known. Under {neighbours} it is known for {' and '.join(kinds[neighbours])}"
            + ("." if isinstance(law, FixedSize) else f", and {law.kind} is supported under zero_out.")
        )


def group_delta_at(
    epsilons: Sequence[float], releases: Iterable[Release], *, units: int, neighbours: Neighbours = "zero_out"
) -> list[float]:
    """Return the delta of all ``releases`` at each epsilon, for a person with up to ``units`` units."""
    check_max_units(units)
    releases = list(releases)
    if units == 1:
        return delta_at(epsilons, releases, neighbours=neighbours)
    for release in releases:
        if isinstance(release, GaussianRelease):
            _check_law(release.law, neighbours)
    parts = composable_parts(releases)
    if parts is None or beyond_reach(parts, neighbours):
        return [1.0] * len(epsilons)
    if not parts:
        return [0.0] * len(epsilons)
    if all(isinstance(part.law, FullBatch) for part in parts):
        wider = [GaussianRelease(noise_multiplier=p.noise_multiplier / units, law=p.law)
                 for p in parts for _ in range(p.count)]  # fmt: skip
        return delta_at(epsilons, wider, neighbours=neighbours)
    total = _composed(tuple((part, units) for part in parts))
    if total is None:
        return [1.0] * len(epsilons)
    lost = [truncation_delta(part.law, part.count) for part in parts if isinstance(part.law, TruncatedPoisson)]
    extra = units * math.fsum(lost)
    return [min(1.0, max(0.0, float(value)) + extra) for value in read_deltas(total, epsilons)]


def _composed_epsilon(parts: tuple[tuple[Part, int], ...], delta: float) -> float:
    total = _composed(parts)
    if total is None:
        return math.inf
    value = read_epsilon(total, delta)
    return value if value <= LARGEST_EPSILON else math.inf


@lru_cache(maxsize=32)
def _composed(parts: tuple[tuple[Part, int], ...]) -> PrivacyLossDistribution | None:
    """Return the distribution of all parts with one person's units in each; None if epsilon is too large."""
    if sum(part.count * mean_loss(*_mixture(part, units)) for part, units in parts) > LARGEST_EPSILON:
        return None
    # One width for all parts: distributions of different widths do not compose.
    width = max(_width(part, units) for part, units in parts)
    total: Any = None
    for part, units in parts:
        single = _mixture_pld(part, units, width)
        composed = single if part.count == 1 else compose_times(single, part.count)
        total = composed if total is None else compose_with(total, composed)
    return total


def _in_batch(part: Part, units: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the possible numbers of the user's units in a batch, and their probabilities."""
    rate = part.law.sample_rate if isinstance(part.law, (Poisson, TruncatedPoisson)) else 1.0
    counts = np.arange(units + 1.0)
    chances = stats.binom.pmf(counts, units, rate)
    return counts[chances > 0], chances[chances > 0]


def _mixture(part: Part, units: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of a batch's numbers of units, and how many noise deviations each moves the sum."""
    counts, chances = _in_batch(part, units)
    return chances, counts / part.noise_multiplier


class _MixtureLoss(MixtureGaussianPrivacyLoss):  # type: ignore[misc]
    """dp-accounting's privacy loss of the mixture, with its inverse computed for all values at once."""

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        if np.ndim(epsilon) == 0:
            return super().get_delta_for_epsilon(epsilon)
        deltas = deltas_at(self, self.inverse_privacy_losses, np.asarray(epsilon, dtype=float), self._sampling_prob)
        # Rounding may make them rise, which the library corrects one by one.
        return np.maximum.accumulate(deltas[::-1])[::-1]

    def inverse_privacy_losses(self, privacy_losses: np.ndarray, precision: float = 1e-7) -> np.ndarray:
        """Return the points at which the privacy loss has the given values, in the same order."""
        # Beyond this both densities are zero in floating point.
        reach = 40 * self._standard_deviation + 2 * self._max_sens
        sign = 1.0 if self.adjacency_type == AdjacencyType.REMOVE else -1.0
        # Both losses fall with x; as functions of y = -sign x their logarithmic sum rises and is convex.
        grid = np.linspace(-reach, reach, 20_001)
        wanted = sign * np.asarray(privacy_losses, dtype=float)
        # A starting point so close that Newton's method on a convex function cannot overshoot for long.
        y = np.interp(wanted, self._log_sum(grid)[0], grid)
        for _ in range(50):
            value, slope = self._log_sum(y)
            with np.errstate(divide="ignore", invalid="ignore"):
                step = np.nan_to_num((value - wanted) / slope, nan=0.0, posinf=0.0, neginf=0.0)
            moved = np.clip(y - step, -reach, reach)
            furthest = float(np.max(np.abs(moved - y), initial=0.0))
            y = moved
            if furthest <= precision * self._standard_deviation:
                break
        return np.asarray(-sign * y)

    def _log_sum(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the logarithm of the mixture's density over the Gaussian's, ``y`` towards the first, and its slope."""
        scaled = self.sensitivities[:, None] / self._variance
        terms = np.log(self.sampling_probs)[:, None] + scaled * (y[None, :] - self.sensitivities[:, None] / 2)
        # logsumexp written out, since its weights are the slope's too.
        top = terms.max(axis=0)
        weights = np.exp(terms - top)
        mass = weights.sum(axis=0)
        return top + np.log(mass), (scaled * weights).sum(axis=0) / mass


@within_memory
def _mixture_pld(part: Part, units: int, width: float) -> PrivacyLossDistribution:
    """Return the privacy loss distribution of one release by connect-the-dots, as the library does it."""
    counts, chances = _in_batch(part, units)
    if len(counts) == 1:  # every unit is in the batch; with one component the library's search for a tail finds none
        return gaussian_pld(part.noise_multiplier / float(counts[0]), 1.0, RELATIONS["add_or_remove"], width)

    def one_way(adjacency: AdjacencyType) -> Any:
        loss = _MixtureLoss(part.noise_multiplier, counts, chances, adjacency_type=adjacency)
        bounds = loss.connect_dots_bounds()
        low, high = math.floor(bounds.epsilon_lower / width), math.ceil(bounds.epsilon_upper / width)
        return connect_dots(width, low, loss.get_delta_for_epsilon(np.arange(low, high + 1) * width))

    return PrivacyLossDistribution(one_way(AdjacencyType.REMOVE), one_way(AdjacencyType.ADD))


def _width(part: Part, units: int) -> float:
    """Return the discretisation: as fine as everywhere else, or as time and memory permit."""
    furthest = float(log_ratio(*_mixture(part, units), np.array([units / part.noise_multiplier + 10.0]))[0])
    return max(FINE, furthest / min(_MOST_BUCKETS, _MOST_TERMS // (units + 1)))
