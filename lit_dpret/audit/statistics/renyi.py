"""Rank to epsilon by Renyi divergence, as the synthetic-query paper cites it.

Stock et al. 2022, "Defending against Reconstruction Attacks with Renyi Differential Privacy", arXiv 2202.07623, by
probability preservation: P(E) <= (e^(eps_alpha) Q(E))^((alpha - 1) / alpha) for every event E. The ceilings of
`lit_dpret.privacy.accounting.ceilings`, from the whole curve, are tighter; this stands here to be compared with the
paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri

from lit_dpret.audit.statistics.binomial import rate_at_least
from lit_dpret.audit.statistics.checks import check_confidence, check_hits, check_probability
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.errors import ConfigurationError


def renyi_bound(hits: int, trials: int, *, prior: float, order: float, confidence: float = 0.95) -> Evidence:
    """A lower bound on the Renyi epsilon at ``order`` from guesses of secrets, each by a training of its own.

    alpha / (alpha - 1) ln L + ln(1 / prior), with L as in `top_rank_bound`; for one copy of each secret.
    ``order=inf`` is pure DP.

    Args:
        hits: Secrets that were guessed.
        trials: Secrets.
        prior: Probability of guessing one without the model.
        order: alpha, above 1.
        confidence: That the bound is true.

    Raises:
        ConfigurationError: More hits than trials, ``order`` at most 1, or a number out of its range.
    """
    error = check_confidence(confidence)
    check_hits(hits, trials)
    check_probability("prior", prior)
    if not order > 1:
        raise ConfigurationError(f"order={order} must be above 1.")
    rate = float(rate_at_least(hits, trials, error))
    share = 1.0 if math.isinf(order) else order / (order - 1)
    eps = max(0.0, share * math.log(rate) - math.log(prior)) if rate > 0 else 0.0
    return Evidence(
        method=f"Renyi epsilon of order {order:g}", eps_lower=eps, delta=None, confidence=confidence,
        assumption="each secret was drawn at random with that prior and had a training of its own, in one copy.",
    )  # fmt: skip


def renyi_ceiling(rdp: Callable[[float], float], prior: float) -> tuple[float, float]:
    """The highest probability of guessing a secret that a Renyi curve allows, and the order that says so.

    min over alpha > 1 of (e^(rdp(alpha)) prior)^((alpha - 1) / alpha).

    >>> success, order = renyi_ceiling(lambda alpha: alpha / 2, prior=0.01)
    >>> round(success, 6), round(order, 3)
    (0.126146, 3.035)

    Args:
        rdp: The Renyi epsilon of the mechanism at each order.
        prior: Probability of guessing it without the model.

    Raises:
        ConfigurationError: ``prior`` is no probability.
    """
    check_probability("prior", prior)

    def log_success(log_excess: float) -> float:
        order = 1 + math.exp(log_excess)
        return (rdp(order) + math.log(prior)) * (order - 1) / order

    found = minimize_scalar(log_success, bounds=(-12.0, 12.0), method="bounded", options={"xatol": 1e-10})
    return min(1.0, math.exp(float(found.fun))), 1 + math.exp(float(found.x))


def gaussian_ceiling(mu: float, prior: float) -> float:
    """The same for a mu-GDP mechanism by its trade-off curve, exactly: Phi(Phi^-1(prior) + mu).

    >>> round(gaussian_ceiling(1.0, 0.01), 7)
    0.0923622
    """
    check_probability("prior", prior)
    return float(ndtr(ndtri(prior) + mu))
