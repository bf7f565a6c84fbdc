"""A sampling law of each kind, and releases under them; not a test."""

from __future__ import annotations

from lit_dpret.privacy.accounting.releases import (
    FixedSize,
    FullBatch,
    GaussianRelease,
    Poisson,
    SamplingLaw,
    Shuffle,
    TruncatedPoisson,
)

DELTA = 1e-5
Q = 0.02
LAWS: dict[str, SamplingLaw] = {
    "poisson": Poisson(sample_rate=Q),
    "truncated_poisson": TruncatedPoisson(sample_rate=Q, cap=80, n=2000),
    "fixed_size": FixedSize(batch_size=40, n=2000),
    "shuffle": Shuffle(batch_size=40, n=2000),
    "full_batch": FullBatch(),
}


def gaussian(noise: float, law: SamplingLaw | float = Q, count: int = 1, label: str = "train") -> GaussianRelease:
    """Return a release under a law, or under Poisson sampling with a rate."""
    law = Poisson(sample_rate=law) if isinstance(law, float) else law
    return GaussianRelease(noise_multiplier=noise, law=law, count=count, label=label)
