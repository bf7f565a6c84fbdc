"""Relations of probabilities, epsilon and delta, for one unit and for groups of units.

A canary that stands k times in the training data is k units, and may leak k times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable

#: No audit tells epsilons beyond this one apart.
LARGEST = 1e6


def group_delta(eps: float, delta: float, copies: int) -> float:
    """Return the delta of ``copies`` units at ``copies * eps``, where one unit has (eps, delta).

    delta (e^(k eps) - 1) / (e^eps - 1), at most 1 (Vadhan 2017, "The Complexity of Differential Privacy",
    Lemma 2.2). It rises with ``eps``.

    >>> f"{group_delta(0.0, 1e-6, 10):.3g}", f"{group_delta(1.0, 1e-6, 10):.3g}"
    ('1e-05', '0.0128')
    """
    if delta == 0 or copies == 1:
        return delta
    if eps == 0:
        return min(1.0, copies * delta)
    # exp((k - 1) eps) (1 - exp(-k eps)) / (1 - exp(-eps)): nothing overflows before the exponent says so.
    log = math.log(delta) + (copies - 1) * eps + math.log(math.expm1(-copies * eps) / math.expm1(-eps))
    return math.exp(log) if log < 0 else 1.0


def least_epsilon(success: float, chance: float, *, delta: float = 0.0, copies: int = 1) -> float:
    """Return the smallest eps >= 0 under which an event's probability may rise from ``chance`` to ``success``.

    The smallest with e^(k eps) chance + delta_k >= success. The left side rises with eps, which is what the
    bisection rests on where there is no closed form.
    """
    if success <= delta * copies + chance:
        return 0.0
    if chance <= 0:
        return math.inf
    if copies == 1 or delta == 0:
        return max(0.0, math.log((success - delta) / chance) / copies)

    def allowed(eps: float) -> bool:
        return math.exp(min(copies * eps, 700.0)) * chance + group_delta(eps, delta, copies) >= success

    # By bisection: where group_delta reaches 1, a root finder may stop anywhere on the plateau, above the smallest.
    return least_where(allowed, math.log(success / chance) / copies)


def least_where(allowed: Callable[[float], bool], high: float) -> float:
    """Return the largest number below which the monotone ``allowed`` is false; it is true from ``high`` on."""
    low = 0.0
    while high - low > 1e-10 * max(high, 1e-3):
        middle = (low + high) / 2
        low, high = (low, middle) if allowed(middle) else (middle, high)
    return low


def largest_contradicted(contradicted: Callable[[float], bool], floor: float = 0.0) -> float:
    """Return the largest contradicted epsilon, to seven digits; ``floor`` if there is none above it.

    Guarantees:
        - Above ``floor`` the answer was itself contradicted, so it is a lower bound whatever the function's shape.
        - Where ``contradicted`` is true up to a point and false from there on, that point.
    """
    if not contradicted(floor):
        return floor
    low, high = floor, max(1.0, 2 * floor)
    while contradicted(high):
        low, high = high, 2 * high
        if high > LARGEST:
            return math.inf
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if contradicted(middle) else (low, middle)
    return low
