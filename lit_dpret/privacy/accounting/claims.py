"""What a list of releases has cost: epsilon, the whole curve, and what is left without amplification.

One function, `epsilon`, at one discretisation, gives every number that this project states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

from lit_dpret.errors import ConfigurationError, UnsupportedAccountingError
from lit_dpret.privacy.accounting.composition import (
    COARSE,
    LARGEST_EPSILON,
    Part,
    beyond_reach,
    check_supported,
    composed_pld,
    composed_rdp,
    epsilon_of,
    parts_of,
    plain,
)
from lit_dpret.privacy.accounting.pld_arrays import read_deltas
from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    Poisson,
    Release,
    SamplingLaw,
    Shuffle,
    TruncatedPoisson,
)
from lit_dpret.privacy.budget import AccountantName, Neighbours


def epsilon(
    releases: Iterable[Release], *, delta: float, neighbours: Neighbours, accountant: AccountantName = "pld"
) -> float:
    """The epsilon that all ``releases`` together satisfy at ``delta``.

    Guarantees:
        - An upper bound: ``pld`` rounds pessimistically, ``prv`` returns its upper end.
        - 0 for no release; infinite where one is not private or carries no noise, and above
          `LARGEST_EPSILON`.
        - Order and labels of the releases, and how equal ones are bundled, change nothing; except that
          each shuffled release starts an epoch of its own.

    Raises:
        UnsupportedAccountingError: A law that ``accountant`` does not judge under ``neighbours``.
    """
    releases = list(releases)
    check_delta(delta)
    parts = _checked_parts(releases, neighbours, accountant)
    if parts is None:
        return math.inf
    return epsilon_of(parts, delta, neighbours, accountant) if parts else 0.0


def rough_epsilon(releases: Iterable[Release], delta: float, neighbours: Neighbours) -> float:
    """An epsilon for first guesses only, ten times as fast; never stated."""
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
    """The delta that the releases satisfy at each epsilon, given in ascending order; ``pld`` and ``rdp`` only."""
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
    """Pairs (epsilon, delta) that hold all at once: one mechanism, read at several deltas."""
    releases = list(releases)
    return [(epsilon(releases, delta=d, neighbours=neighbours, accountant=accountant), d) for d in deltas]


def epsilon_without_amplification(releases: Iterable[Release], *, delta: float, neighbours: Neighbours) -> float:
    """What the same noise would be worth if batches had come from shuffled passes instead of coins.

    Each pass over the data that the steps amount to is charged as one unsampled Gaussian. This is
    what is left of a claim whose Poisson sampling was only asserted, so the card prints it.

    Raises:
        UnsupportedAccountingError: Under ``add_or_remove`` for releases that sample: taking one unit
            out of a shuffled pass moves others from batch to batch, and there is no such bound.
    """
    unsampled: list[Release] = []
    for release in releases:
        if isinstance(release, GaussianRelease):
            law = plain(release.law)
            if neighbours == "add_or_remove" and not isinstance(law, FullBatch):
                raise UnsupportedAccountingError(
                    f"Without amplification, {law.kind} sampling has no bound under privacy.neighbours=add_or_remove: "
                    "one unit less in a shuffled pass moves others between batches. Choose zero_out or replace_one."
                )
            release = replace(release, law=FullBatch(), count=_passes(law, release.count))
        unsampled.append(release)
    return epsilon(unsampled, delta=delta, neighbours=neighbours)


def underreported_epsilon(releases: Iterable[Release], *, delta: float, neighbours: Neighbours) -> float:
    """What the central limit theorem of Gaussian DP says: a diagnostic, which may be below the truth.

    Many small releases look like one Gaussian with mu^2 = T q^2 (e^(1 / sigma^2) - 1) (Bu, Dong, Long and
    Su 2020, arXiv 1911.11607, Corollary 4). That is a limit and no bound: at the settings of this project
    it comes out up to 2.7 times too small. It is here so that numbers in older papers can be compared,
    is on no path to a claim, and leaves out what truncation costs.

    Raises:
        UnsupportedAccountingError: A law or relation for which nobody states that limit.
    """
    check_delta(delta)
    squares = 0.0
    for release in releases:
        if not isinstance(release, GaussianRelease) or release.noise_multiplier == 0:
            return math.inf
        law, sigma = plain(release.law), release.noise_multiplier
        if neighbours == "replace_one" or isinstance(law, (FixedSize, Shuffle)):
            raise UnsupportedAccountingError(
                f"datamodule.sampling={law.kind} under privacy.neighbours={neighbours}: no central limit is known."
            )
        rate = law.sample_rate if isinstance(law, (Poisson, TruncatedPoisson)) else 1.0
        sampled = math.expm1(min(sigma**-2, 700.0))
        squares += release.count * (rate**2 * sampled if rate < 1 else sigma**-2)
    mu = math.sqrt(squares)
    if mu == 0:
        return 0.0
    value = float(get_epsilon_gaussian(1 / mu, delta)) if mu < math.sqrt(2 * LARGEST_EPSILON) else math.inf
    return value if value <= LARGEST_EPSILON else math.inf


def _passes(law: SamplingLaw, steps: int) -> int:
    """Passes over the data that ``steps`` steps begin; the step that completes one counts to it."""
    if isinstance(law, Shuffle):
        return law.epochs(steps)
    if isinstance(law, (Poisson, TruncatedPoisson)):
        rate = law.sample_rate
    else:
        rate = law.batch_size / law.n if isinstance(law, FixedSize) else 1.0
    return max(1, math.ceil(rate * (steps - 1) - 1e-9) if rate < 1 else steps)


def _checked_parts(
    releases: Sequence[Release], neighbours: Neighbours, accountant: AccountantName
) -> tuple[Part, ...] | None:
    for release in releases:
        if isinstance(release, GaussianRelease):
            check_supported(release.law, accountant, neighbours)
    return parts_of(releases)


def check_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    if not 0 < delta < 1:
        raise ConfigurationError(f"privacy.delta={delta} must lie strictly between 0 and 1.")
