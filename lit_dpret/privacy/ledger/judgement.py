"""Derive the claim from ledger records: the releases that it covers, and the epsilon that follows, if any.

Nothing here reads a configuration. Each of these functions returns a list of releases:

* `charged_releases`: the announced steps, as they were really made;
* `promised_releases`: those, and the planned steps that were not made;
* `claimed_releases`: those, and the releases behind the weights that the run started from; the card's epsilon;
* `owed_releases`: what other runs count for this one: its promised releases, or an unbounded one if its ledger refutes
  the claim;
* `forthcoming_releases`: the charged releases after further steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_dpret.errors import LedgerError, UnsupportedAccountingError
from lit_dpret.privacy.accounting import composition as accounting
from lit_dpret.privacy.accounting.releases import (
    FullBatch,
    GaussianRelease,
    NonPrivateRelease,
    Release,
    merge,
    release_from_dict,
)
from lit_dpret.privacy.budget import AccountantName
from lit_dpret.privacy.ledger.assumptions import Assumption, Record, derived_assumptions, leaks
from lit_dpret.privacy.ledger.run_ledger import (
    charged_releases,
    forthcoming_releases,
    noise_keys,
    plans_of,
    with_earlier_releases,
)
from lit_dpret.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class Verdict:
    """The claim: a finite epsilon with ``dp``, and no number with ``none`` or ``not_proved``."""

    guarantee: Literal["dp", "none", "not_proved"]
    epsilon: float | None
    basis: Literal["as_charged", "no_amplification", "nothing"]


def plan_of(records: Sequence[Record]) -> tuple[PrivacyPlan | None, dict[str, Any]]:
    """Return the plan in the ledger, and its last ``plan`` record."""
    found = [dict(record) for record in plans_of(records)]
    if not found:
        raise LedgerError("The ledger has no plan record: the claim of its releases is unknown.")
    plans = [PrivacyPlan.from_dict(record["plan"]) if record["plan"] else None for record in found]
    claims = {None if p is None else (p.budget.delta, p.budget.unit, p.budget.neighbours, p.budget.duplicates,
                                      p.budget.unit_by, p.accountant) for p in plans}  # fmt: skip
    # An attempt may change noise or length, but one epsilon has one meaning.
    if len(claims) > 1:
        raise LedgerError("The ledger's plans differ in delta, units, neighbours, duplicates or accountant.")
    return plans[-1], found[-1]


@dataclass(frozen=True)
class Judged:
    """The records of a ledger, and their verdict."""

    records: Sequence[Record]  # all of them, in order
    plan: PrivacyPlan | None  # the last one; None for a run without privacy
    # What the run promised (`promised_releases`): what it released, and what else it had planned.
    own: Sequence[Release]
    releases: Sequence[Release]  # what the claim covers: those, and the cost of the model that the run started from
    verdict: Verdict  # the claim
    assumptions: Sequence[Assumption]  # those that the verdict rests on, or that refute it

    @classmethod
    def by(cls, records: Sequence[Record], assumptions: Sequence[Assumption]) -> Judged:
        plan, _ = plan_of(records)
        own = promised_releases(records)
        releases = with_earlier_releases(records, own)
        return cls(records, plan, own, releases, *judge(releases, plan, assumptions))

    @property
    def claimed_plan(self) -> PrivacyPlan | None:
        return self.plan if self.verdict.guarantee == "dp" else None

    @property
    def charged(self) -> Sequence[Release]:
        """The charged releases: without amplification by sampling, if it cannot be claimed."""
        return self.releases if self.verdict.basis == "as_charged" else every_unit_in_every_step(self.releases)

    @property
    def beyond_plan(self) -> Literal["repeated_steps", "otherwise"] | None:
        """Why the run is charged with more than was planned before its first step; None if it is not.

        Then the cost planned for it together with other runs does not bound what they cost.
        """
        recorded = plans_of(self.records)
        if not recorded or not recorded[0]["plan"]:
            return None
        first = PrivacyPlan.from_dict(recorded[0]["plan"])
        steps = int(recorded[0]["planned_steps"])
        planned = {
            replace(release, count=1): release.count
            for release in forthcoming_releases([], first.release(), first=0, until=steps)
        }
        own = merge(self.own if self.verdict.basis == "as_charged" else every_unit_in_every_step(self.own))
        if all(release.count <= planned.get(replace(release, count=1), 0) for release in own):
            return None
        keys = noise_keys(self.records)
        return "repeated_steps" if len({step for _, step in keys}) < len(keys) else "otherwise"


def judge(
    releases: Sequence[Release], plan: PrivacyPlan | None, assumptions: Sequence[Assumption]
) -> tuple[Verdict, Sequence[Assumption]]:
    """Return the claim for these releases, and its assumptions; one is added if no accountant judges the law.

    Where amplification by sampling cannot be claimed, every unit is charged for every step. That requires each unit to
    be in a batch at most once and the batches of the other units not to change, so it is no bound under
    ``add_or_remove``.
    """
    if plan is None or any(isinstance(release, NonPrivateRelease) for release in releases):
        return Verdict("none", None, "nothing"), assumptions
    broken = {a.consequence for a in assumptions if a.refuted}
    amplified = "no_amplification" not in broken
    if amplified:
        try:
            value = epsilon_by(plan.accountant, releases, plan)
        except UnsupportedAccountingError as error:
            amplified = False
            text = f"The {plan.accountant} accountant supports the sampling that ran. It does not: {error.sentence}"
            assumptions = [*assumptions, Assumption(text, "refuted", "no_amplification")]
    if broken & {"no_guarantee", "no_claim"} or (not amplified and plan.budget.neighbours == "add_or_remove"):
        return Verdict("not_proved", None, "nothing"), assumptions
    if not amplified:
        value = epsilon_by("pld", every_unit_in_every_step(releases), plan)
    # An infinite epsilon is not a number to print: such a run promises nothing, whatever it assumed.
    if not math.isfinite(value):
        return Verdict("none", None, "nothing"), assumptions
    return Verdict("dp", value, "as_charged" if amplified else "no_amplification"), assumptions


def promised_releases(records: Sequence[Record]) -> list[Release]:
    """Return the releases a claim covers: `charged_releases`, and planned steps that were not made.

    The person who ended a run early may have looked at its output: a metric of its checkpoints, someone who saw them,
    an error that only some weights cause. Then the number of steps is an outcome of the mechanism, and the epsilon of
    that number of steps bounds nothing. Only a number fixed in advance does not depend on such a look: the steps of the
    plan, as far as the budget covers them, since the gate refuses every further step.

    Guarantees:
        - A run that reached its planned end, or that announced no step, is charged with what it released.
        - The epsilon of the result is at most the larger of the budget and the epsilon of what was released.
    """
    charged, keys = charged_releases(records), noise_keys(records)
    plan, last = plan_of(records) if keys and plans_of(records) else (None, {})
    if plan is None or any(isinstance(release, NonPrivateRelease) for release in charged):
        return charged
    # Steps of earlier attempts are charged already; the steps still planned belong to the last attempt.
    attempt = max(attempt for attempt, _ in keys)
    first = 1 + max(step for each, step in keys if each == attempt)
    planned = int(last["planned_steps"])
    intents = [record["release"] for record in records if record["kind"] == "intent"]
    # As the last step was announced: a departure from the planned law continues in the steps not made.
    step = release_from_dict(intents[-1])

    def until(end: int) -> list[Release]:
        return forthcoming_releases(records, step, first=first, until=end, attempt=attempt)

    def covered(end: int) -> bool:
        return epsilon_by(plan.accountant, until(end), plan) <= plan.budget.eps

    try:
        # The usual case takes one evaluation; each further one may take seconds.
        if planned <= first or covered(planned):
            return until(planned)
    except UnsupportedAccountingError:  # the verdict reports it
        return until(planned)
    fits, fails = first, planned
    while fails - fits > 1:  # the gate stops at the first step that the budget does not cover
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if covered(middle) else (fits, middle)
    return until(fits)


def claimed_releases(records: Sequence[Record]) -> list[Release]:
    """Return the releases behind a run's model: its own (`promised_releases`), and those of its start."""
    return with_earlier_releases(records, promised_releases(records))


def every_unit_in_every_step(releases: Sequence[Release]) -> list[Release]:
    """Return the same releases without amplification by sampling."""
    return [replace(r, law=FullBatch()) if isinstance(r, GaussianRelease) else r for r in releases]


def epsilon_by(accountant: AccountantName, releases: Sequence[Release], plan: PrivacyPlan) -> float:
    """Return the epsilon of releases at a plan's delta and under its relation."""
    budget = plan.budget
    return accounting.epsilon(releases, delta=budget.delta, neighbours=budget.neighbours, accountant=accountant)


def owed_releases(records: Sequence[Mapping[str, Any]], *, as_made: bool = False) -> list[Release]:
    """Return the releases charged to a run, as far as its ledger permits a claim.

    They are its `promised_releases`; with ``as_made``, only those that it made, for a caller that accounts for the rest
    of the plan itself.

    Guarantees:
        - If the ledger itself refutes the claim (a private loss or metric was shown, the noise is keyed with a
          published number, a bound is refuted, units were added or removed and batches not drawn as planned), the
          result contains a `NonPrivateRelease`: no total over runs is finite where a run's own card proves nothing.
        - If only amplification by sampling is refuted, every unit is charged for every step.
    """
    charged = charged_releases(records) if as_made else promised_releases(records)
    if not plans_of(records):
        return charged
    plan, _ = plan_of(records)
    if plan is None:
        return charged
    refuted = [a for a in (*derived_assumptions(records, plan), *leaks(records)) if a.refuted]
    broken = {assumption.consequence for assumption in refuted}
    # A total that includes this run must not be finite where its own card states nothing.
    if "no_guarantee" in broken or ("no_amplification" in broken and plan.budget.neighbours == "add_or_remove"):
        return [*charged, NonPrivateRelease(label="a run whose card proves nothing")]
    return every_unit_in_every_step(charged) if "no_amplification" in broken else charged
