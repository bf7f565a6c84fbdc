"""Upper bounds on the success of every attack, with any prior knowledge.

If an event has probability f when one unit is absent (a false alarm, or a lucky guess at a secret), its probability
when the unit is present is at most min over e of exp(e) f + delta(e), where delta(e) is the accountant's curve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lit_dpret.privacy.accounting.composition import LARGEST_EPSILON, delta_at, epsilon
from lit_dpret.privacy.accounting.groups import group_delta_at
from lit_dpret.privacy.accounting.releases import Release
from lit_dpret.privacy.budget import AccountantName, Neighbours

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
PRIORS = (1e-2, 1e-4, 1e-6, 1e-10)


def attack_ceilings(
    releases: Iterable[Release],
    *,
    neighbours: Neighbours,
    accountant: AccountantName = "pld",
    delta: float = 1e-9,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
) -> dict[str, Any]:
    """Return upper bounds on the success of any attack on the releases and everything derived from them.

    With ``rdp``, for laws that the PLD does not judge, bounds are looser. Without privacy the bounds are certainty;
    without releases they are chance. ``delta`` decides how far the curve is followed. ``membership_accuracy`` is that
    of a test that faces members and non-members equally often. ``tpr_at_fpr`` and ``secret_guess`` (the probability of
    naming a secret, by that of a guess without the releases) have decimal strings as keys, which survive JSON.
    """
    releases = list(releases)
    stated = epsilon(releases, delta=delta, neighbours=neighbours, accountant=accountant)
    # Far enough: beyond this, exp(epsilon) times any of the rates below is above 1.
    furthest = min(2.0 * stated + 30.0, LARGEST_EPSILON)
    points = [float(x) for x in np.linspace(0.0, furthest, _POINTS)]
    deltas = np.array(delta_at(points, releases, neighbours=neighbours, accountant=accountant))
    with np.errstate(over="ignore"):
        odds = np.exp(np.array(points))

    def ceiling(absent: float) -> float:
        # P[event] <= e^eps P[event without the unit] + delta(eps) for every eps, hence for the best of them.
        return float(min(1.0, (odds * absent + deltas).min()))

    return {
        # delta at epsilon 0 is the total variation, which bounds the advantage of any test.
        "membership_accuracy": float(min(1.0, (1 + deltas[0]) / 2)),
        "tpr_at_fpr": {f"{rate:g}": ceiling(rate) for rate in false_positive_rates},
        "secret_guess": {f"{prior:g}": ceiling(prior) for prior in PRIORS},
    }


_POINTS = 1500


class SecretCeiling:
    """Bounds on identifying a secret that occurs several times in the data, for any attack.

    The absent event is that the secret is named although none of its copies took part; its probability is the prior.
    With all ``copies`` it is at most min over e of exp(e) prior + delta_k(e), with the curve of `group_delta_at`.
    """

    def __init__(self, releases: Iterable[Release], *, copies: int = 1, neighbours: Neighbours) -> None:
        # Beyond 50, exp(e) times a prior of 1e-20 is above 1: no larger e can be the minimum.
        points = [float(x) for x in np.linspace(0.0, 50.0, _POINTS)]
        self._deltas = np.array(group_delta_at(points, releases, units=copies, neighbours=neighbours))
        self._odds = np.exp(np.array(points))

    def success(self, prior: float) -> float:
        """Return the largest probability of naming the secret, if a guess without the releases has ``prior``."""
        return float(min(1.0, (self._odds * prior + self._deltas).min()))

    def mean_rank(self, candidates: int) -> float:
        """Return the smallest expected rank of the secret, drawn uniformly from ``candidates``.

        E[rank] is 1 plus the sum of P[rank > r] from r = 1. P[rank <= r] is at most the success of naming the secret
        with prior r / candidates.
        """
        return 1 + float(sum(1 - self.success(r / candidates) for r in range(1, candidates)))
