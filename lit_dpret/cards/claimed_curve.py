"""The privacy curve that a ledger claims of its own run: what an audit of that run can contradict.

The card prints one epsilon at one delta. The releases behind it satisfy a whole curve, and an audit may hold the run
against every pair of it (`lit_dpret.audit.statistics.claim`). A canary that was planted in this run met none of the
releases of a model that the run started from, so those are left out here: the curve is that of the run's own releases,
and never above the claim on the card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_dpret.errors import UnsupportedAccountingError
from lit_dpret.privacy.accounting import accountant as accounting
from lit_dpret.privacy.budget import AccountantName
from lit_dpret.privacy.ledger.charges import charged_releases
from lit_dpret.privacy.ledger.facts import derived_assumptions, every_unit_in_every_step, judge, plan_of

# Below this, rounding in the convolution of privacy losses is no longer small beside delta.
_LEAST_DELTA = 1e-12
_PAIRS = 60


@dataclass(frozen=True, kw_only=True)
class ClaimedCurve:
    """What a run claims of one unit.

    Attributes:
        eps: The epsilon of its own releases; at most that on its card.
        delta: The delta that it goes with.
        neighbours: The relation.
        pairs: (epsilon, delta) that the releases satisfy all at once, the claim among them.
    """

    eps: float
    delta: float
    neighbours: str
    pairs: tuple[tuple[float, float], ...]


def claimed_curve(records: Sequence[Mapping[str, Any]]) -> ClaimedCurve | None:
    """The curve of the releases that a ledger charges; None where they prove nothing, so that nothing is claimed.

    Guarantees:
        - Every pair is one that the accountant vouches for, under the relation of the claim.
        - It says what the ledger says, never what was configured: steps that stated less noise are charged so.

    Args:
        records: ``PrivacyLedger.records``.

    Raises:
        LedgerError: They contradict each other.
    """
    plan, _ = plan_of(records)
    if plan is None:
        return None
    releases = charged_releases(records)
    verdict = judge(releases, plan, derived_assumptions(records, plan))
    if verdict.guarantee != "dp" or verdict.epsilon is None:
        return None
    sampled = verdict.basis == "as_charged"
    charged = releases if sampled else every_unit_in_every_step(releases)
    accountant: AccountantName = plan.accountant if sampled else "pld"
    stated = (verdict.epsilon, plan.budget.delta)
    grid = [float(eps) for eps in np.linspace(0.0, 2.0 * verdict.epsilon + 4.0, _PAIRS)]
    neighbours = plan.budget.neighbours
    try:
        deltas = accounting.delta_at(grid, charged, neighbours=neighbours, accountant=accountant)
    except UnsupportedAccountingError:  # an accountant that bounds epsilon only
        deltas = []
    pairs = [(eps, delta) for eps, delta in zip(grid, deltas, strict=False) if _LEAST_DELTA <= delta < 1]
    return ClaimedCurve(eps=stated[0], delta=stated[1], neighbours=neighbours, pairs=(stated, *pairs))
