"""All of a card that follows from its ledger, computed anew: not the epsilon of the claim alone.

``verify_card`` checks the claim. A reader also looks at the ceilings of attacks, at what several units are
worth together, at the noise that was added and at what is taken on trust; a card on which one of those was made more
pleasant says something false as well. Sentences are told apart from facts: another version has other ones.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_dpret.cards.check import TOLERANCE, verdict_of
from lit_dpret.cards.claim import claim_facts, group_facts
from lit_dpret.cards.start import randomness_facts, start_accounting, start_assumptions, start_text
from lit_dpret.cards.tuning import possible_tuning, same_facts, search_cost
from lit_dpret.privacy.ledger.charges import charged_releases, claimed_releases, start_of
from lit_dpret.privacy.ledger.facts import (
    accounting_facts,
    ceilings_of,
    derived_assumptions,
    ledger_facts,
    mechanism_facts,
    plan_of,
)
from lit_dpret.privacy.ledger.leaks import leaks
from lit_dpret.privacy.ledger.sweep_places import sweep_of
from lit_dpret.privacy.plan import PrivacyPlan

Place = tuple[str, ...]
"""The names and numbers that lead to an entry of a card."""

_DECLARED = {
    "claim": ("output_released", "duplicates_policy"),
    "accounting": ("library", "version"),
    "tuning": ("data", "n_trials", "note", "method", "mean_runs", "runs_law"),
}
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
        decided: The entries of the card that the ledger decides, right or wrong.
    """

    numbers: int
    wrong: list[str]
    words: list[str]
    decided: set[Place]


def recheck(card: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Recheck:
    """Compute anew what the ledger decides.

    Guarantees:
        - An entry that the ledger decides and that differs from it, is missing or stands where the ledger knows none is
          reported by its place. Every entry that is not among ``decided`` was compared with nothing.

    Args:
        card: One with a ledger of its own.
        records: The records that it was made from.

    Raises:
        LedgerError: The records contradict each other, or hold no plan.
    """
    plan, _ = plan_of(records)
    own, releases, verdict = charged_releases(records), claimed_releases(records), verdict_of(card, records)
    fresh: dict[str, Any] = {
        "claim": claim_facts(plan, verdict, releases, (), ""),
        "mechanism": mechanism_facts(records, plan, own),
        "accounting": None,
        "randomness": randomness_facts(records, plan),
        "empirical": {"ceilings": ceilings_of(releases, plan, verdict)},
        "ledger": ledger_facts(records, releases, card["ledger"]["name"]),
    }
    if plan is not None:
        fresh["accounting"] = {
            **accounting_facts(records, releases, plan, verdict),
            "groups": group_facts(releases, plan, verdict),
            **start_accounting(records, own, plan, verdict),
        }
    stated = card["accounting"] or {}
    fresh["pretraining"] = start_text(records, stated, plan, verdict, card["pretraining"].get("model"))
    found = [*_compared(json.loads(json.dumps(fresh)), card, ()), *_assumed(card, records, plan)]
    delta = plan.budget.delta if plan is not None and verdict.guarantee == "dp" else None
    tuning, cost = card["tuning"], search_cost(releases, plan, verdict)
    possible = possible_tuning(tuning, cost, sweep_of(records), delta, start_of(records))
    follows = tuning["text"] in [one["text"] for one in possible if same_facts(tuning, one)]
    problem = None if follows else "tuning.text does not follow from the facts of tuning and the ledger."
    found.append(_Found(("tuning", "text"), problem, words=True))
    wrong = [one for one in found if one.problem is not None]
    return Recheck(
        numbers=sum(one.number for one in found),
        wrong=[str(one.problem) for one in wrong if not one.words],
        words=[str(one.problem) for one in wrong if one.words],
        decided={one.place for one in found} | {("tuning", name) for name in tuning if name not in _DECLARED["tuning"]},
    )


@dataclass(frozen=True)
class _Found:
    """An entry of a card that the ledger decides; ``problem`` is None where nothing is wrong."""

    place: Place
    problem: str | None = None
    number: bool = False
    words: bool = False


def _assumed(
    card: Mapping[str, Any], records: Sequence[Mapping[str, Any]], plan: PrivacyPlan | None
) -> Iterator[_Found]:
    """What the ledger says of the steps of the argument."""
    known = [] if plan is None else derived_assumptions(records, plan)
    known += [*start_assumptions(records, card["pretraining"].get("model")), *leaks(records)]
    stated = card["assumptions"]
    for one in known:
        places = [("assumptions", str(index)) for index, other in enumerate(stated) if other["text"] == one.text]
        if not places:
            yield _Found(("assumptions",), f"assumptions leave out, by the ledger: {one.text}", words=True)
        elif any(stated[int(index)] != one.to_dict() for _, index in places):
            yield _Found(places[0], f"assumptions say otherwise than the ledger whether this holds: {one.text}")
        yield from map(_Found, places)


def _compared(fresh: Any, stated: Any, place: Place) -> Iterator[_Found]:
    """Everything on the card that the ledger decides."""
    where, words = ".".join(place), any(name in _SENTENCES for name in place)
    if fresh is None and place[0] == "mechanism":
        return  # which also holds what the ledger does not know
    if isinstance(fresh, Mapping) and isinstance(stated, Mapping) and (fresh or stated):
        for name in fresh:
            if name in _DECLARED.get(where, ()):
                continue
            if name in stated:
                yield from _compared(fresh[name], stated[name], (*place, name))
            elif fresh[name] is not None:
                yield _Found(place, f"{where} has no {name} on the card, and one by the ledger.", words=words)
    elif isinstance(fresh, list) and isinstance(stated, list) and len(fresh) == len(stated) and fresh:
        for index, (new, old) in enumerate(zip(fresh, stated, strict=True)):
            yield from _compared(new, old, (*place, str(index)))
    elif isinstance(fresh, list) and isinstance(stated, list) and len(fresh) != len(stated):
        problem = f"{where} has {len(stated)} entries on the card, and {len(fresh)} by the ledger."
        yield _Found(place, problem, words=words)
    elif _number(fresh) and _number(stated):
        same = math.isclose(stated, fresh, rel_tol=TOLERANCE, abs_tol=1e-15)
        yield _Found(place, None if same else _differs(where, stated, fresh), number=True)
    else:
        same = stated == fresh and type(stated) is type(fresh)
        yield _Found(place, None if same else _differs(where, stated, fresh), words=words)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _differs(where: str, stated: Any, fresh: Any) -> str:
    shown = [f"{value:.6g}" if _number(value) else reprlib.repr(value) for value in (stated, fresh)]
    return f"{where} is {shown[0]} on the card, and {shown[1]} by the ledger."
