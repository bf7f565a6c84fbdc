"""Numbers that are not claims: what other papers, and other ways of sampling, would state for the same releases."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

from lit_dpret.errors import UnsupportedAccountingError
from lit_dpret.privacy.accounting.composition import LARGEST_EPSILON, epsilon, simplest_law
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
from lit_dpret.privacy.budget import Neighbours, require_delta


def epsilon_if_shuffled(releases: Iterable[Release], *, delta: float, neighbours: Neighbours) -> float:
    """Return the epsilon of the same noise if batches had come from shuffled passes instead of Poisson draws."""
    unsampled: list[Release] = []
    for release in releases:
        if isinstance(release, GaussianRelease):
            law = simplest_law(release.law)
            if neighbours == "add_or_remove" and not isinstance(law, FullBatch):
                raise UnsupportedAccountingError(
                    f"Without amplification, {law.kind} sampling has no bound under privacy.neighbours=add_or_remove: "
                    "one unit less in a shuffled pass moves others between batches. Choose zero_out or replace_one."
                )
            release = replace(release, law=FullBatch(), count=_passes(law, release.count))
        unsampled.append(release)
    return epsilon(unsampled, delta=delta, neighbours=neighbours)


def underreported_epsilon(releases: Iterable[Release], *, delta: float, neighbours: Neighbours) -> float:
    """Return the epsilon by the central limit theorem of Gaussian DP: a diagnostic that may be below the truth.

    Many small releases look like one Gaussian with mu^2 = T q^2 (e^(1 / sigma^2) - 1) (Bu, Dong, Long and Su 2020,
    arXiv 1911.11607, Corollary 4). It serves to compare numbers of older papers; no claim uses it.
    """
    require_delta(delta)
    squares = 0.0
    for release in releases:
        if not isinstance(release, GaussianRelease) or release.noise_multiplier == 0:
            return math.inf
        law, sigma = simplest_law(release.law), release.noise_multiplier
        if neighbours == "replace_one" or isinstance(law, (FixedSize, Shuffle)):
            raise UnsupportedAccountingError(
                f"datamodule.sampling={law.kind} under privacy.neighbours={neighbours}: no central limit theorem is "
                "known."
            )
        rate = law.sample_rate if isinstance(law, (Poisson, TruncatedPoisson)) else 1.0
        # 700: above it exp() overflows, and epsilon is far beyond `LARGEST_EPSILON`.
        sampled = math.expm1(min(sigma**-2, 700.0))
        squares += release.count * (rate**2 * sampled if rate < 1 else sigma**-2)
    mu = math.sqrt(squares)
    if mu == 0:
        return 0.0
    value = float(get_epsilon_gaussian(1 / mu, delta)) if mu < math.sqrt(2 * LARGEST_EPSILON) else math.inf
    return value if value <= LARGEST_EPSILON else math.inf


def _passes(law: SamplingLaw, steps: int) -> int:
    """Return how many passes over the data ``steps`` steps begin; the step that completes a pass counts towards it."""
    if isinstance(law, Shuffle):
        return law.epochs(steps)
    if isinstance(law, (Poisson, TruncatedPoisson)):
        rate = law.sample_rate
    else:
        rate = law.batch_size / law.n if isinstance(law, FixedSize) else 1.0
    # Slightly more before rounding down: a step after a whole number of passes begins the next one.
    return math.floor(rate * (steps - 1) + 1e-9) + 1 if rate < 1 else steps
