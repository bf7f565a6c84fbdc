"""The claim of a card: the number, unit and neighbours, its gaps, and the guarantee for several units.

The unit and the neighbouring relation decide what is protected and what is not. Both lists are derived from those two
words, so that no card can promise more than its accountant computed.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lit_dpret.errors import UnsupportedAccountingError
from lit_dpret.privacy.accounting.accountant import cap_for_copies
from lit_dpret.privacy.accounting.composition import delta_at, epsilon_curve
from lit_dpret.privacy.accounting.groups import epsilon_of_several, group_epsilon
from lit_dpret.privacy.accounting.releases import GaussianRelease, Release, TruncatedPoisson
from lit_dpret.privacy.budget import AccountantName, Duplicates, Neighbours, Unit, show_epsilon
from lit_dpret.privacy.ledger.assumptions import derived_assumptions, more_before, units_before
from lit_dpret.privacy.ledger.judgement import Judged, every_unit_in_every_step, judge, plan_of, promised_releases
from lit_dpret.privacy.ledger.run_ledger import recorded_start
from lit_dpret.privacy.plan import PrivacyPlan

GROUPS = (2, 5, 10)
"""The group sizes for which every card states a joint epsilon."""

_NO_GUARANTEE = "not computed: no guarantee"
_OF_A_CLAIM = (
    "flavour", "guarantee", "epsilon", "delta", "delta_rule", "curve", "unit", "unit_text", "unit_plural", "neighbours",
    "neighbours_text", "max_units_per_user", "user_level_epsilon", "duplicates", "duplicates_policy", "protected",
    "unprotected_quantities", "output_released",
)  # fmt: skip


def claim_facts(judged: Judged, output_released: Sequence[str] = ()) -> dict[str, Any]:
    """Return the claim with unit and neighbours; never a number unless it is proved."""
    plan, verdict = judged.plan, judged.verdict
    if plan is None:
        return {
            **dict.fromkeys(_OF_A_CLAIM),
            "guarantee": "none",
            **{name: [] for name in ("curve", "protected", "unprotected_quantities")},
            "output_released": list(output_released),
        }
    budget, n = plan.budget, plan.n_public
    rule, start = "a declared constant", recorded_start(judged.records)
    if n is not None and math.isclose(budget.delta, 1 / (2 * n), rel_tol=1e-9):
        rule = "1 / (2 n)"
    elif start is not None and start.get("delta") == budget.delta:
        rule = "that of the run before it, because the claim also covers the people in its data"
    curve: list[list[float]] = []
    if verdict.basis == "as_charged":
        pairs = epsilon_curve(judged.releases, neighbours=budget.neighbours, accountant=plan.accountant)
        curve = [[epsilon, delta] for epsilon, delta in pairs if math.isfinite(epsilon)]
    proved = verdict.guarantee == "dp"
    name = plan_of(judged.records)[1].get("unit_name")
    is_user = name == "user" and plan.max_units_per_user is None  # a unit is a whole user; no other bound is declared
    claim = {
        "flavour": "(epsilon, delta)-differential privacy",
        "guarantee": verdict.guarantee,
        "epsilon": verdict.epsilon,
        "delta": budget.delta,
        "delta_rule": rule,
        "curve": curve,
        "unit": budget.unit,
        "unit_text": _UNITS[budget.unit],
        "unit_plural": _PLURAL[budget.unit],
        "neighbours": budget.neighbours,
        "neighbours_text": describe_neighbours(budget.unit, budget.neighbours),
        "max_units_per_user": plan.max_units_per_user,
        **({"max_units_before": [most for _, most in before]} if (before := units_before(start)) else {}),
        "user_level_epsilon": verdict.epsilon if is_user else user_level_epsilon(judged, plan),
        "duplicates": budget.duplicates,
        "duplicates_policy": describe_duplicates(budget.unit, budget.duplicates),
        "protected": protected(budget.unit, budget.neighbours) if proved else [],
        "unprotected_quantities": unprotected_quantities(budget.unit, budget.neighbours, n),
        "output_released": list(output_released),
    }
    if name is None:
        return claim
    named = {key: _named(claim[key], name) for key in _NAMING_THE_UNIT}
    return claim | {"unit_name": name} | named


_NAMING_THE_UNIT = ("unit_text", "unit_plural", "neighbours_text", "protected", "unprotected_quantities")


def _named(text: Any, name: str) -> Any:
    """Replace "record" by the data owner's name for the unit."""
    if isinstance(text, list):
        return [_named(each, name) for each in text]
    article = "an" if re.match("(?!us|uni|eu|one)[aeiou]", name) else "a"
    return re.sub(r"\brecord(s?)\b", rf"{name}\1", re.sub(r"\b([Aa])n? record\b", rf"\1{article[1:]} record", text))


def user_level_epsilon(judged: Judged, plan: PrivacyPlan) -> float | None:
    """Return the epsilon of everything that one user contributed; None if it is not declared or not proved.

    With ``unit=user`` it is the claim's own epsilon, otherwise that of ``max_units_per_user`` units together. The
    releases of each earlier run are judged by that run's bound, and the result is None if any run declared no bound:
    one person's units in different runs all belong to that person.
    """
    if plan.budget.unit == "user":
        return judged.verdict.epsilon
    if plan.max_units_per_user is None:
        return None
    runs = [(judged.own, plan.max_units_per_user), *units_before(recorded_start(judged.records))]
    bounds = [(releases, most) for releases, most in runs if most is not None]
    if judged.claimed_plan is None or len(bounds) < len(runs):
        return None
    if all(most == 1 for _, most in bounds):
        return judged.verdict.epsilon
    if judged.verdict.basis != "as_charged":
        bounds = [(every_unit_in_every_step(releases), most) for releases, most in bounds]
    try:
        value = epsilon_of_several(bounds, delta=plan.budget.delta, neighbours=plan.budget.neighbours)
    except UnsupportedAccountingError:
        return None
    return value if math.isfinite(value) else None


def group_facts(judged: Judged, plan: PrivacyPlan) -> list[dict[str, Any]]:
    """Return, for each size in `GROUPS`, the number of units and their joint epsilon, or the reason for None."""
    return [_of_units(units, judged, plan) for units in GROUPS]


def _of_units(units: int, judged: Judged, plan: PrivacyPlan) -> dict[str, Any]:
    fact: dict[str, Any] = {"units": units, "epsilon": None, "why": _NO_GUARANTEE}
    if judged.claimed_plan is None:
        return fact
    if units == 1:
        return {**fact, "epsilon": judged.verdict.epsilon, "why": None}
    try:
        value = group_epsilon(judged.charged, delta=plan.budget.delta, units=units, neighbours=plan.budget.neighbours)
    except UnsupportedAccountingError as error:
        return {**fact, "why": f"not proved: {error.sentence}"}
    if math.isfinite(value):
        return {**fact, "epsilon": value, "why": None}
    return {**fact, "why": "infinite", "wider": _wider(units, judged.charged, plan)}


def _wider(units: int, charged: Sequence[Release], plan: PrivacyPlan) -> dict[str, Any] | None:
    """Return the batch cap at which ``units`` units get a finite epsilon, and that epsilon; None if no cap helps."""
    law = plan.law
    own = [r for r in charged if isinstance(r, GaussianRelease) and r.law == law]
    if not isinstance(law, TruncatedPoisson) or not own:
        return None
    steps, delta = sum(release.count for release in own), plan.budget.delta
    cap = cap_for_copies(law, steps=steps, delta=delta, copies=units)
    rest = [replace(r, law=replace(law, cap=cap)) if r in own else r for r in charged]
    value = group_epsilon(rest, delta=delta, units=units, neighbours=plan.budget.neighbours)
    return {"cap": cap, "epsilon": value} if math.isfinite(value) else None


def without_numbers(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a parent's accounting without epsilons, for a child whose own guarantee is not proved."""
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


_UNITS: dict[str, str] = {
    "query": "one query with every (query, passage) row that contains it",
    "pair": "one (query, passage) pair",
    "user": "everything that one user contributed",
    "image": "one image with every view made of it",
    "passage": "one passage of a collection with every sentence of it",
    "record": "one record: all rows of the data set with its name",
}
_PLURAL: dict[str, str] = {
    "query": "queries", "pair": "pairs", "user": "users", "image": "images", "passage": "passages",
    "record": "records",
}  # fmt: skip
#: Units that come without a public list of passages.
_WITHOUT_PASSAGES = ("image", "record")


def describe_duplicates(unit: Unit, duplicates: Duplicates) -> str:
    """Describe what the policy on equal texts under different ids means for the claim, without counts."""
    if unit == "user":
        return (
            "Equal texts of one user are in one unit. Equal texts of k users are in k units, and are protected as "
            "parts of a group of k units."
        )
    what = {"image": "image", "passage": "passage text", "record": "record"}.get(unit, "query text")
    if duplicates == "keep":
        return (
            f"Equal {what}s under different ids are separate units: one that occurs k times is protected as a group of "
            "k units."
        )
    beside, copies = (" and passage", "pair") if unit == "pair" else ("", "text")
    return (
        f"All rows with the same {what} (casefolded, whitespace collapsed){beside} are one unit: the claim is about "
        f"erasing every copy of a {copies} at once, and the number of units is the number of distinct {copies}s."
    )


def describe_neighbours(unit: Unit, neighbours: Neighbours) -> str:
    """Describe how the two data sets of the guarantee differ, as an act."""
    if neighbours == "zero_out":
        return f"blanking {_UNITS[unit]}, while its position in the data set stays (zero-out)"
    if neighbours == "add_or_remove":
        return f"adding or removing {_UNITS[unit]}"
    return f"replacing {_UNITS[unit]} with any other"


def protected(unit: Unit, neighbours: Neighbours) -> list[str]:
    """List what the guarantee protects, up to epsilon and delta."""
    if unit == "image":
        hidden = ["the pixels of each image, and of every view made of it"]
    elif unit == "record":
        hidden = ["the content of each record: every value of its rows, labels included"]
    elif unit == "passage":
        hidden = ["the text of each passage of the collection"]
    else:
        whose = {"query": "of each query", "pair": "of the query in each pair", "user": "of all queries of each user"}
        hidden = [
            f"the text {whose[unit]}",
            "which passages were relevant to it, beyond what a public list of passages says",
        ]
    if neighbours == "replace_one":
        return hidden
    hidden.append(f"whether {'an' if unit == 'image' else 'a'} {unit} was really in the data")
    if neighbours == "add_or_remove":
        hidden.append(f"the number of {_PLURAL[unit]}")
    return hidden


def unprotected_quantities(unit: Unit, neighbours: Neighbours, n: int | None) -> list[str]:
    """List what the guarantee assumes to be public."""
    public = [] if unit in (*_WITHOUT_PASSAGES, "passage") else ["the text of every passage in the corpus"]
    if neighbours == "add_or_remove":
        return [*public, "the declared constants: delta, sampling rate, batch cap, denominator"]
    if neighbours == "zero_out" and unit not in (*_WITHOUT_PASSAGES, "passage"):
        public.append("the list of passages that occur in the training data")
    size = "" if n is None else f" (n = {n})"
    return [*public, f"the number of {_PLURAL[unit]}{size}, and what follows from it, such as the sampling rate"]


def tuning_gaps(tuning: Mapping[str, Any]) -> list[str]:
    """List the gaps left by the choice of hyper-parameters and by the choice among several runs."""
    return [*_settings_gaps(tuning), *_siblings_gaps(tuning.get("siblings"))]


def _siblings_gaps(siblings: Mapping[str, Any] | None) -> list[str]:
    if siblings is None:
        return []
    planned, number = siblings.get("planned"), siblings["runs"] or "several"
    if planned is not None:
        known = f"is {show_epsilon(planned['epsilon'])}, as planned, if none of the others spent more than that"
    elif siblings.get("beyond_plan") is not None:
        known = "is more than was planned, and is not computed"
    else:
        known = "is not computed"
    return [f"A choice among the {number} runs that one command started, by any score: including it, epsilon {known}."]


_UNACCOUNTED = {
    "private": "The choice of hyper-parameters, which was made on private data and is not accounted.",
    "synthetic": "The epsilon of the synthetic data that hyper-parameters were chosen on.",
    "unknown": "The choice of hyper-parameters: the data that it was made on were not stated.",
}


def _settings_gaps(tuning: Mapping[str, Any]) -> list[str]:
    if tuning["data"] == "private" and tuning["accounted"]:
        public = (tuning.get("sweep") or {}).get("metric_data") in ("public", "none")
        scored = "" if public else ", and the records on which the runs were scored are not covered at all"
        return [
            "The choice of hyper-parameters, which the epsilon of the claim leaves out: including it, epsilon is "
            f"{show_epsilon(tuning['epsilon'])}{scored}."
        ]
    return [_UNACCOUNTED[tuning["data"]]] if tuning["data"] in _UNACCOUNTED else []


NOTHING_CLAIMED = "Everything: no guarantee is claimed."


def uncovered(
    claim: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    tuning: Mapping[str, Any],
    randomness: Mapping[str, Any],
) -> list[str]:
    """List what a reader might assume to be covered but is not, by the card's claim, groups, tuning and randomness."""
    if claim["guarantee"] != "dp":
        return [NOTHING_CLAIMED]
    unit, neighbours, most = claim["unit"], claim["neighbours"], claim["max_units_per_user"]
    before = claim.get("max_units_before", [])
    gaps = []
    if unit == "pair":
        gaps.append("A query that occurs in several pairs: each pair is protected by itself, the whole query less.")
    if unit != "user" and (claim.get("unit_name") != "user" or most is not None):
        if claim["user_level_epsilon"] is not None:
            gaps.append(
                f"People who contributed more than {most} {_PLURAL[unit]}{more_before(before)}: the user-level epsilon "
                "on this card is for at most that many, which was declared, not counted."
            )
        else:
            known = "was computed" if most is None else f"is proved for {most} of them together"
            if most is not None and None in before:
                known = "is stated, because a run before it declared no bound on their number"
            gaps.append(
                f"People who contributed several {_PLURAL[unit]}: the guarantee is for one {unit}, and no "
                f"user-level epsilon {known}."
            )
    what = {"image": "image", "record": "row"}.get(unit, "text")
    if claim["duplicates"] == "merge":
        gaps.append(
            f"The same content in other words: {_PLURAL[unit]} are one unit if they are equal (casefolded, "
            f"whitespace collapsed), but several that differ are protected less{_copies(groups, 'of them')}."
        )
    else:
        gaps.append(
            f"The same {what} recorded as several {_PLURAL[unit]}: each copy is a separate unit, and frequent "
            f"{what}s are protected less{_copies(groups, 'copies')}."
        )
    if unit in _WITHOUT_PASSAGES:
        gaps += [] if neighbours == "add_or_remove" else [f"The number of {_PLURAL[unit]}, which is public."]
    elif neighbours == "add_or_remove":
        gaps.append("Passages: their texts are public.")
    elif neighbours == "zero_out":
        gaps.append("Passages: their texts, and the fact that a passage occurs in the training data, are public.")
    else:
        gaps.append("Passages and the number of units, which are public.")
    gaps += tuning_gaps(tuning)
    gaps += [
        "What the pre-trained model had learned before this training.",
        "Facts that hold for many people at once: learning those is what training is for.",
        "Images that are shown to the model when it is used."
        if unit == "image"
        else "What is shown to the model when it is used."
        if unit == "record"
        else "Queries that are typed when the system is used.",
        "Losses, metrics and samples computed on private data and shown to anyone, but not recorded in the ledger.",
        "A noise secret that leaks.",
        "Side channels: anyone who watches the machine, its disk or its traffic during the run sees how long steps "
        "take and what they use, which depends on the private data in them. Files that are handed on contain days, "
        "but no times.",
    ]
    attacked = ["the floating-point form of the noise"] if randomness.get("floating_point", True) else []
    if not randomness.get("secure"):
        attacked.append("its generator, which is not cryptographic")
    gaps += [f"Attacks on {', or on '.join(attacked)}."] if attacked else []
    return gaps if (name := claim.get("unit_name")) is None else _named(gaps, name)


def _copies(groups: Sequence[Mapping[str, Any]], what: str) -> str:
    if not groups:
        return ""
    if all(group["epsilon"] is None and group["why"] != "infinite" for group in groups):
        return ", by how much is not proved for this sampling and these neighbours"
    return f": epsilon is {', '.join(map(_worth, groups))} {what}"


def _worth(group: Mapping[str, Any]) -> str:
    """Describe the epsilon of one group and, if it is infinite, what would make it finite."""
    text = f"{show_epsilon(group['epsilon'])} for {group['units']}"
    if group["why"] != "infinite":
        return text
    if wider := group.get("wider"):
        return f"{text} (datamodule.cap={wider['cap']} would make it {show_epsilon(wider['epsilon'])})"
    return f"{text} (no cap alone would make it finite; more noise, from a lower privacy.eps, may)"


# Below this, rounding in the convolution of privacy losses is no longer small compared with delta.
_LEAST_DELTA = 1e-12
_PAIRS = 60


@dataclass(frozen=True, kw_only=True)
class ClaimedCurve:
    """A run's claim about one unit: ``eps`` at ``delta``, and ``pairs`` (epsilon, delta) that all hold at once."""

    eps: float
    delta: float
    neighbours: str
    pairs: tuple[tuple[float, float], ...]


def claimed_curve(records: Sequence[Mapping[str, Any]]) -> ClaimedCurve | None:
    """Return the privacy curve of a ledger's own releases, which an audit of that run can contradict.

    A canary planted in this run took part in no release of the model that the run started from, so those releases are
    left out: the curve is never above the claim on the card. The result is None if the releases prove nothing.
    """
    plan, _ = plan_of(records)
    if plan is None:
        return None
    own = promised_releases(records)
    judged = Judged(records, plan, own, own, *judge(own, plan, derived_assumptions(records, plan)))
    verdict = judged.verdict
    if judged.claimed_plan is None or verdict.epsilon is None:
        return None
    accountant: AccountantName = plan.accountant if verdict.basis == "as_charged" else "pld"
    return _curve(verdict.epsilon, judged.charged, plan, accountant)


def planned_curve(plan: PrivacyPlan) -> ClaimedCurve | None:
    """Return the privacy curve of the planned steps, before the first step; None without a claim."""
    if not plan.proved:
        return None
    steps = GaussianRelease(noise_multiplier=plan.noise_multiplier, law=plan.law, count=plan.steps)
    return _curve(plan.epsilon(), [steps], plan, plan.accountant)


def _curve(epsilon: float, charged: Sequence[Release], plan: PrivacyPlan, accountant: AccountantName) -> ClaimedCurve:
    delta, neighbours = plan.budget.delta, plan.budget.neighbours
    grid = [float(eps) for eps in np.linspace(0.0, 2.0 * epsilon + 4.0, _PAIRS)]
    try:
        deltas = delta_at(grid, charged, neighbours=neighbours, accountant=accountant)
    except UnsupportedAccountingError:  # this accountant only bounds epsilon
        deltas = []
    pairs = [(eps, found) for eps, found in zip(grid, deltas, strict=False) if _LEAST_DELTA <= found < 1]
    return ClaimedCurve(eps=epsilon, delta=delta, neighbours=neighbours, pairs=((epsilon, delta), *pairs))
