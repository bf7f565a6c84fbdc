"""Audit scores with a known true distribution."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from lit_dpret.audit.statistics.scores import CanaryScores

#: The results of jax_privacy for `quantiles(10_000, shift)` at delta 1e-6 and 95 %, with thresholds on the ROC hull.
_NAMES = ("one run", "error rates", "TPR at 0.1 %")
PUBLISHED: dict[float, dict[str, float]] = {
    shift: dict(zip(_NAMES, values, strict=True))
    for shift, values in {
        0.0: (0, 0, 0.001),
        1.0: (1.13346, 1.787170, 0.019),
        2.0: (2.311945, 3.827951, 0.141),
        4.0: (4.395568, 6.412509, 0.8223),
    }.items()
}


def quantiles(count: int, shift: float) -> CanaryScores:
    """Return members of N(shift, 1) and non-members of N(0, 1), set to the quantiles (i + 1/2) / count, not drawn."""
    values = norm.ppf((np.arange(count) + 0.5) / count)
    return CanaryScores(values + shift, values)


def flipped(rng: np.random.Generator, count: int, shift: float = 0.0) -> CanaryScores:
    """Flip a coin for each canary, and draw a normal score that is ``shift`` higher for included ones."""
    included = rng.random(count) < 0.5
    return CanaryScores.of(rng.normal(size=count) + shift * included, included)
