"""The input and output of estimators: the tested claim, a lower bound with its confidence, and its assumptions.

A canary that occurs k times in the training data is k units, and may leak k times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.budget import show_delta
from lit_dpret.settings import is_whole

NO_GUARANTEE = "absence of evidence is no guarantee"


def bound_text(eps_lower: float, delta: float | None, confidence: float | None) -> str:
    """Return the fixed wording of a lower bound.

    >>> bound_text(0.41, 0.0, 0.95)
    'evidence of leakage at least 0.41 at delta=0 (confidence 0.95); absence of evidence is no guarantee'
    """
    at = "" if delta is None else f" at delta={show_delta(delta)}"
    sure = "a point value without confidence" if confidence is None else f"confidence {confidence:g}"
    return f"evidence of leakage at least {eps_lower:.4g}{at} ({sure}); {NO_GUARANTEE}"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence of leakage: a lower bound on epsilon. There is no evidence of the absence of leakage."""

    method: str  # the estimator
    eps_lower: float  # the bound, for one copy of the unit; 0 if nothing is contradicted
    delta: float | None  # the delta of the bound; None if the bound is on another curve than (eps, delta)
    confidence: float | None  # probability that the bound is true if the assumption holds; None for a point value
    assumption: str  # the condition for that
    copies: int = 1  # how often each canary was in the training data; the bound is still for one copy
    threshold: float | None = None  # the score from which a canary was guessed a member, if there was one
    tests: int = 1  # number of thresholds that share the allowed error

    def __str__(self) -> str:
        bound = bound_text(self.eps_lower, self.delta, self.confidence)
        return f"{self.method}: {bound}. It assumes: {self.assumption}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The tested claim and the confidence; every estimator validates them here."""

    delta: float  # the claim's, for one unit
    confidence: float  # probability that the bound is true
    copies: int  # how often each included canary was in the training data; each copy is a unit

    def __post_init__(self) -> None:
        check_delta(self.delta)
        check_confidence(self.confidence)
        check_count("copies", self.copies, least=1)

    @property
    def error(self) -> float:
        return 1 - self.confidence

    def group_delta(self, eps: float) -> float:
        """Return the delta of all copies together, at ``copies * eps``."""
        return group_delta(eps, self.delta, self.copies)

    def evidence(
        self, method: str, eps_lower: float, assumption: str, *, threshold: float | None = None, tests: int = 1
    ) -> Evidence:
        return Evidence(
            method=method, eps_lower=eps_lower, delta=self.delta, confidence=self.confidence, assumption=assumption,
            copies=self.copies, threshold=threshold, tests=tests,
        )  # fmt: skip


def check_confidence(confidence: float) -> float:
    """Return the allowed probability of error, ``1 - confidence``; refuse an invalid confidence."""
    if not 0 < confidence < 1:
        raise ConfigurationError(f"confidence={confidence} must lie between 0 and 1, as 0.95 does.")
    return 1 - confidence


def check_delta(delta: float) -> None:
    """Refuse a delta outside [0, 1)."""
    if not 0 <= delta < 1:
        raise ConfigurationError(f"delta={delta} must be at least 0 and below 1.")


def check_count(name: str, value: int, *, least: int = 0) -> None:
    """Refuse a ``value`` that is not an integer, or below ``least``."""
    if not is_whole(value) or value < least:
        raise ConfigurationError(f"{name}={value!r} must be an integer of at least {least}.")


def check_hits(hits: int, trials: int, *, names: tuple[str, str] = ("hits", "trials")) -> None:
    """Refuse more hits than trials, and zero trials."""
    check_count(names[1], trials, least=1)
    check_count(names[0], hits)
    if hits > trials:
        raise ConfigurationError(f"{names[0]}={hits} is more than {names[1]}={trials}.")


# -- probabilities, epsilon and delta, for one unit and for groups of units

#: The largest epsilon that audits distinguish.
LARGEST = 1e6


def group_delta(eps: float, delta: float, copies: int) -> float:
    """Return the delta of ``copies`` units at ``copies * eps``, if one unit has (eps, delta).

    delta (e^(k eps) - 1) / (e^eps - 1), at most 1 (Vadhan 2017, "The Complexity of Differential Privacy",
    Lemma 2.2). It rises with ``eps``.

    >>> f"{group_delta(0.0, 1e-6, 10):.3g}", f"{group_delta(1.0, 1e-6, 10):.3g}"
    ('1e-05', '0.0128')
    """
    if delta == 0 or copies == 1:
        return delta
    if eps == 0:
        return min(1.0, copies * delta)
    # exp((k - 1) eps) (1 - exp(-k eps)) / (1 - exp(-eps)), in a form that does not overflow early.
    log = math.log(delta) + (copies - 1) * eps + math.log(math.expm1(-copies * eps) / math.expm1(-eps))
    return math.exp(log) if log < 0 else 1.0


def least_epsilon(success: float, chance: float, *, delta: float = 0.0, copies: int = 1) -> float:
    """Return the smallest eps >= 0 under which an event's probability may rise from ``chance`` to ``success``.

    This is the smallest with e^(k eps) chance + delta_k >= success. The left side rises with eps; where there is no
    closed form, bisection relies on that.
    """
    if success <= delta * copies + chance:
        return 0.0
    if chance <= 0:
        return math.inf
    if copies == 1 or delta == 0:
        return max(0.0, math.log((success - delta) / chance) / copies)

    def allowed(eps: float) -> bool:
        return math.exp(min(copies * eps, 700.0)) * chance + group_delta(eps, delta, copies) >= success

    # Use bisection: where group_delta reaches 1, a root finder may stop anywhere on the plateau, above the smallest.
    return least_where(allowed, math.log(success / chance) / copies)


def least_where(allowed: Callable[[float], bool], high: float) -> float:
    """Return the largest number below which the monotone ``allowed`` is false; it must be true from ``high`` on."""
    low = 0.0
    while high - low > 1e-10 * max(high, 1e-3):
        middle = (low + high) / 2
        low, high = (low, middle) if allowed(middle) else (middle, high)
    return low


def largest_contradicted(contradicted: Callable[[float], bool], floor: float = 0.0) -> float:
    """Return the largest contradicted epsilon, to seven digits; ``floor`` if there is none above it.

    Guarantees:
        - Above ``floor``, the result was itself contradicted, so it is a lower bound whatever the function's shape.
        - If ``contradicted`` is true up to a point and false from there on, the result is that point.
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
