"""Measure how far a planted secret stands out from secrets that were not planted.

Carlini et al. 2019, "The Secret Sharer", arXiv 1802.08232: the exposure of a secret is the logarithm of how much
faster it is guessed with the model than without. Perplexities may be in any unit; lower means a likelier text.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import quad
from scipy.stats import skewnorm

from lit_dpret.audit.statistics.evidence import check_count
from lit_dpret.errors import ConfigurationError, DataError


def rank(secret: float, references: ArrayLike) -> int:
    """Return 1 plus the number of references at least as likely; ties count against the finding.

    >>> rank(3.5, [1, 2, 3, 4]), rank(1, [1, 2, 3, 4])
    (4, 2)

    ``secret`` is a perplexity, ``references`` those of secrets that could have been planted instead,
    ``(references,)``.
    """
    values = _references(references)
    return 1 + int((values <= _number(secret)).sum())


def exposure_of_rank(rank: float, candidates: int) -> float:
    """Return log2(candidates / rank) bits, from 0 to log2(candidates) if the secret is a candidate.

    For a secret that was not planted it averages log2(e) = 1.44 for many candidates, and 1.396 for 100, not 0.
    TensorFlow Privacy uses the number of references, without the secret, as ``candidates``.
    """
    check_count("candidates", candidates, least=1)
    if not rank >= 1:
        raise ConfigurationError(f"rank={rank} must be at least 1.")
    return math.log2(candidates) - math.log2(rank)


def extrapolated_exposure(secret: float, references: ArrayLike) -> float:
    """Return -log2 of the distribution function of a skew-normal, fitted to the references, at the secret.

    It is not bounded by the number of references, and no better than the fit: far out it states what the references
    never showed, and it is infinite where the fitted curve has no mass that floats resolve. The paper (section 4.3)
    finds that perplexities follow this distribution; check yours with a Kolmogorov-Smirnov test.
    """
    values = _references(references)
    if np.ptp(values) == 0:
        raise DataError("A distribution cannot be fitted to references that are all equal.")
    shape, location, scale = skewnorm.fit(values)
    return -_log_cdf(_number(secret), shape, location, scale) / math.log(2)


def mean_rank(ranks: ArrayLike, candidates: int) -> float:
    """Return the mean of ranks among ``candidates``, each from 1 to their number."""
    check_count("candidates", candidates, least=1)
    values = _references(ranks)
    worst = values[(values < 1) | (values > candidates) | (values != np.round(values))]
    if worst.size:
        raise DataError(f"{worst.size} ranks, such as {worst[0]:g}, are not integers from 1 to {candidates}.")
    return float(values.mean())


def _log_cdf(x: float, shape: float, location: float, scale: float) -> float:
    direct = float(skewnorm.cdf(x, shape, location, scale))
    if direct > 1e-8:
        return math.log(direct)
    # SciPy's tail has an absolute error, so integrate the density relative to its value at x.
    at = float(skewnorm.logpdf(x, shape, location, scale))

    def relative(step: float) -> float:
        return math.exp(float(skewnorm.logpdf(x - step * scale, shape, location, scale)) - at)

    mass = scale * quad(relative, 0, math.inf)[0]
    return at + math.log(mass) if mass > 0 else -math.inf


def _references(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise DataError(f"A one-dimensional list of values is needed, not an array of shape {array.shape}.")
    if not np.isfinite(array).all():
        raise DataError(f"{int((~np.isfinite(array)).sum())} of {array.size} values are NaN or infinite.")
    return array


def _number(value: float) -> float:
    if math.isnan(value):
        raise DataError("The secret's perplexity is NaN.")
    return float(value)
