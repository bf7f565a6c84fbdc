"""What a derived card may say, given the card that it was derived from.

Post-processing passes a claim on as it is: same numbers, same accounting, never better. A run that started
from another run's model composes both, with the releases that the earlier ledger tells of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dpret.cards.check import TOLERANCE
from lit_dpret.cards.tuning import hides_earlier_tuning
from lit_dpret.errors import LitDpretError
from lit_dpret.privacy.accounting.accountant import epsilon
from lit_dpret.privacy.ledger.charges import claimed_releases
from lit_dpret.privacy.ledger.facts import every_unit_in_every_step
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger

_OWN_WORDS = ("output_released", "statement")
_PASSED_ON = ("accounting", "pretraining", "randomness", "ledger")
_TUNING = "It leaves out how the settings of its parent were chosen."


def link_problems(
    child: Mapping[str, Any], parent: Mapping[str, Any], ancestors: Sequence[Mapping[str, Any]], ledger: Path | None
) -> list[str]:
    """What is wrong with a card, given that of its nearest parent.

    Args:
        child: The derived card.
        parent: The card that it names first.
        ancestors: The further cards that it names.
        ledger: The parent's ledger, where it was found; without it the releases of a start are not compared.
    """
    problems = []
    if list(ancestors) != parent["parents"]:
        problems.append("The cards that it names after its parent are not those that its parent names.")
    if child["mechanism"].get("kind") == "post_processing":
        return problems + _better_than_parent(child, parent)
    if hides_earlier_tuning(child["tuning"], parent["tuning"], composed=True):
        problems.append(_TUNING)
    return problems + ([] if ledger is None else _other_start(child, parent, ledger))


def passed_on(child: Mapping[str, Any], parent: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """The entries of a derived card that `link_problems` holds against its parent's."""
    if child["claim"]["guarantee"] != "dp":
        return {("claim", "guarantee"), ("parents",)}
    lists = {
        (name, str(index))
        for name in ("assumptions", "not_covered")
        for index, entry in enumerate(child[name])
        if entry in parent[name]
    }
    empirical = {("empirical", name) for name in ("pre_registered", "ceilings", "planted")}
    return (
        {("claim", name) for name in child["claim"] if name not in _OWN_WORDS}
        | {(name,) for name in (*_PASSED_ON, "parents")}
        | lists
        | empirical
    )


def _better_than_parent(child: Mapping[str, Any], parent: Mapping[str, Any]) -> list[str]:
    """Where a derived card says anything else than its parent about what was proved."""
    ours, theirs = child["claim"], parent["claim"]
    if ours["guarantee"] != "dp":  # it claims nothing, which is never too much
        return [] if ours["guarantee"] == theirs["guarantee"] or theirs["guarantee"] == "dp" else [
            f"It says that the guarantee is {ours['guarantee']!r}, its parent {theirs['guarantee']!r}."
        ]  # fmt: skip
    names = [name for name in {**ours, **theirs} if name not in _OWN_WORDS and ours.get(name) != theirs.get(name)]
    problems = [f"It says {name} = {ours.get(name)!r}, its parent {theirs.get(name)!r}." for name in names]
    if any(one not in child["assumptions"] for one in parent["assumptions"]):
        problems.append("It leaves out assumptions of its parent.")
    if any(one["holds"] is False and one not in parent["assumptions"] for one in child["assumptions"]):
        problems.append("An assumption of its own does not hold, so it cannot claim what its parent claims.")
    if any(text not in child["not_covered"] for text in parent["not_covered"]):
        problems.append("It leaves out what its parent does not cover.")
    if hides_earlier_tuning(child["tuning"], parent["tuning"], composed=False):
        problems.append(_TUNING)
    for name in _PASSED_ON:
        if child[name] != parent[name]:
            problems.append(f"Its {name} block is not its parent's.")
    if child["empirical"].get("pre_registered", []) != parent["empirical"].get("pre_registered", []):
        problems.append("Its pre-registered protocols are not its parent's.")
    if child["empirical"].get("ceilings") != parent["empirical"].get("ceilings"):
        problems.append("Its ceilings of attacks are not its parent's.")
    if child["empirical"].get("planted") != parent["empirical"].get("planted"):
        problems.append("The canaries that it names are not its parent's.")
    return problems


def _other_start(child: Mapping[str, Any], parent: Mapping[str, Any], ledger: Path) -> list[str]:
    """Compare what a run says that its start had cost with the ledger of that start."""
    stated = ((child["accounting"] or {}).get("init_from") or {}).get("epsilon_of_start")
    if stated is None:
        return []
    claim, accounting = child["claim"], child["accounting"]
    try:
        releases = claimed_releases(PrivacyLedger.read(ledger).records)
        if (parent["accounting"] or {}).get("basis") == "no_amplification":
            releases = every_unit_in_every_step(releases)
        fresh = epsilon(
            releases, delta=claim["delta"], neighbours=claim["neighbours"], accountant=accounting["accountant"]
        )
    except LitDpretError as error:
        return [f"The ledger of the run that it started from cannot be read: {error}"]
    if abs(stated - fresh) <= TOLERANCE * max(1.0, fresh):
        return []
    return [f"It says that its start cost epsilon = {stated:.6g}, and the ledger of that run gives {fresh:.6g}."]
