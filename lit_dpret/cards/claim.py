"""The claim of a card: the number, whom it is for, and what is left of it for several units at once.

A guarantee for one unit says little to somebody who contributed ten. So beside the claim stands what
the same releases promise to k units together: to a user, where the run declared how many units one
of them contributed at most, and to a text that was recorded several times.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_dpret.cards import terms as terms
from lit_dpret.errors import UnsupportedAccountingError
from lit_dpret.privacy.accounting import accountant as accounting
from lit_dpret.privacy.accounting.groups import group_epsilon
from lit_dpret.privacy.accounting.releases import GaussianRelease, Release, TruncatedPoisson
from lit_dpret.privacy.ledger.facts import Verdict, every_unit_in_every_step
from lit_dpret.privacy.plan import PrivacyPlan

GROUPS = (2, 5, 10)
"""The numbers of units for which every card states what they are worth together."""

_NO_GUARANTEE = "not computed: no guarantee"


def claim_facts(
    plan: PrivacyPlan | None,
    verdict: Verdict,
    releases: Sequence[Release],
    output_released: Sequence[str],
    duplicates_policy: str,
) -> dict[str, Any]:
    """What is claimed, for whom, and against which neighbours; never a number where none is proved."""
    if plan is None:
        return {
            "flavour": None,
            "guarantee": "none",
            "epsilon": None,
            "delta": None,
            "delta_rule": None,
            "curve": [],
            "unit": None,
            "unit_text": None,
            "unit_plural": None,
            "neighbours": None,
            "neighbours_text": None,
            "max_units_per_user": None,
            "user_level_epsilon": None,
            "duplicates_policy": None,
            "protected": [],
            "unprotected_quantities": [],
            "output_released": list(output_released),
        }
    budget, n = plan.budget, plan.n_public
    follows = n is not None and math.isclose(budget.delta, 1 / (2 * n), rel_tol=1e-9)
    curve: list[list[float]] = []
    if verdict.basis == "as_charged":
        pairs = accounting.epsilon_curve(releases, neighbours=budget.neighbours, accountant=plan.accountant)
        curve = [[epsilon, delta] for epsilon, delta in pairs if math.isfinite(epsilon)]
    proved = verdict.guarantee == "dp"
    return {
        "flavour": "(epsilon, delta)-differential privacy",
        "guarantee": verdict.guarantee,
        "epsilon": verdict.epsilon,
        "delta": budget.delta,
        "delta_rule": "1 / (2 n)" if follows else "a declared constant",
        "curve": curve,
        "unit": budget.unit,
        "unit_text": terms.describe_unit(budget.unit),
        "unit_plural": terms.plural(budget.unit),
        "neighbours": budget.neighbours,
        "neighbours_text": terms.describe_neighbours(budget.unit, budget.neighbours),
        "max_units_per_user": plan.max_units_per_user,
        "user_level_epsilon": user_level_epsilon(releases, plan, verdict),
        "duplicates_policy": duplicates_policy
        or f"equal texts are separate {terms.plural(budget.unit)}; none were merged or capped",
        "protected": terms.protected(budget.unit, budget.neighbours) if proved else [],
        "unprotected_quantities": terms.unprotected_quantities(budget.unit, budget.neighbours, n),
        "output_released": list(output_released),
    }


def user_level_epsilon(releases: Sequence[Release], plan: PrivacyPlan, verdict: Verdict) -> float | None:
    """The epsilon of everything that one user contributed; None where it is not declared or not proved.

    Guarantees:
        - With ``unit=user`` it is the claim's own.
        - Otherwise it is that of ``max_units_per_user`` units together, a bound that the run declared
          before its first step. Nothing is concluded from the data.
    """
    if plan.budget.unit == "user":
        return verdict.epsilon
    if plan.max_units_per_user is None:
        return None
    value: float | None = _of_units(plan.max_units_per_user, releases, plan, verdict)["epsilon"]
    return value


def group_facts(releases: Sequence[Release], plan: PrivacyPlan | None, verdict: Verdict) -> list[dict[str, Any]]:
    """For each of `GROUPS`: how many units, the epsilon of them together or None, and then why."""
    if plan is None:
        return []
    return [_of_units(units, releases, plan, verdict) for units in GROUPS]


def _of_units(units: int, releases: Sequence[Release], plan: PrivacyPlan, verdict: Verdict) -> dict[str, Any]:
    fact: dict[str, Any] = {"units": units, "epsilon": None, "why": _NO_GUARANTEE}
    if verdict.guarantee != "dp":
        return fact
    if units == 1:
        return {**fact, "epsilon": verdict.epsilon, "why": None}
    charged = releases if verdict.basis == "as_charged" else every_unit_in_every_step(releases)
    try:
        value = group_epsilon(charged, delta=plan.budget.delta, max_units=units, neighbours=plan.budget.neighbours)
    except UnsupportedAccountingError as error:
        return {**fact, "why": f"not proved: {error}"}
    if math.isfinite(value):
        return {**fact, "epsilon": value, "why": None}
    return {**fact, "why": "infinite", "wider": _wider(units, charged, plan)}


def _wider(units: int, charged: Sequence[Release], plan: PrivacyPlan) -> dict[str, Any] | None:
    """The cap of this run's batches that would give ``units`` units a number, and the number; None where none would."""
    law = plan.law
    own = [r for r in charged if isinstance(r, GaussianRelease) and r.law == law]
    if not isinstance(law, TruncatedPoisson) or not own:
        return None
    steps, delta = sum(release.count for release in own), plan.budget.delta
    cap = accounting.cap_for_copies(law, steps=steps, delta=delta, copies=units)
    rest = [replace(r, law=replace(law, cap=cap)) if r in own else r for r in charged]
    value = group_epsilon(rest, delta=delta, max_units=units, neighbours=plan.budget.neighbours)
    return {"cap": cap, "epsilon": value} if math.isfinite(value) else None


def without_numbers(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The accounting of a parent for a child whose own guarantee is not proved: what was done, no epsilon."""
    if facts is None:
        return None
    bare = copy.deepcopy(dict(facts))
    names = [name for name in bare if name.startswith("epsilon_")]
    bare |= dict.fromkeys(names) | {"not_computed": dict.fromkeys(names, _NO_GUARANTEE)}
    if start := bare.get("init_from"):
        start |= {name: None for name in start if name.startswith("epsilon_")}
    for part in bare["composition"]:
        part["epsilon_alone"] = None
    for group in bare.get("groups", []):
        group |= {"epsilon": None, "why": _NO_GUARANTEE}
        group.pop("wider", None)
    return bare
