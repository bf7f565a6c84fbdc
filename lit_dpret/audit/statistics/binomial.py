"""Exact one-sided confidence bounds on a rate: Clopper and Pearson, Biometrika 26, 1934."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv


def rate_at_least(hits: ArrayLike, trials: ArrayLike, error: float) -> NDArray[np.float64]:
    """Lower bounds on rates, each of which is too high with probability at most ``error``; 0 without a hit.

    >>> round(float(rate_at_least(67, 100, 0.025)), 6), round(float(rate_at_most(67, 100, 0.025)), 6)
    (0.568827, 0.760801)
    """
    k, n = np.broadcast_arrays(np.asarray(hits, dtype=float), np.asarray(trials, dtype=float))
    found = betaincinv(np.maximum(k, 1), n - np.maximum(k, 1) + 1, error)
    return np.where(k > 0, found, 0.0)


def rate_at_most(hits: ArrayLike, trials: ArrayLike, error: float) -> NDArray[np.float64]:
    """Upper bounds on rates, each of which is too low with probability at most ``error``; 1 where all hit.

    >>> round(float(rate_at_most(0, 100, 0.05)), 6)
    0.029513
    """
    k, n = np.broadcast_arrays(np.asarray(hits, dtype=float), np.asarray(trials, dtype=float))
    return 1 - rate_at_least(n - k, n, error)
