"""All of a card that follows from its ledger, computed anew: not the epsilon of the claim alone.

``verify_card`` checks the claim. A reader also looks at the ceilings of attacks, at what several units are
worth together, at the noise that was added and at what is taken on trust; a card on which one of those was made more
pleasant says something false as well. Sentences are told apart from facts: another version has other ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_dpret.cards.check import TOLERANCE, verdict_of
from lit_dpret.cards.claim import claim_facts, group_facts
from lit_dpret.cards.start import randomness_facts, start_accounting, start_assumptions, start_text
from lit_dpret.cards.tuning import possible_tuning, same_facts, search_cost
from lit_dpret.privacy.assumptions import accounting_facts, ceilings_of, derived_assumptions, mechanism_facts, plan_of
from lit_dpret.privacy.charges import charged_releases, claimed_releases, start_of
from lit_dpret.privacy.leaks import leaks
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.privacy.sweep_places import sweep_of

_NOT_OF_THE_LEDGER = ("output_released", "duplicates_policy")
_SENTENCES = (
    "text", "law_text", "unit_text", "unit_plural", "neighbours_text", "flavour", "delta_rule", "protected",
    "unprotected_quantities", "empty_batches", "error_bound", "not_computed", "why", "start", "rng", "secret",
)  # fmt: skip


@dataclass(frozen=True)
class Recheck:
    """What came of it.

    Args:
        numbers: How many numbers were computed anew.
        wrong: What is wrong with those numbers and other facts that differ.
        words: What is wrong with sentences, if this version wrote them.
    """

    numbers: int
    wrong: list[str]
    words: list[str]


def recheck(card: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Recheck:
    """Compute anew what the ledger decides.

    Guarantees:
        - A number, name or switch of ``claim``, ``mechanism``, ``accounting``, ``randomness``, ``ledger`` or
          ``empirical.ceilings`` that the ledger decides and that differs from it is reported by its place, and so is an
          assumption that holds otherwise. What the card does not state is not, an entry that is left out of a list
          included: a card may be silent. ``_NOT_OF_THE_LEDGER`` and ``_SENTENCES`` name what is not compared here.

    Args:
        card: One with a ledger of its own.
        records: The records that it was made from.

    Raises:
        LedgerError: The records contradict each other, or hold no plan.
    """
    plan, _ = plan_of(records)
    own, releases, verdict = charged_releases(records), claimed_releases(records), verdict_of(card, records)
    claim = claim_facts(plan, verdict, releases, (), "")
    fresh: dict[str, Any] = {
        "claim": {name: value for name, value in claim.items() if name not in _NOT_OF_THE_LEDGER},
        "mechanism": mechanism_facts(records, plan, own),
        "accounting": None,
        "randomness": randomness_facts(records, plan),
        "empirical": {"ceilings": ceilings_of(releases, plan, verdict)},
        "ledger": {"releases": [release.to_dict() for release in releases]},
    }
    if plan is not None:
        fresh["accounting"] = {
            **_without_program(accounting_facts(records, releases, plan, verdict)),
            "groups": group_facts(releases, plan, verdict),
            **start_accounting(records, own, plan, verdict),
        }
    stated = card["accounting"] or {}
    fresh["pretraining"] = start_text(records, stated, plan, verdict, card["pretraining"].get("model"))
    found = [*_compared(fresh, card, ()), *_assumed(card, records, plan)]
    delta = plan.budget.delta if plan is not None and verdict.guarantee == "dp" else None
    tuning, cost = card["tuning"], search_cost(releases, plan, verdict)
    possible = possible_tuning(tuning, cost, sweep_of(records), delta, start_of(records))
    if tuning["text"] not in [one["text"] for one in possible if same_facts(tuning, one)]:
        found.append(_Found("tuning.text does not follow from the facts of tuning and the ledger.", words=True))
    wrong = [one for one in found if one.problem is not None]
    return Recheck(
        numbers=sum(one.number for one in found),
        wrong=[str(one.problem) for one in wrong if not one.words],
        words=[str(one.problem) for one in wrong if one.words],
    )


@dataclass(frozen=True)
class _Found:
    """One place of a card that the ledger decides; ``problem`` is None where nothing is wrong."""

    problem: str | None
    number: bool = False
    words: bool = False


def _without_program(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Accounting facts without those of the program that computes them now."""
    return {name: value for name, value in facts.items() if name not in ("library", "version")}


def _assumed(
    card: Mapping[str, Any], records: Sequence[Mapping[str, Any]], plan: PrivacyPlan | None
) -> Iterator[_Found]:
    """What the ledger says of the steps of the argument."""
    known = [] if plan is None else derived_assumptions(records, plan)
    known += [*start_assumptions(records, card["pretraining"].get("model")), *leaks(records)]
    for one in known:
        stated = [assumption for assumption in card["assumptions"] if assumption["text"] == one.text]
        if not stated:
            yield _Found(f"assumptions leave out, by the ledger: {one.text}", words=True)
        elif one.to_dict() not in stated:
            yield _Found(f"assumptions say otherwise than the ledger whether this holds: {one.text}")


def _compared(fresh: Any, stated: Any, place: tuple[str, ...]) -> Iterator[_Found]:
    """Everything on the card that the ledger decides."""
    where, words = ".".join(place), any(name in _SENTENCES for name in place)
    if isinstance(fresh, Mapping) and isinstance(stated, Mapping | None):
        if stated is not None:
            for name in fresh.keys() & stated.keys():
                yield from _compared(fresh[name], stated[name], (*place, name))
    elif isinstance(fresh, (list, tuple)) and isinstance(stated, list | None):
        if stated and len(stated) != len(fresh):
            yield _Found(f"{where} has {len(stated)} entries on the card, and {len(fresh)} by the ledger.", words=words)
        elif stated:
            for index, (new, old) in enumerate(zip(fresh, stated, strict=True)):
                yield from _compared(new, old, (*place, str(index)))
    elif isinstance(stated, (int, float)) and not isinstance(stated, bool):
        if fresh is None and place[0] != "mechanism":  # which also holds what the ledger does not know
            yield _Found(f"{where} is {stated:.6g} on the card, and no number by the ledger.")
        elif isinstance(fresh, (int, float)):
            same = math.isclose(stated, fresh, rel_tol=TOLERANCE, abs_tol=1e-15)
            problem = None if same else f"{where} is {stated:.6g} on the card, and {fresh:.6g} by the ledger."
            yield _Found(problem, number=True)
        elif fresh is not None:
            yield _Found(f"{where} is {stated!r} on the card, and {fresh!r} by the ledger.", words=words)
    elif stated is not None and stated != fresh and not (fresh is None and place[0] == "mechanism"):
        yield _Found(f"{where} is {stated!r} on the card, and {fresh!r} by the ledger.", words=words)
