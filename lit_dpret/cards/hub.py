"""The header of a ``README.md`` for a model hub: known facts of a folder, including its claim.

A hub filters and compares by this header, and readers trust it. It therefore names a base model only if the hub has one
of that name, and gives the claim exactly as on the privacy card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lit_dpret.cards.file import CARD_NAME, text_sha256
from lit_dpret.cards.text import printed_epsilon
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.budget import show_delta

_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
#: The hub's names of weights that are installed as packages.
_PACKAGED = {"minilm": "sentence-transformers/all-MiniLM-L6-v2"}


def front_matter(facts: Mapping[str, Any]) -> str:
    """Return the header of a README with the known facts, leaving out None and empty values."""
    known = {name: value for name, value in facts.items() if value not in (None, [], {})}
    return f"---\n{yaml.safe_dump(known, sort_keys=False, allow_unicode=True, width=1000)}---\n"


def claim_metadata(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the claim of a card as data, with all its conditions; epsilon only if proved, rounded up."""
    claim = card["claim"]
    found = {"guarantee": claim["guarantee"]}
    if claim["guarantee"] == "dp":
        found |= {"epsilon": float(printed_epsilon(card)), "delta": float(show_delta(claim["delta"]))}
        found |= {name: claim[name] for name in ("unit", "neighbours")}
    return found | {"card": CARD_NAME, "card_sha256": text_sha256(card)}


def base_model_of(card: Mapping[str, Any]) -> str | None:
    """Return the hub name of the initial weights; None if they have none."""
    name = str(card["mechanism"].get("started_from", card["pretraining"].get("model")))
    return _PACKAGED.get(name, name if _REPOSITORY.fullmatch(name) else None)


def stated_languages(language: str | None) -> list[str]:
    """Return the language codes of a comma-separated setting; refuse anything that is not a code."""
    codes = [] if language is None else [code.strip() for code in language.split(",")]
    for code in codes:
        if not _LANGUAGE.fullmatch(code):
            raise ConfigurationError(f"language={language!r}: {code!r} is not an ISO code such as en or pt-BR.")
    return codes


def check_license(license: str | None) -> None:
    """Refuse a licence that is not written the way the hub writes it."""
    if license is not None and not _LICENSE.fullmatch(license):
        raise ConfigurationError(
            f"license={license!r} is not a licence as the Hugging Face hub writes it, such as cc-by-4.0 or other."
        )


def check_repositories(knob: str, names: Sequence[str]) -> None:
    """Refuse names that cannot be hub repositories, such as local paths."""
    for name in names:
        if not _REPOSITORY.fullmatch(str(name)):
            raise ConfigurationError(f"{knob}={name} is not a name of the Hugging Face hub: those are owner/name.")
