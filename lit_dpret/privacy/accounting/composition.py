"""Compute the epsilon of a list of releases, and refuse combinations that the accounting libraries do not support.

One function, `epsilon`, at one discretisation, gives every number that this project states, using dp-accounting
(``pld``, ``rdp``) or Opacus (``prv``). One unit moves the sum by C, or by 2C under ``replace_one``. dp-accounting's PLD
accounts for that; its RDP is given half the noise multiplier here.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

import numpy as np
from dp_accounting import dp_event
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.privacy.accounting.pld import (
    compose_times,
    compose_with,
    gaussian_pld,
    mean_loss,
    read_deltas,
    read_epsilon,
    truncated_pld,
)
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    NonPrivateRelease,
    Poisson,
    Release,
    SamplingLaw,
    Shuffle,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import AccountantName, Neighbours, require_delta
from lit_dpret.settings import require_choice

RELATIONS: dict[Neighbours, NeighboringRelation] = {
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
    "add_or_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
}

_ALL: frozenset[Neighbours] = frozenset(get_args(Neighbours))
_ONE_BOUND: frozenset[Neighbours] = frozenset(("zero_out", "add_or_remove"))
_SAME_N: frozenset[Neighbours] = frozenset(("zero_out", "replace_one"))

SUPPORTED: dict[AccountantName, dict[type[SamplingLaw], frozenset[Neighbours]]] = {
    "pld": {Poisson: _ALL, TruncatedPoisson: _ALL, Shuffle: _SAME_N, FullBatch: _ALL},
    "rdp": {Poisson: _ONE_BOUND, FixedSize: frozenset(("replace_one",)), Shuffle: _SAME_N, FullBatch: _ALL},
    "prv": {Poisson: _ONE_BOUND},
}
"""Which accountant judges which law under which relations; everything else is refused.

``Shuffle`` is absent under ``add_or_remove``: removing one unit from a shuffled epoch moves other units from batch to
batch, so more than one batch changes and C is not the bound.
"""

LARGEST_EPSILON = 1000.0
"""An epsilon beyond this is reported as infinite; it promises nothing, and would take gigabytes to compute."""

FINE, COARSE = 1e-4, 1e-3
"""Discretisation of the privacy loss: for every number that is stated, and for first guesses."""

_LEAST_NOISE: dict[type[SamplingLaw], float] = {Poisson: 0.1, TruncatedPoisson: 0.2, FixedSize: 0.2}


def simplest_law(law: SamplingLaw) -> SamplingLaw:
    """Return the simplest equivalent law: a cap at n truncates nothing, a rate of 1 samples nothing."""
    if isinstance(law, TruncatedPoisson) and law.cap == law.n:
        law = Poisson(sample_rate=law.sample_rate)
    everyone = isinstance(law, Poisson) and law.sample_rate == 1
    everyone = everyone or (isinstance(law, (FixedSize, Shuffle)) and law.batch_size == law.n)
    return FullBatch() if everyone else law


def check_supported(law: SamplingLaw, accountant: AccountantName, neighbours: Neighbours) -> None:
    """Refuse a combination outside `SUPPORTED`."""
    require_choice("privacy.accountant", accountant, get_args(AccountantName))
    require_choice("privacy.neighbours", neighbours, get_args(Neighbours))
    law = simplest_law(law)
    if neighbours in SUPPORTED[accountant].get(type(law), ()):
        return
    ways = [
        f"privacy.accountant={name} under {', '.join(r for r in get_args(Neighbours) if r in laws[type(law)])}"
        for name, laws in SUPPORTED.items()
        if type(law) in laws
    ]
    raise UnsupportedAccountingError(
        f"datamodule.sampling={law.kind}, privacy.accountant={accountant} and privacy.neighbours={neighbours}: "
        f"no library supports these three together. This sampling is supported by {'; by '.join(ways)}.",
        trap="T6" if isinstance(law, TruncatedPoisson) else "T1",
    )


@dataclass(frozen=True)
class Part:
    """Releases that a library accounts for in one call: ``count`` of them by one law at one noise level."""

    law: SamplingLaw
    noise_multiplier: float
    count: int


def composable_parts(releases: Iterable[Release]) -> tuple[Part, ...] | None:
    """Return the releases without labels, in a canonical order; None if one is not private.

    The shuffled steps of a release become the epochs they begin. All unsampled Gaussians become one: precisions add up,
    so n of noise multiplier s are one of s / sqrt(n).
    """
    counts: dict[tuple[SamplingLaw, float], int] = {}
    for release in releases:
        if isinstance(release, NonPrivateRelease) or release.noise_multiplier == 0:
            return None
        law, count = simplest_law(release.law), release.count
        if isinstance(law, Shuffle):
            count, law = law.epochs(count), FullBatch()
        key = (law, release.noise_multiplier)
        counts[key] = counts.get(key, 0) + count
    unsampled = [(noise, count) for (law, noise), count in counts.items() if isinstance(law, FullBatch)]
    parts = [Part(law, noise, count) for (law, noise), count in counts.items() if not isinstance(law, FullBatch)]
    if unsampled:
        # fsum, so that the order of the releases does not change a digit.
        precision = math.fsum(count / noise**2 for noise, count in unsampled)
        parts.append(Part(FullBatch(), precision**-0.5, 1))
    # Sorted, so that the caches below recognise equal ledgers.
    return tuple(sorted(parts, key=repr))


def _mean_loss(part: Part, neighbours: Neighbours) -> float:
    """Return the average privacy loss of a part, summed over its releases."""
    shift = 2.0 if neighbours == "replace_one" else 1.0
    mu = shift / part.noise_multiplier
    if isinstance(part.law, FullBatch):
        return mu**2 / 2
    rate = part.law.batch_size / part.law.n if isinstance(part.law, FixedSize) else getattr(part.law, "sample_rate", 1)
    return part.count * mean_loss(np.array([1 - rate, rate]), np.array([0.0, mu]))


def beyond_reach(parts: Sequence[Part], neighbours: Neighbours) -> bool:
    """Return whether epsilon is above `LARGEST_EPSILON`, or the noise too small for any accountant."""
    # With so little noise, losses reach thousands and grids reach gigabytes.
    if any(part.noise_multiplier < _LEAST_NOISE.get(type(part.law), 0.0) for part in parts):
        return True
    return sum(_mean_loss(part, neighbours) for part in parts) > LARGEST_EPSILON


# -- the three libraries -----------------------------------------------------------------------


@lru_cache(maxsize=6)
def _one_step_pld(law: SamplingLaw, noise: float, neighbours: Neighbours, interval: float) -> Any:
    """Return the privacy loss distribution of one release; by far the slowest part, hence cached."""
    relation = RELATIONS[neighbours]
    if isinstance(law, TruncatedPoisson):
        return truncated_pld(noise, law.sample_rate, law.cap, law.n, relation, interval)
    return gaussian_pld(noise, law.sample_rate if isinstance(law, Poisson) else 1.0, relation, interval)


@lru_cache(maxsize=4)
def _part_pld(part: Part, neighbours: Neighbours, interval: float) -> Any:
    single = _one_step_pld(part.law, part.noise_multiplier, neighbours, interval)
    return single if part.count == 1 else compose_times(single, part.count)


@lru_cache(maxsize=1)
def composed_pld(parts: tuple[Part, ...], neighbours: Neighbours, interval: float = FINE) -> Any:
    """Return the composed privacy loss distribution of one or more parts."""
    total = _part_pld(parts[0], neighbours, interval)
    for part in parts[1:]:
        total = compose_with(total, _part_pld(part, neighbours, interval))
    return total


def rdp_event(part: Part, neighbours: Neighbours) -> Any:
    """Return one release of ``part`` as an event for dp-accounting's Rényi accountant."""
    # RdpAccountant takes "standard deviation over the sensitivity of the sum" under every relation; replacing one unit
    # moves a sum of terms bounded by C by up to 2C.
    shrink = 0.5 if neighbours == "replace_one" else 1.0
    event: Any = dp_event.GaussianDpEvent(part.noise_multiplier * shrink)
    if isinstance(part.law, Poisson):
        return dp_event.PoissonSampledDpEvent(part.law.sample_rate, event)
    if isinstance(part.law, FixedSize):
        return dp_event.SampledWithoutReplacementDpEvent(part.law.n, part.law.batch_size, event)
    return event


def composed_rdp(parts: tuple[Part, ...], neighbours: Neighbours) -> Any:
    """Return dp-accounting's Rényi accountant with all parts composed."""
    accountant = RdpAccountant(neighboring_relation=RELATIONS[neighbours])
    for part in parts:
        accountant.compose(rdp_event(part, neighbours), part.count)
    return accountant


def _prv_rounding(parts: Sequence[Part]) -> float:
    """Bound the rounding error of Opacus' delta, which raises a transform to the power of the number of steps."""
    # Up to 0.16 units of 2**-52 per step were measured; this is twelve times more.
    return 2 * sum(part.count for part in parts) * sys.float_info.epsilon


def _prv_epsilon(parts: tuple[Part, ...], delta: float) -> float:
    from opacus.accountants import PRVAccountant  # brings torch, which most readers of a card do not need

    accountant = PRVAccountant()
    accountant.history = [(p.noise_multiplier, p.law.sample_rate, p.count) for p in parts if isinstance(p.law, Poisson)]
    if (lost := _prv_rounding(parts)) > delta / 2:
        raise ConfigurationError(
            f"privacy.accountant=prv cannot distinguish privacy.delta={delta:g} from its rounding errors over this "
            "many steps. Choose privacy.accountant=pld."
        )
    try:
        with warnings.catch_warnings():
            # Opacus bounds its domain by RDP and warns when an order at the edge is the best one; harmless here.
            warnings.simplefilter("ignore", UserWarning)
            return float(accountant.get_epsilon(delta - lost))
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"privacy.accountant=prv cannot compose these releases at privacy.delta={delta:g} ({error}). "
            "Choose privacy.accountant=pld."
        ) from error


def _gaussian_epsilon(noise: float, delta: float, neighbours: Neighbours) -> float:
    """Return the exact epsilon of one unsampled Gaussian (Balle and Wang 2018, Theorem 8), plus solver tolerance."""
    # Noise is relative to C, and a replacement moves the sum by 2C.
    return float(get_epsilon_gaussian(noise / 2 if neighbours == "replace_one" else noise, delta)) + 1e-11


@lru_cache(maxsize=4096)
def epsilon_of(
    parts: tuple[Part, ...], delta: float, neighbours: Neighbours, accountant: AccountantName, interval: float = FINE
) -> float:
    """Return the epsilon of at least one part; infinite above `LARGEST_EPSILON`."""
    if accountant == "pld" and neighbours == "add_or_remove":
        # Removing a unit and blanking a unit move the sum alike: the library's distributions are the same.
        return epsilon_of(parts, delta, "zero_out", accountant, interval)
    if beyond_reach(parts, neighbours):
        return math.inf
    if accountant == "pld" and len(parts) == 1 and isinstance(parts[0].law, FullBatch):
        value = _gaussian_epsilon(parts[0].noise_multiplier, delta, neighbours)
    elif accountant == "pld":
        value = read_epsilon(composed_pld(parts, neighbours, interval), delta)
    elif accountant == "rdp":
        value = float(composed_rdp(parts, neighbours).get_epsilon(delta))
    else:
        value = _prv_epsilon(parts, delta)
    # Opacus may return slightly less than 0. NaN fails the comparison and so counts as infinite.
    return max(0.0, value) if value <= LARGEST_EPSILON else math.inf


def epsilon(
    releases: Iterable[Release], *, delta: float, neighbours: Neighbours, accountant: AccountantName = "pld"
) -> float:
    """Return the epsilon that all ``releases`` together satisfy at ``delta``.

    Guarantees:
        - The result is an upper bound. ``pld`` rounds pessimistically and adds what floating point may have lost.
          ``prv`` is the upper end of Opacus' interval, whose rounding errors were measured, not bounded.
        - It is 0 for no release, and infinite above `LARGEST_EPSILON` or where a release is not private or carries no
          noise.
        - Order and labels of the releases, and how equal ones are bundled, change nothing; except that each shuffled
          release starts its own epoch.
    """
    releases = list(releases)
    require_delta(delta)
    parts = _checked_parts(releases, neighbours, accountant)
    if parts is None:
        return math.inf
    return epsilon_of(parts, delta, neighbours, accountant) if parts else 0.0


def rough_epsilon(releases: Iterable[Release], delta: float, neighbours: Neighbours) -> float:
    """Approximate epsilon ten times as fast, for initial guesses only; never reported."""
    parts = _checked_parts(list(releases), neighbours, "pld")
    if parts is None:
        return math.inf
    return epsilon_of(parts, delta, neighbours, "pld", COARSE) if parts else 0.0


def delta_at(
    epsilons: Sequence[float],
    releases: Iterable[Release],
    *,
    neighbours: Neighbours,
    accountant: AccountantName = "pld",
) -> list[float]:
    """Return the delta of the releases at each epsilon, given in ascending order; ``pld`` and ``rdp`` only."""
    releases = list(releases)
    if accountant == "prv":
        raise UnsupportedAccountingError(
            "privacy.accountant=prv bounds epsilon for a delta, not delta for an epsilon: choose pld or rdp."
        )
    parts = _checked_parts(releases, neighbours, accountant)
    if parts is None or beyond_reach(parts, neighbours):
        return [1.0] * len(epsilons)
    if not parts:
        return [0.0] * len(epsilons)
    if accountant == "rdp":
        judge = composed_rdp(parts, neighbours)
        return [float(judge.get_delta(value)) for value in epsilons]
    deltas = read_deltas(composed_pld(parts, neighbours), epsilons)
    return [min(1.0, max(0.0, float(value))) for value in deltas]


def epsilon_curve(
    releases: Iterable[Release],
    *,
    neighbours: Neighbours,
    accountant: AccountantName = "pld",
    deltas: Sequence[float] = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10),
) -> list[tuple[float, float]]:
    """Return pairs (epsilon, delta) that hold simultaneously: one mechanism, read at several deltas."""
    releases = list(releases)
    if accountant == "prv":
        least = 2 * _prv_rounding(composable_parts(releases) or ())
        deltas = [delta for delta in deltas if delta >= least]
    return [(epsilon(releases, delta=d, neighbours=neighbours, accountant=accountant), d) for d in deltas]


def _checked_parts(
    releases: Sequence[Release], neighbours: Neighbours, accountant: AccountantName
) -> tuple[Part, ...] | None:
    for release in releases:
        if isinstance(release, GaussianRelease):
            check_supported(release.law, accountant, neighbours)
    return composable_parts(releases)
