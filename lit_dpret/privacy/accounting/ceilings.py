"""What no attack can do better than, whatever it is and whatever it knows.

An epsilon is hard to picture; the rate at which an attacker can be right is not. The accountant's
curve bounds it for every attack on everything derived from the releases: an event that has
probability f when one unit is absent has probability at most min over e of exp(e) f + delta(e) when
it is there. The absent event is a false alarm of a membership test, or a lucky guess at a secret.

The bounds hold for one copy of the unit; `lit_dpret.privacy.accounting.secret_ceiling` has those for several. They
are also an alarm: an attack measured above its ceiling, with confidence, is a bug in the mechanism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lit_dpret.privacy.accounting.claims import delta_at, epsilon
from lit_dpret.privacy.accounting.composition import LARGEST_EPSILON
from lit_dpret.privacy.accounting.releases import Release
from lit_dpret.privacy.budget import AccountantName, Neighbours

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
PRIORS = (1e-2, 1e-4, 1e-6, 1e-10)
_POINTS = 1500


def attack_ceilings(
    releases: Iterable[Release],
    *,
    neighbours: Neighbours,
    accountant: AccountantName = "pld",
    delta: float = 1e-9,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
) -> dict[str, Any]:
    """Upper bounds on the success of any attack on the releases and everything made from them.

    Guarantees:
        - Every entry is a bound: a coarser search for the minimum could only raise it.
        - Releases that are not private, or none at all, have the trivial ceilings: certainty, or chance.

    Args:
        releases: What was let out.
        neighbours: What the absence of a unit means.
        accountant: ``pld``, or ``rdp`` for laws that the PLD does not judge; the bounds are then looser.
        delta: Decides how far the curve is followed, and nothing else.
        false_positive_rates: At which the true positive rates are bounded.

    Returns:
        ``membership_accuracy``: of a test that faces members and non-members equally often;
        ``tpr_at_fpr``: true positive rates by false positive rate;
        ``secret_guess``: probability of naming a secret, by the probability of a guess without the
        releases; 1e-10 is a ten-digit number. Keys are decimal texts, so that the dictionary
        survives JSON.
    """
    releases = list(releases)
    stated = epsilon(releases, delta=delta, neighbours=neighbours, accountant=accountant)
    furthest = min(2.0 * stated + 30.0, LARGEST_EPSILON)
    points = [float(x) for x in np.linspace(0.0, furthest, _POINTS)]
    deltas = np.array(delta_at(points, releases, neighbours=neighbours, accountant=accountant))
    with np.errstate(over="ignore"):
        odds = np.exp(np.array(points))

    def ceiling(absent: float) -> float:
        return float(min(1.0, (odds * absent + deltas).min()))

    return {
        "membership_accuracy": float(min(1.0, (1 + deltas[0]) / 2)),
        "tpr_at_fpr": {f"{rate:g}": ceiling(rate) for rate in false_positive_rates},
        "secret_guess": {f"{prior:g}": ceiling(prior) for prior in PRIORS},
    }
