"""A card held against the ledger that it was made from, as any reader can.

`verify_card` checks the claim. `recheck` computes everything else that follows from the ledger (ceilings of attacks,
groups of units, the noise, the assumptions): a card on which one of those was made more pleasant is false as well.
Sentences are told apart from facts, because another version writes other ones.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lit_dpret.cards.amendments import planted_by
from lit_dpret.cards.claim import claim_facts, group_facts, user_level_epsilon
from lit_dpret.cards.decided import accounting_facts, ceilings_of, ledger_facts, mechanism_facts
from lit_dpret.cards.facts import randomness_facts, registered, start_accounting, start_assumptions, start_text
from lit_dpret.cards.file import file_sha256, malformed
from lit_dpret.cards.tuning import (
    SearchCost,
    declared_search,
    hides_earlier_tuning,
    possible_tuning,
    same_facts,
    search_cost,
)
from lit_dpret.errors import DataError, LedgerError, LitDpretError
from lit_dpret.privacy.ledger.dataset_ledger import sweep_limit, sweep_of
from lit_dpret.privacy.ledger.facts import Assumption, Verdict, derived_assumptions, judge, leaks, plan_of
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases, claimed_releases, noise_keys, start_of
from lit_dpret.privacy.plan import PrivacyPlan

# Two evaluations of one accountant differ by less than this; another library version may not.
TOLERANCE = 1e-6


def verify_card(card: Mapping[str, Any], ledger_path: str | Path, *, folder: str | Path | None = None) -> list[str]:
    """Return what is wrong with a card, given the ledger it was made from; empty where nothing is.

    The chain is verified and epsilon recomputed from it. Records that were cut off the ledger's end, or appended after
    the card was made, are reported: the card stores the head hash and the number of records.

    Args:
        card: From `read_card` (or `build_card`); for an inherited card, the ledger is the parent's.
        ledger_path: The ledger.
        folder: Where the subject's files lie; given, their SHA-256 are compared.
    """
    if problem := malformed(card):
        return [problem]
    problems = [] if folder is None else changed_files(card["subject"]["sha256"], Path(folder))
    return [*problems, *_ledger_problems(card, ledger_path)]


def changed_files(digests: Mapping[str, str], folder: Path) -> list[str]:
    """A complaint about each file of a card's subject that is missing in ``folder`` or is another one there."""
    problems = []
    for name, digest in digests.items():
        try:
            if file_sha256(folder / name) != digest:
                problems.append(f"{name} was changed after the card was made: its SHA-256 differs.")
        except DataError:
            problems.append(f"{name} is on the card and not in {folder}.")
    return problems


def _ledger_problems(card: Mapping[str, Any], ledger_path: str | Path) -> list[str]:
    problems: list[str] = []
    try:
        ledger = PrivacyLedger.read(ledger_path)
    except LedgerError as error:
        return [str(error)]
    records, stored = ledger.records, card["ledger"]
    if ledger.torn_bytes:
        problems.append(f"The ledger ends in an incomplete line of {ledger.torn_bytes} bytes.")
    if len(records) < stored["records"]:
        problems.append(
            f"The ledger holds {len(records)} records, the card was made from {stored['records']}: "
            "records were cut off its end."
        )
        return problems
    if stored["records"] == 0 or records[stored["records"] - 1]["hash"] != stored["head"]:
        problems.append("The ledger's head is not the card's: this is another ledger, or another run's card.")
        return problems
    if len(records) > stored["records"]:
        more = len(noise_keys(records[stored["records"] :]))
        problems.append(
            f"The ledger went on after the card was made, by {len(records) - stored['records']} records with "
            f"{more} announced steps: the card is out of date."
        )
    try:
        problems += _wrong_claim(card, records[: stored["records"]])
    except LitDpretError as error:
        problems.append(str(error))
    return problems


def _wrong_claim(card: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the claim with what the records allow, computed anew."""
    plan, _ = plan_of(records)
    releases = claimed_releases(records)
    start, derived = start_of(records), card["mechanism"].get("kind") == "post_processing"
    if start and start["card_sha256"] and start["card_sha256"] not in [parent["sha256"] for parent in card["parents"]]:
        return [f"The ledger's run started from {start['name']}, whose card this one does not name."]
    behind = [] if start is None else start["parents"]
    if card["parents"] != behind if not derived else card["parents"][len(card["parents"]) - len(behind) :] != behind:
        return ["The cards that it names are not those that the ledger's run started from."]
    if card["empirical"].get("pre_registered", []) != registered(records):
        return ["The protocols on the card are not those that the ledger registered before its first step."]
    if card["empirical"].get("planted") != planted_by(records):
        return ["The canaries on the card are not those that the ledger says were planted."]
    verdict = verdict_of(card, records)
    claim = card["claim"]
    if verdict.guarantee != claim["guarantee"]:
        return [f"The card claims the guarantee {claim['guarantee']!r}, the ledger gives {verdict.guarantee!r}."]
    cost = cache(search_cost(releases, plan, verdict))
    problems = (
        [] if derived else _wrong_tuning(card["tuning"], records, cost, plan if verdict.guarantee == "dp" else None)
    )
    if plan is None or verdict.epsilon is None:
        return [*problems, *_other_number("epsilon with its choice", card["tuning"].get("epsilon"), None)]
    budget = plan.budget
    problems += [
        f"The card says {name} = {claim[name]}, the ledger's plan {name} = {getattr(budget, name)}."
        for name in ("delta", "unit", "neighbours")
        if claim[name] != getattr(budget, name)
    ]
    if abs(claim["epsilon"] - verdict.epsilon) > TOLERANCE * max(1.0, verdict.epsilon):
        problems.append(
            f"The card claims epsilon = {claim['epsilon']:.6g}, the ledger gives {verdict.epsilon:.6g} "
            f"(delta = {budget.delta:.3g}, unit = {budget.unit}, neighbours = {budget.neighbours})."
        )
    problems += _wrong_user_level(claim, user_level_epsilon(releases, plan, verdict), plan)
    if (search := declared_search(card["tuning"])) is not None:
        priced, _ = cost(search)
        problems += _other_number("epsilon with its search", card["tuning"].get("epsilon"), priced)
    else:
        problems += _other_number(
            "epsilon with its sweep", card["tuning"].get("epsilon"), sweep_limit(sweep_of(records), budget.delta)
        )
    return problems


def _wrong_tuning(
    stated: Mapping[str, Any], records: Sequence[Mapping[str, Any]], cost: SearchCost, claimed: PrivacyPlan | None
) -> list[str]:
    """Compare what is said of the choice of settings with what the sweep and the start in the ledger leave open."""
    start = start_of(records) or {}
    earlier = start.get("tuning")
    delta = None if claimed is None else claimed.budget.delta
    possible = [same_facts(stated, one) for one in possible_tuning(stated, cost, sweep_of(records), delta, start)]
    if any(possible) and (earlier is None or not hides_earlier_tuning(stated, earlier, composed=True)):
        return []
    return ["What the card says of the choice of hyper-parameters (tuning) does not follow from the ledger."]


def verdict_of(card: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Verdict:
    """Judge what may be claimed for these records, with what the card admits to be false."""
    plan, _ = plan_of(records)
    known = [Assumption(a["text"], a["holds"], a["consequence"]) for a in card["assumptions"]]
    fresh = [*(derived_assumptions(records, plan) if plan is not None else []), *leaks(records)]
    fresh += [assumption for assumption in known if assumption.holds is False]
    return judge(claimed_releases(records), plan, fresh)


def _wrong_user_level(claim: Mapping[str, Any], fresh: float | None, plan: PrivacyPlan) -> list[str]:
    problems = _other_number("user-level epsilon", claim.get("user_level_epsilon"), fresh)
    if (most := claim.get("max_units_per_user")) != plan.max_units_per_user:
        problems.append(f"The card says max_units_per_user = {most}, the ledger's plan says {plan.max_units_per_user}.")
    return problems


def _other_number(what: str, stored: float | None, fresh: float | None) -> list[str]:
    """The complaint that the card has another number than the ledger gives; a card may be silent."""
    if stored is None or (fresh is not None and abs(stored - fresh) <= TOLERANCE * max(1.0, fresh)):
        return []
    given = "none" if fresh is None else f"{fresh:.6g}"
    return [f"The card claims {what} = {stored:.6g}, the ledger gives {given}."]


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
    """The outcome: numbers recomputed, wrong facts, wrong sentences, and the entries that the ledger decides."""

    numbers: int
    wrong: list[str]
    words: list[str]
    decided: set[Place]


def recheck(card: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Recheck:
    """Recompute what the ledger decides, for a card with a ledger of its own.

    An entry that differs from the ledger, is missing, or stands where the ledger knows none is reported by its place.
    Every entry that is not among ``decided`` was compared with nothing.

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
    """Compare the assumptions with those that the ledger decides."""
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
