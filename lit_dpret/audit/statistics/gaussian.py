"""The curve of one Gaussian release with mu = sensitivity / noise, and the ways between mu, epsilon and delta.

Dong, Roth and Su 2019, "Gaussian Differential Privacy", arXiv 1905.02383: mu-GDP is (eps, delta(eps))-DP for every
eps >= 0 with delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2) (Corollary 2.13).
"""

from __future__ import annotations

import math
from functools import lru_cache

from scipy.optimize import brentq
from scipy.special import log_ndtr

LARGEST = 1e4


def gaussian_delta(mu: float, eps: float) -> float:
    """delta(eps) of mu-GDP. It falls with ``eps`` and rises with ``mu``.

    >>> round(gaussian_delta(1.0, 1.0), 6)
    0.126937
    """
    return math.exp(_log_delta(mu, eps)) if mu > 0 else 0.0


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest eps >= 0 at which mu-GDP has a delta of at most ``delta``; infinite beyond 10,000.

    >>> round(gaussian_epsilon(1.0, 1e-6), 3)
    4.887
    """
    if mu <= 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while _log_delta(mu, high) > math.log(delta):
        high *= 2
        if high > LARGEST:
            return math.inf
    return float(brentq(lambda eps: _log_delta(mu, eps) - math.log(delta), 0.0, high, xtol=1e-9))


@lru_cache(maxsize=10_000)
def gaussian_mu(eps: float, delta: float) -> float:
    """The largest mu for which mu-GDP is (eps, delta)-DP. It rises with both.

    >>> round(gaussian_mu(gaussian_epsilon(1.0, 1e-6), 1e-6), 6)
    1.0
    """
    high = 1.0
    while _log_delta(high, eps) < math.log(delta):
        high *= 2
    low = high
    while _log_delta(low, eps) > math.log(delta):
        low /= 2
    return float(brentq(lambda mu: _log_delta(mu, eps) - math.log(delta), low, high, xtol=1e-12))


def _log_delta(mu: float, eps: float) -> float:
    # In logarithms, since both terms can be far below the smallest float, and their difference further.
    more, less = float(log_ndtr(mu / 2 - eps / mu)), eps + float(log_ndtr(-mu / 2 - eps / mu))
    return more + math.log(-math.expm1(less - more)) if less < more else -math.inf
