"""The joint spending of all trainings that contribute to a page, which is more than any single row states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.cards.file import CARD_NAME, read_card
from lit_dpret.errors import LedgerError
from lit_dpret.privacy.budget import show_delta, show_epsilon
from lit_dpret.privacy.ledger.dataset_file import compose_across_runs
from lit_dpret.privacy.ledger.judgement import owed_releases
from lit_dpret.privacy.ledger.run_ledger import LEDGER_NAME, PrivacyLedger, plans_of

_Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Spent:
    """The trainings under a run folder."""

    private: int  # how many spent part of a budget
    bare: int  # how many read the private queries without a budget
    text: str  # their total, in words


def spent_under(
    run_dir: Path, *, near: Sequence[Path] = (), taken: Path | None = None, taken_private: int = 0
) -> Spent:
    """Compose everything that the ledgers under ``run_dir`` are charged with.

    Guarantees:
        - A ledger counts once, wherever copies of it are stored; links to folders are followed.
        - A training whose own ledger refutes its claim counts as one without privacy.
        - If a card under ``run_dir`` rests on a private ledger that is not found, the text says so.
        - Trainings with different units or neighbours are composed separately, and the text says that nothing is proved
          about them together.

    Args:
        run_dir: The folder of the trainings, and of what was made with them.
        near: Their inputs from other folders, also searched for ledgers on which a card under ``run_dir`` rests.
        taken: A finished study whose results are also on the page; its ledgers count if they are found under it.
        taken_private: How many private trainings that study had; the text states how many of them the sum lacks.
    """
    heads = _private_heads(run_dir)
    given = [records for records in _around(near) if heads & _hashes([records])]
    here = _longest([*_ledgers(run_dir, *([] if taken is None else [taken])), *given])
    private: dict[tuple[str, str], list[_Records]] = {}  # by unit and neighbours
    bare = 0
    for records in here:
        if (budget := _budget_of(records)) is not None:
            private.setdefault((_unit_of(budget), str(budget["neighbours"])), []).append(records)
        else:
            bare += any(plan["mode"] == "none" for plan in plans_of(records))
    count, missing = sum(map(len, private.values())), ""
    elsewhere = [] if taken is None else _ledgers(taken)
    found = sum(_begins(one, other) for some in private.values() for one in some for other in elsewhere)
    if (lacking := taken_private - found) > 0:
        missing = (
            f" The study in {taken} was used as it is: the ledgers of {lacking} of its {taken_private} private "
            "trainings are missing, and what those spent on the same queries is not in this sum."
        )
    if lost := len(heads - _hashes(here)):
        missing += (
            f" The ledgers of up to {_trainings(lost)} with a card here were not found: what they spent on the same "
            "queries is not in this sum."
        )
    more = missing
    if bare:
        trainings = f"{bare}{' more' if count else ''} training{'s' if bare > 1 else ''}"
        more = (
            f" {trainings} had no privacy at all (ε = ∞, or public texts only): what read the original queries "
            f"without privacy has no guarantee, whatever else is claimed.{missing}"
        )
    if not count:
        nothing = "What was spent cannot be added up." if missing else "No private training spent anything."
        return Spent(0, bare, f"{nothing}{more}")
    totals = [_total(some, kind) for kind, some in private.items()]
    text = (
        f"The {_trainings(count)} behind this page read the same queries. The epsilon of a row is that of its own "
        f"training; {'all of them' if len(totals) == 1 else 'several'} together have {'; '.join(totals)}."
    )
    if len(totals) > 1:
        text += (
            " For all of them together no epsilon is proved: guarantees of different units or neighbours do not add up."
        )
    return Spent(count, bare, text + more)


def _budget_of(records: _Records) -> dict[str, Any] | None:
    plans = [plan["plan"] for plan in plans_of(records) if plan["plan"] is not None]
    return dict(plans[-1]["budget"]) if plans else None


def _ledgers(*folders: Path) -> list[_Records]:
    places = dict.fromkeys(place for folder in folders for place in _places(folder, LEDGER_NAME))
    return _longest([PrivacyLedger.read(place / LEDGER_NAME).records for place in places])


def _longest(ledgers: Sequence[_Records]) -> list[_Records]:
    """Return the longest of each group of ledgers that begin alike."""
    found: list[_Records] = []
    for records in ledgers:
        if not any(_begins(other, records) for other in found):
            found = [*(other for other in found if not _begins(records, other)), records]
    return found


def _unit_of(budget: dict[str, Any]) -> str:
    more = ["equal texts merged"] if budget.get("duplicates") == "merge" else []
    more += [budget["unit_by"]] if budget.get("unit_by") else []
    return f"{budget['unit']} ({', '.join(more)})" if more else str(budget["unit"])


def _trainings(count: int) -> str:
    return f"{count} private training{'s' if count > 1 else ''}"


def _private_heads(run_dir: Path) -> set[str]:
    """Return the last record's hash of every private ledger that a card under ``run_dir`` names."""
    cards = [read_card(place) for place in _places(run_dir, CARD_NAME)]
    return {
        str(card["ledger"]["head"])
        for card in cards
        if card["ledger"] and (card["mechanism"] or {}).get("mode") != "none"
    }


def _hashes(ledgers: Sequence[_Records]) -> set[str]:
    return {str(record["hash"]) for records in ledgers for record in records}


def _around(near: Sequence[Path]) -> list[_Records]:
    """Read ledgers in and next to the given folders, and one level above; ignore those that cannot be read."""
    found: list[_Records] = []
    for folder in near:
        inside = folder.resolve()
        for place in (inside, inside.parent, inside.parent.parent):
            for path in (place / LEDGER_NAME, *sorted(place.glob(f"*/{LEDGER_NAME}"))):
                with suppress(LedgerError, OSError):
                    found += [PrivacyLedger.read(path).records] if path.is_file() else []
    return found


def _begins(longer: _Records, records: _Records) -> bool:
    """Return whether ``records`` are the first ones of ``longer``: a hash covers all records before it."""
    count = len(records)
    return count == 0 or (count <= len(longer) and longer[count - 1]["hash"] == records[-1]["hash"])


def _places(folder: Path, name: str) -> list[Path]:
    """Return all folders under ``folder`` that hold a file of that name, resolved, including folders behind links."""
    seen: set[Path] = set()
    todo = [folder.resolve()]
    while todo:
        place = todo.pop()
        if place not in seen and place.is_dir():
            seen.add(place)
            todo += [inner.resolve() for inner in place.iterdir() if inner.is_dir()]
    return sorted(place for place in seen if (place / name).is_file())


def _total(ledgers: Sequence[_Records], kind: tuple[str, str]) -> str:
    (unit, neighbours), count = kind, len(ledgers)
    releases = [release for records in ledgers for release in owed_releases(records)]
    delta = min(float((_budget_of(records) or {})["delta"]) for records in ledgers)
    eps, how = compose_across_runs(releases, delta=delta, neighbours=neighbours)  # type: ignore[arg-type]
    if not math.isfinite(eps):
        return f"no proved epsilon, because a ledger among them refutes its own claim (unit {unit}, {count} trainings)"
    return (
        f"epsilon = {show_epsilon(eps)} at delta = {show_delta(delta)} (unit {unit}, neighbours {neighbours}, {count} "
        f"trainings, composed by {how})"
    )
