"""Scores whose truth is known."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from lit_dpret.audit.scores import CanaryScores


def quantiles(count: int, shift: float) -> CanaryScores:
    """Members of N(shift, 1) and others of N(0, 1), not drawn but set to the quantiles (i + 1/2) / count."""
    values = norm.ppf((np.arange(count) + 0.5) / count)
    return CanaryScores(values + shift, values)


def flipped(rng: np.random.Generator, count: int, shift: float = 0.0) -> CanaryScores:
    """A coin for each canary, and a normal score that is ``shift`` higher where it says so."""
    included = rng.random(count) < 0.5
    return CanaryScores.of(rng.normal(size=count) + shift * included, included)
