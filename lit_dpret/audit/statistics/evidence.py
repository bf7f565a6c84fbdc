"""Input and result of an estimator: a lower bound, its confidence, and its assumptions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lit_dpret.audit.statistics.curves import group_delta
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
    """Evidence of leakage: a lower bound on epsilon. Absence of leakage has no evidence."""

    method: str  # which estimator
    eps_lower: float  # the bound, for one copy of the unit. 0 where nothing is contradicted
    delta: float | None  # the delta it goes with; None where the bound is on another curve than (eps, delta)
    confidence: float | None  # probability that the bound is true where the assumption holds; None for a point value
    assumption: str  # what must hold for that
    copies: int = 1  # how often each canary stood in the training data; the bound is for one copy all the same
    threshold: float | None = None  # the score from which a canary was taken for a member, where there was one
    tests: int = 1  # number of thresholds that the allowed error was divided among

    def __str__(self) -> str:
        bound = bound_text(self.eps_lower, self.delta, self.confidence)
        return f"{self.method}: {bound}. It assumes: {self.assumption}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The tested claim and the confidence; every estimator validates them here."""

    delta: float  # of the claim, for one unit
    confidence: float  # probability that the bound is true
    copies: int  # how often each included canary stood in the training data; so many copies are so many units

    def __post_init__(self) -> None:
        check_delta(self.delta)
        check_confidence(self.confidence)
        check_count("copies", self.copies, least=1)

    @property
    def error(self) -> float:
        """The allowed probability of error."""
        return 1 - self.confidence

    def group_delta(self, eps: float) -> float:
        """Return the delta of all copies together at ``copies * eps``."""
        return group_delta(eps, self.delta, self.copies)

    def evidence(
        self, method: str, eps_lower: float, assumption: str, *, threshold: float | None = None, tests: int = 1
    ) -> Evidence:
        """Return a bound that an estimator found under these terms."""
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
        raise ConfigurationError(f"{name}={value!r} must be a whole number, at least {least}.")


def check_hits(hits: int, trials: int, *, names: tuple[str, str] = ("hits", "trials")) -> None:
    """Refuse more hits than trials, and zero trials."""
    check_count(names[1], trials, least=1)
    check_count(names[0], hits)
    if hits > trials:
        raise ConfigurationError(f"{names[0]}={hits} is more than {names[1]}={trials}.")


def check_probability(name: str, value: float) -> None:
    """Refuse a value outside (0, 1)."""
    if not 0 < value < 1:
        raise ConfigurationError(f"{name}={value} must lie between 0 and 1, both excluded.")
