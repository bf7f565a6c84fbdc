"""A lower bound on epsilon from repeated releases of two neighbouring inputs.

An event of probability p on one input and q on its neighbour has p <= exp(eps) q + delta. Confidence bounds on p and q
(Clopper and Pearson, 1934) give a lower bound on eps, for any mechanism (Jagielski et al. 2020, section 4).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lit_dpret.audit.statistics.error_rates import rate_at_least, rate_at_most
from lit_dpret.audit.testing.probe import Probe
from lit_dpret.audit.testing.sum_checks import LOUD, norm
from lit_dpret.errors import ConfigurationError, PrivacyViolation
from lit_dpret.privacy.budget import show_delta

CONFIDENCE = 1 - 1e-4
#: The share of the trials that choose the threshold; the rest are counted.
CHOOSING = 0.25

#: Quantiles of all values together that are tried as thresholds.
CANDIDATES = np.concatenate([np.linspace(0.002, 0.04, 8), np.linspace(0.05, 0.95, 37), np.linspace(0.96, 0.998, 8)])

Values = NDArray[np.float64]


def epsilon_lower_bound(p: Values, q: Values, delta: float) -> float:
    """Return a lower bound on epsilon from a statistic's values on two neighbouring inputs, ``(trials,)``; at least 0.

    The first quarter of the values chooses the threshold and which side of it counts; the rest are evaluated, so the
    bound holds at the stated confidence.
    """
    first_p, first_q = p[: int(len(p) * CHOOSING)], q[: int(len(q) * CHOOSING)]
    best, threshold, sign, swapped = -math.inf, 0.0, 1, False
    for candidate in np.unique(np.quantile(np.concatenate([first_p, first_q]), CANDIDATES)):
        for s in (1, -1):
            for swap in (False, True):
                a, b = (first_q, first_p) if swap else (first_p, first_q)
                found = _bound(s * a, s * b, s * candidate, delta)
                if found > best:
                    best, threshold, sign, swapped = found, float(candidate), s, swap
    rest_p, rest_q = p[len(first_p) :], q[len(first_q) :]
    a, b = (rest_q, rest_p) if swapped else (rest_p, rest_q)
    return max(0.0, _bound(sign * a, sign * b, sign * threshold, delta))


def most_that_can_be_shown(trials: int, delta: float) -> float:
    """Return the bound that a mechanism without noise would give from ``trials`` releases of each input."""
    counted = trials - int(trials * CHOOSING)
    return _epsilon(counted, 0, counted, counted, delta)


def check_epsilon(probe: Probe, unit: int, weight: float, eps: float, delta: float, trials: int) -> float:
    """Repeat the release of ``unit`` alone and of nothing, and compare their distinguishability with the claim.

    The two inputs are neighbours; other units would change nothing, as ``check_independence`` has shown. The statistic
    is the projection of the release onto the direction in which the unit moves it. Return the lower bound on epsilon.
    """
    can = most_that_can_be_shown(trials, delta)
    if can <= eps:
        raise ConfigurationError(
            f"trials={trials} releases can show an epsilon of at most {can:.3g}, so they could not refute eps={eps:g}. "
            "Raise trials, or test with a smaller eps: the noise is calibrated to it, and the code is the same."
        )
    probe.weights = {unit: LOUD * weight}
    direction = probe.step([unit]).sums
    size = norm(direction)

    def value(units: list[int], step: int) -> float:
        released = probe.step(units, step=step).noised_sums()
        return sum(float((released[name] * direction[name].double()).sum()) for name in released) / size

    p = np.array([value([unit], step) for step in range(trials)])
    q = np.array([value([], step) for step in range(trials, 2 * trials)])
    probe.weights = {}
    found = epsilon_lower_bound(p, q, delta)
    if found > eps:
        raise PrivacyViolation(
            f"epsilon: {trials} releases of two neighbouring batches differ so clearly that epsilon exceeds "
            f"{found:.3g} at delta={show_delta(delta)} (confidence {CONFIDENCE:.4f}), more than the claimed {eps:g}."
        )
    return found


def _bound(a: Values, b: Values, threshold: float, delta: float) -> float:
    return _epsilon(int((a > threshold).sum()), int((b > threshold).sum()), len(a), len(b), delta)


def _epsilon(hits_a: int, hits_b: int, size_a: int, size_b: int, delta: float) -> float:
    """Bound epsilon by event counts on either side; minus infinity if they show nothing."""
    alpha = (1 - CONFIDENCE) / 2
    least, most = float(rate_at_least(hits_a, size_a, alpha)), float(rate_at_most(hits_b, size_b, alpha))
    return math.log((least - delta) / most) if least > delta else -math.inf
