"""Every number of a card that follows from its ledger, computed anew: not the epsilon of the claim alone.

``verify_card`` checks the claim. A reader also looks at the ceilings of attacks, at what several units are
worth together and at the noise that was added; a card on which one of those was made more pleasant says
something false as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_dpret.privacy.card_check import TOLERANCE, verdict_of
from lit_dpret.privacy.card_claim import claim_facts, group_facts
from lit_dpret.privacy.card_facts import accounting_facts, ceilings_of, mechanism_facts, plan_of
from lit_dpret.privacy.charges import charged_releases, claimed_releases
from lit_dpret.privacy.start import start_accounting

_CLAIM = ("epsilon", "delta", "curve", "max_units_per_user", "user_level_epsilon")


def recheck_numbers(card: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """How many numbers of a card were computed anew, and what is wrong with those that differ.

    Guarantees:
        - A number of ``claim``, ``mechanism``, ``accounting`` or ``empirical.ceilings`` that the ledger decides and
          that differs from it is reported by its place. One that the card does not state is not: a card may be silent.

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
        "claim": {name: claim[name] for name in _CLAIM},
        "mechanism": mechanism_facts(records, plan, own),
        "accounting": None,
        "empirical": {"ceilings": ceilings_of(releases, plan, verdict)},
    }
    if plan is not None:
        fresh["accounting"] = {
            **accounting_facts(records, releases, plan, verdict),
            "groups": group_facts(releases, plan, verdict),
            **start_accounting(records, own, plan, verdict),
        }
    found = list(_compared(fresh, card, ()))
    return len(found), [problem for problem in found if problem is not None]


def _compared(fresh: Any, stated: Any, place: tuple[str, ...]) -> Iterator[str | None]:
    """For each number of the card that the ledger decides: what is wrong with it, or None."""
    where = ".".join(place)
    if isinstance(fresh, Mapping):
        if isinstance(stated, Mapping):
            for name in fresh.keys() & stated.keys():
                yield from _compared(fresh[name], stated[name], (*place, name))
    elif isinstance(fresh, list):
        if isinstance(stated, list) and stated and len(stated) != len(fresh):
            yield f"{where} has {len(stated)} entries on the card, and {len(fresh)} by the ledger."
        elif isinstance(stated, list) and stated:
            for index, (new, old) in enumerate(zip(fresh, stated, strict=True)):
                yield from _compared(new, old, (*place, str(index)))
    elif isinstance(stated, (int, float)) and not isinstance(stated, bool):
        if fresh is None and place[0] != "mechanism":  # which also holds what the ledger does not know
            yield f"{where} is {stated:.6g} on the card, and no number by the ledger."
        elif isinstance(fresh, (int, float)):
            same = math.isclose(stated, fresh, rel_tol=TOLERANCE, abs_tol=1e-15)
            yield None if same else f"{where} is {stated:.6g} on the card, and {fresh:.6g} by the ledger."
