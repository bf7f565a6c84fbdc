"""What no attack can do better than at a secret that stands several times in the data: k copies are k units."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lit_dpret.privacy.accounting.groups import group_delta_at
from lit_dpret.privacy.accounting.releases import Release
from lit_dpret.privacy.budget import Neighbours

_POINTS = 1500


class SecretCeiling:
    """How often any attack can name a secret that stands several times in the data.

    The absent event is that the secret is named although none of its copies took part: its prior probability. With
    all ``copies`` it is at most min over e of exp(e) prior + delta_k(e), the curve that of `group_delta_at`.

    Args:
        releases: What was let out.
        copies: How many units the secret is.
        neighbours: What the absence of a unit means.
    """

    def __init__(self, releases: Iterable[Release], *, copies: int = 1, neighbours: Neighbours) -> None:
        # Beyond 50, exp(e) times a prior of 1e-20 is above 1: no larger e can be the minimum.
        points = [float(x) for x in np.linspace(0.0, 50.0, _POINTS)]
        self._deltas = np.array(group_delta_at(points, releases, max_units=copies, neighbours=neighbours))
        self._odds = np.exp(np.array(points))

    def success(self, prior: float) -> float:
        """The largest probability of naming it, where a guess without the releases has ``prior``."""
        return float(min(1.0, (self._odds * prior + self._deltas).min()))

    def mean_rank(self, candidates: int) -> float:
        """The smallest expected rank of the secret among ``candidates``, from which it was drawn uniformly.

        E[rank] is 1 and the sum of P[rank > r] from r = 1, and P[rank <= r] at most the success of naming the secret
        with prior r / candidates.
        """
        return 1 + float(sum(1 - self.success(r / candidates) for r in range(1, candidates)))
