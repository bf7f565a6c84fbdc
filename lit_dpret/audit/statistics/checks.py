"""Refusals that the estimators share: one line each, with the value and the range."""

from __future__ import annotations

import math

from lit_dpret.errors import ConfigurationError


def check_confidence(confidence: float) -> float:
    """The allowed probability of error, ``1 - confidence``; refused where the confidence is no probability."""
    if not 0 < confidence < 1:
        raise ConfigurationError(f"confidence={confidence} must lie between 0 and 1, as 0.95 does.")
    return 1 - confidence


def check_delta(delta: float, *, above_zero: bool = False) -> None:
    """Refuse a delta outside [0, 1), or outside (0, 1) where a Gaussian curve needs one."""
    if not 0 <= delta < 1:
        raise ConfigurationError(f"delta={delta} must be at least 0 and below 1.")
    if above_zero and delta == 0:
        raise ConfigurationError("delta=0: no Gaussian mechanism is (eps, 0)-DP, so this method needs a delta above 0.")


def check_copies(copies: int) -> None:
    """Refuse a number of copies of each canary that is no whole number from 1 on."""
    check_count("copies", copies, least=1)


def check_count(name: str, value: int, *, least: int = 0) -> None:
    """Refuse ``value`` where it is no whole number, or below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name}={value!r} must be a whole number, at least {least}.")


def check_hits(hits: int, trials: int, *, names: tuple[str, str] = ("hits", "trials")) -> None:
    """Refuse more hits than trials, and no trial at all."""
    check_count(names[1], trials, least=1)
    check_count(names[0], hits)
    if hits > trials:
        raise ConfigurationError(f"{names[0]}={hits} is more than {names[1]}={trials}.")


def check_probability(name: str, value: float) -> None:
    """Refuse a value outside (0, 1)."""
    if not (0 < value < 1 and math.isfinite(value)):
        raise ConfigurationError(f"{name}={value} must lie between 0 and 1, both excluded.")
