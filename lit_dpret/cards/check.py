"""Check a card against its ledger, as any reader can.

`recheck` compares everything that follows from the ledger, including attack ceilings, groups of units, the noise and
the assumptions: a card on which any of those was improved is false too.
Sentences are treated separately from facts, because another version words them differently.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.claim import claim_facts
from lit_dpret.cards.file import malformed
from lit_dpret.cards.provenance import gaps_of_start, start_assumptions, start_parents
from lit_dpret.cards.recomputed import decided_blocks, registered_facts
from lit_dpret.cards.tuning import hides_earlier_tuning, possible_tuning, same_facts
from lit_dpret.errors import DataError, LedgerError, LitDpretError
from lit_dpret.files import file_sha256
from lit_dpret.privacy.ledger.assumptions import Assumption, derived_assumptions, leaks
from lit_dpret.privacy.ledger.judgement import Judged, plan_of
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, noise_keys, recorded_start
from lit_dpret.privacy.plan import PrivacyPlan
from lit_dpret.settings import is_number

# Two evaluations of one accountant differ by less than this; another library version may differ by more.
TOLERANCE = 1e-6


def verify_card(card: Mapping[str, Any], ledger_path: str | Path, *, folder: str | Path | None = None) -> list[str]:
    """Return the errors of a card's claim, given its ledger; empty if there are none.

    Args:
        card: From `read_card` (or `build_card`); for an inherited card, the ledger is the parent's.
        ledger_path: The ledger.
        folder: The folder of the subject's files; if given, their SHA-256 are compared.
    """
    if problem := malformed(card):
        return [problem]
    problems = [] if folder is None else changed_files(card["subject"]["sha256"], Path(folder))
    try:
        ledger = PrivacyLedger.read(ledger_path)
    except LedgerError as error:
        return [*problems, str(error)]
    return [*problems, *recheck(card, ledger, whole=False).problems]


def changed_files(digests: Mapping[str, str], folder: Path) -> list[str]:
    """Return a complaint about each file of a card's subject that is missing or changed in ``folder``."""
    problems = []
    for name, digest in digests.items():
        try:
            if file_sha256(folder / name) != digest:
                problems.append(f"{name} was changed after the card was made: its SHA-256 differs.")
        except DataError:
            problems.append(f"{name} is on the card and not in {folder}.")
    return problems


Place = tuple[str, ...]
"""The path of keys and indices that leads to an entry of a card."""

_DECLARED = {
    "claim": ("output_released",),
    "accounting": ("library", "version"),
    "tuning": ("data", "n_trials", "note", "method", "mean_runs", "runs_law"),
}
_SENTENCES = (
    "text", "law_text", "unit_text", "unit_plural", "neighbours_text", "flavour", "delta_rule", "protected",
    "unprotected_quantities", "duplicates_policy", "empty_batches", "error_bound", "not_computed", "why", "start",
    "rng", "secret",
)  # fmt: skip


@dataclass(frozen=True)
class Recheck:
    """The result of comparing a card with its ledger."""

    problems: Sequence[str] = ()  # of the chain and the claim; if there are any, nothing else was compared
    wrong: Sequence[str] = ()  # facts that differ from the ledger's
    words: Sequence[str] = ()  # sentences that differ from those that follow from the ledger
    numbers: int = 0  # how many numbers were recomputed
    # The entries that the ledger decides; all others were compared with nothing.
    decided: frozenset[Place] = frozenset()


@dataclass(frozen=True)
class _Found:
    """An entry of a card that the ledger decides; ``problem`` is None where nothing is wrong."""

    place: Place
    problem: str | None = None
    number: bool = False
    words: bool = False


def recheck(card: Mapping[str, Any], ledger: PrivacyLedger, *, whole: bool = True) -> Recheck:
    """Compare a card with the values recomputed from its ledger.

    For a derived card, or if ``whole`` is false, compare only the claim.
    """
    stored = card["ledger"]
    if broken := _not_its_chain(stored, ledger):
        return Recheck(broken)
    problems = []
    if later := ledger.records[stored["records"] :]:
        problems.append(
            f"The ledger continued after the card was made, by {len(later)} records with {len(noise_keys(later))} "
            "announced steps: the card is out of date."
        )
    derived = card["mechanism"].get("kind") == "post_processing"
    try:
        judged = judge_card(card, ledger.records[: stored["records"]])
        found = list(_of_claim(card, judged, derived=derived))
        problems += [str(one.problem) for one in found if one.problem is not None and not one.words]
        if problems or derived or not whole:
            return Recheck(problems)
        found += _of_the_rest(card, judged)
    except LitDpretError as error:
        return Recheck([*problems, str(error)])
    wrong = [one for one in found if one.problem is not None]
    return Recheck(
        wrong=[str(one.problem) for one in wrong if not one.words],
        words=[str(one.problem) for one in wrong if one.words],
        numbers=sum(one.number for one in found),
        decided=frozenset(one.place for one in found),
    )


def _not_its_chain(stored: Mapping[str, Any], ledger: PrivacyLedger) -> list[str]:
    """Return the signs that the card was not made from this ledger, or from more records than are left."""
    records, count = ledger.records, stored["records"]
    torn = f"The ledger ends in an incomplete line of {ledger.torn_bytes} bytes."
    problems = [torn] if ledger.torn_bytes else []
    if len(records) < count:
        problems.append(
            f"The ledger holds {len(records)} records, but the card was made from {count}: records were removed from "
            "its end."
        )
    elif count == 0 or records[count - 1]["hash"] != stored["head"]:
        problems.append("The ledger's head is not the card's: this is another ledger, or another run's card.")
    return problems


def judge_card(card: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Judged:
    """Judge the claim of these records, given the assumptions that the card admits to be false."""
    plan, _ = plan_of(records)
    known = [*(derived_assumptions(records, plan) if plan is not None else []), *leaks(records)]
    known += [Assumption(a["text"], "refuted", a["consequence"]) for a in card["assumptions"] if a["holds"] is False]
    return Judged.by(records, known)


def _of_claim(card: Mapping[str, Any], judged: Judged, *, derived: bool) -> Iterator[_Found]:
    """Compare the claim, the parents, protocols and canaries it relies on, and the choice of settings."""
    behind, named = start_parents(judged.records), card["parents"]
    if derived:  # the artefacts it was made from come first
        named = named[len(named) - len(behind) :]
    other = "The cards that it names are not those that the ledger's run started from."
    yield _Found(("parents",), None if named == behind else other)
    told, stated = registered_facts(judged.records), card["empirical"]
    for name, what in (("pre_registered", "protocols"), ("planted", "canaries")):
        same = stated.get(name, [] if name == "pre_registered" else None) == told.get(name)
        other = f"The {what} on the card are not those that the ledger held before its first step."
        yield _Found(("empirical", name), None if same else other)
    fresh, claim = _as_json(claim_facts(judged)), card["claim"]
    if fresh["guarantee"] != claim["guarantee"]:  # everything else follows from it
        yield _Found(("claim",), _differs("claim.guarantee", claim["guarantee"], fresh["guarantee"]))
        return
    yield from _compared(fresh, claim, ("claim",))
    tuning = card["tuning"]
    if derived and tuning.get("epsilon") is None:
        return  # either the choice was made on public data, or its gaps are stated
    earlier = (recorded_start(judged.records) or {}).get("tuning")
    if not _possible(card, judged) or (earlier is not None and hides_earlier_tuning(tuning, earlier, composed=True)):
        text = "What the card says about the choice of hyper-parameters (tuning) does not follow from the ledger."
        yield _Found(("tuning",), text)


def _possible(card: Mapping[str, Any], judged: Judged) -> list[dict[str, Any]]:
    """Return the possible tuning blocks for this ledger that agree with the card's facts and epsilon."""
    stated = card["tuning"]

    def fits(block: Mapping[str, Any]) -> bool:
        price, other = stated.get("epsilon"), block.get("epsilon")
        if price is None or other is None:
            return price is other and same_facts(stated, block)
        return math.isclose(price, other, rel_tol=TOLERANCE) and same_facts(stated, block)

    return [block for block in possible_tuning(stated, judged) if fits(block)]


def _of_the_rest(card: Mapping[str, Any], judged: Judged) -> Iterator[_Found]:
    """Compare every other entry of a card that has its own ledger."""
    model = card["pretraining"].get("model")
    fresh = decided_blocks(judged, model, card["accounting"] or {})
    yield from _compared(_as_json(fresh), card, ())
    yield from _assumed(card, judged.records, judged.plan)
    tuning = card["tuning"]
    follows = tuning["text"] in [block["text"] for block in _possible(card, judged)]
    problem = None if follows else "tuning.text does not follow from the facts of tuning and the ledger."
    yield _Found(("tuning", "text"), problem, words=True)
    yield from (_Found(("tuning", name)) for name in tuning if name not in _DECLARED["tuning"])


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _assumed(
    card: Mapping[str, Any], records: Sequence[Mapping[str, Any]], plan: PrivacyPlan | None
) -> Iterator[_Found]:
    known = [] if plan is None else derived_assumptions(records, plan)
    known += [*start_assumptions(records, card["pretraining"].get("model")), *leaks(records)]
    if card["claim"]["guarantee"] == "dp":
        for text in set(gaps_of_start(records, card["not_covered"])) - {*card["not_covered"]}:
            yield _Found(("not_covered",), f"not_covered leaves out, by the ledger: {text}", words=True)
    stated = card["assumptions"]
    for one in known:
        places = [("assumptions", str(index)) for index, other in enumerate(stated) if other["text"] == one.text]
        if not places:
            yield _Found(("assumptions",), f"assumptions leave out, by the ledger: {one.text}", words=True)
        elif any(stated[int(index)] != one.to_dict() for _, index in places):
            yield _Found(places[0], f"assumptions say otherwise than the ledger whether this holds: {one.text}")
        yield from map(_Found, places)


def _compared(fresh: Any, stated: Any, place: Place) -> Iterator[_Found]:
    where, words = ".".join(place), any(name in _SENTENCES for name in place)
    if fresh is None and place[0] == "mechanism":
        return  # the card's mechanism also holds facts that the ledger does not know
    if isinstance(fresh, Mapping) and isinstance(stated, Mapping) and (fresh or stated):
        for name in fresh:
            if name in _DECLARED.get(where, ()):
                continue
            if name in stated:
                yield from _compared(fresh[name], stated[name], (*place, name))
            elif fresh[name] is not None:
                yield _Found(place, f"{where} has no {name} on the card, but one by the ledger.", words=words)
    elif isinstance(fresh, list) and isinstance(stated, list) and len(fresh) == len(stated) and fresh:
        for index, (new, old) in enumerate(zip(fresh, stated, strict=True)):
            yield from _compared(new, old, (*place, str(index)))
    elif isinstance(fresh, list) and isinstance(stated, list) and len(fresh) != len(stated):
        problem = f"{where} has {len(stated)} entries on the card, but {len(fresh)} by the ledger."
        yield _Found(place, problem, words=words)
    elif is_number(fresh) and is_number(stated):
        same = math.isclose(stated, fresh, rel_tol=TOLERANCE, abs_tol=1e-15)
        yield _Found(place, None if same else _differs(where, stated, fresh), number=True)
    else:
        same = stated == fresh and type(stated) is type(fresh)
        yield _Found(place, None if same else _differs(where, stated, fresh), words=words)


def _differs(where: str, stated: Any, fresh: Any) -> str:
    shown = [f"{value:.6g}" if is_number(value) else reprlib.repr(value) for value in (stated, fresh)]
    return f"{where} is {shown[0]} on the card, but {shown[1]} by the ledger."
