"""The share of clipped units, released as one more coordinate of the noised sum (McMahan et al., 1812.06210).

Unit i adds s (2 b_i - 1), where s = C sqrt(f / (1 - f)), b_i is 1 if it was clipped and else 0, and f is the share of
the budget. The sum then has sensitivity C / sqrt(1 - f), and nothing else needs accounting. docs/derivations.md has the
proof.
"""

from __future__ import annotations

import math

from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import is_number

NAME = "..clip_fraction"
"""The coordinate's name among the sums of a step; no part of a parameter's name is empty."""

MOST = 0.1
"""More than this share of the budget for a diagnostic is treated as a mistake."""


def check_budget(share: float) -> None:
    """Refuse a share that is not a number in (0, `MOST`]."""
    if not is_number(share) or not 0 < share <= MOST:
        raise ConfigurationError(
            f"privacy.clip_fraction_budget={share!r} is not a number above 0 and at most {MOST:g}: the share of a "
            "step's budget for the count of clipped units. Set 0.01, or null to release no count."
        )


def sensitivity(max_grad_norm: float, share: float) -> float:
    """Return how far one unit moves the sum (L2), including the count; ``max_grad_norm`` if ``share`` is 0."""
    # Gradient and bit are orthogonal: C^2 + s^2 with s^2 = share / (1 - share) C^2.
    return max_grad_norm / math.sqrt(1 - share)


def _scale(max_grad_norm: float, share: float) -> float:
    """Return ``s``, by which one unit moves the count, in the units of the gradient."""
    return max_grad_norm * math.sqrt(share / (1 - share))


def coordinate(clipped: int, within: int, *, max_grad_norm: float, share: float) -> float:
    """Return the coordinate for ``clipped`` units above the bound and ``within`` units between 0 and the bound."""
    # Plus and minus instead of 1 and 0: the same reach with half the movement of a missing unit.
    return _scale(max_grad_norm, share) * (clipped - within)


def estimate(noised: float, *, max_grad_norm: float, share: float, denominator: float) -> float:
    """Estimate the share of clipped units from a noised coordinate; noise may move it below 0 or above 1."""
    return (1 + noised / (_scale(max_grad_norm, share) * denominator)) / 2


def coordinate_of(fraction: float, *, max_grad_norm: float, share: float, denominator: float) -> float:
    """Invert `estimate`: return the noised coordinate, as it was released, from ``fraction``."""
    return (2 * fraction - 1) * _scale(max_grad_norm, share) * denominator


def deviation(noise_multiplier: float, *, share: float, denominator: float) -> float:
    """Return the standard deviation of the noise in `estimate`; public."""
    return noise_multiplier / (2 * denominator * math.sqrt(share))
