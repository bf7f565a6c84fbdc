"""What a unit and a neighbouring relation protect, in words a reader can hold against the facts.

An epsilon is a statement about two data sets that differ in one unit. Which unit, and how they
differ, decides what is protected and what is not; both lists are derived from the two words here,
so that no card can promise more than its accountant computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_dpret.cards.text import show_epsilon
from lit_dpret.privacy.budget import Neighbours, Unit

_UNITS: dict[str, str] = {
    "query": "one query with every (query, passage) row that carries it",
    "pair": "one (query, passage) pair",
    "user": "everything that one user contributed",
    "image": "one image with every view made of it",
    "passage": "one passage of a collection with every sentence of it",
}
_SHORT: dict[str, str] = {"query": "query", "pair": "pair", "user": "user", "image": "image", "passage": "passage"}
_PLURAL: dict[str, str] = {
    "query": "queries", "pair": "pairs", "user": "users", "image": "images", "passage": "passages",
}  # fmt: skip


def describe_unit(unit: Unit) -> str:
    """The unit of privacy in a phrase."""
    return _UNITS[unit]


def plural(unit: Unit) -> str:
    """``queries`` and so on."""
    return _PLURAL[unit]


def describe_neighbours(unit: Unit, neighbours: Neighbours) -> str:
    """How the two data sets of the guarantee differ, as an act."""
    if neighbours == "zero_out":
        return f"blanking {_UNITS[unit]}, while its place in the data set stays (zero-out)"
    if neighbours == "add_or_remove":
        return f"adding or removing {_UNITS[unit]}"
    return f"replacing {_UNITS[unit]} by any other"


def protected(unit: Unit, neighbours: Neighbours) -> list[str]:
    """What the guarantee hides, up to epsilon and delta."""
    if unit == "image":
        hidden = ["the pixels of each image, and of every view made of it"]
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
    hidden.append(f"whether a {_SHORT[unit]} was really there")
    if neighbours == "add_or_remove":
        hidden.append(f"the number of {_PLURAL[unit]}")
    return hidden


def unprotected_quantities(unit: Unit, neighbours: Neighbours, n: int | None) -> list[str]:
    """What the guarantee takes as known to everybody."""
    public = [] if unit in ("image", "passage") else ["the text of every passage in the corpus"]
    if neighbours == "add_or_remove":
        return [*public, "the declared constants: delta, sampling rate, batch cap, denominator"]
    if neighbours == "zero_out" and unit not in ("image", "passage"):
        public.append("the list of passages that stand in the training data")
    size = "" if n is None else f" (n = {n})"
    return [*public, f"the number of {_PLURAL[unit]}{size}, and what follows from it, such as the sampling rate"]


def tuning_gaps(tuning: Mapping[str, Any]) -> list[str]:
    """What the choice of hyper-parameters leaves open."""
    if tuning["data"] == "private" and tuning["accounted"]:
        return [
            "The choice of hyper-parameters, in the epsilon of the claim: with it, epsilon is "
            f"{show_epsilon(tuning['epsilon'])}, and the records on which the runs were scored are not covered at all."
        ]
    if tuning["data"] == "private":
        return ["The choice of hyper-parameters, which was made on private data and is not accounted."]
    if tuning["data"] == "unknown":
        return ["The choice of hyper-parameters: on which data it was made was not stated."]
    return []


def not_covered(
    claim: Mapping[str, Any],
    *,
    groups: Sequence[Mapping[str, Any]],
    tuning: Mapping[str, Any],
    randomness: Mapping[str, Any],
) -> list[str]:
    """What a reader might take for covered and is not.

    Args:
        claim: The card's.
        groups: What several units are worth together: ``units``, ``epsilon``, ``why``.
        tuning: The card's.
        randomness: The card's.
    """
    unit, neighbours, most = claim["unit"], claim["neighbours"], claim["max_units_per_user"]
    gaps = []
    if unit == "pair":
        gaps.append("A query that stands in several pairs: each pair is protected alone, the query as a whole less.")
    if unit != "user":
        if claim["user_level_epsilon"] is not None:
            gaps.append(
                f"People who contributed more than {most} {_PLURAL[unit]}: the user-level epsilon on this card is for "
                "at most that many, which was declared, not counted."
            )
        else:
            known = "was computed" if most is None else f"is proved for {most} of them together"
            gaps.append(
                f"People who contributed several {_PLURAL[unit]}: the guarantee is for one {_SHORT[unit]}, and no "
                f"user-level epsilon {known}."
            )
    what = "image" if unit == "image" else "text"
    gaps.append(
        f"The same {what} recorded as several {_PLURAL[unit]}: each copy is a unit of its own, and frequent {what}s "
        f"are protected less{_copies(groups)}."
    )
    if unit == "image":
        gaps += [] if neighbours == "add_or_remove" else ["The number of images, which is public."]
    elif neighbours == "add_or_remove":
        gaps.append("Passages: their texts are public.")
    elif neighbours == "zero_out":
        gaps.append("Passages: their texts, and the fact that a passage stands in the training data, are public.")
    else:
        gaps.append("Passages and the number of records, which are public.")
    gaps += tuning_gaps(tuning)
    gaps += [
        "What the pre-trained model had learned before this training.",
        "Facts that hold for many people at once: learning those is what training is for.",
        "Images that are shown to the model when it is used."
        if unit == "image"
        else "Queries that are typed when the system is used.",
        "Losses, metrics and samples computed on private data and shown to anybody outside the ledger.",
        "A noise secret that leaks.",
        "Side channels: who watches the machine, its disk or its traffic during the run sees how long steps take and "
        "what they use, which depends on the private data in them. Files that are handed on carry days, no times.",
    ]
    attacked = ["the floating-point form of the noise"] if randomness.get("floating_point", True) else []
    if not randomness.get("secure"):
        attacked.append("its generator, which is not a cryptographic one")
    return [*gaps, f"Attacks on {', or on '.join(attacked)}."] if attacked else gaps


def _copies(groups: Sequence[Mapping[str, Any]]) -> str:
    """How much less, as the end of a sentence."""
    if not groups:
        return ""
    if all(group["epsilon"] is None and group["why"] != "infinite" for group in groups):
        return ", by how much is not proved for this sampling and these neighbours"
    return f": epsilon is {', '.join(map(_worth, groups))} copies"


def _worth(group: Mapping[str, Any]) -> str:
    """The epsilon of so many copies, and where it is infinite what would make it a number."""
    text = f"{show_epsilon(group['epsilon'])} for {group['units']}"
    if group["why"] != "infinite":
        return text
    if wider := group.get("wider"):
        return f"{text} (datamodule.cap={wider['cap']} would make it {show_epsilon(wider['epsilon'])})"
    return f"{text} (no cap alone would make it a number; more noise, from a lower privacy.eps, may)"
