"""Rulers: text lengths, in tokens of the model or in words, and the settings that fit them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lit_dpret.datamodules.survey import count_words, measure_lengths
from lit_dpret.errors import LitDpretError
from lit_dpret.tasks.parts import Parts

Side = Literal["query", "passage"]
SIDES: Mapping[Side, str] = {"query": "queries", "passage": "passages"}
MAX_TEXTS = 20_000  # for doctor and check_data alike, so that both suggest the same length


@dataclass(frozen=True, kw_only=True)
class Ruler:
    """Measure the texts of one side."""

    unit: Literal["tokens", "words"]  # ``tokens`` or ``words``
    # The length of each text, uncut, with prefix or prompt and special tokens.
    count: Callable[[Sequence[str]], Sequence[int]]
    limit: int | None = None  # where the model truncates; None if no limit applies


def make_rulers(parts: Parts, privacy: Any) -> tuple[dict[Side, Ruler], str]:
    """Return a ruler for each side, using the tokenizer of ``model=`` or else words; and a description of the unit."""
    words = Ruler(unit="words", count=count_words)
    try:
        module = parts.make_module(privacy=privacy)
        rulers = rulers_of(module)
    except (LitDpretError, AttributeError) as error:
        why = str(error) if isinstance(error, LitDpretError) else "the chosen model reads no texts"
        return {"query": words, "passage": words}, f"words between white space ({why})"
    return rulers, f"tokens of {type(module).__name__}, with its prefix and special tokens"


def rulers_of(module: Any) -> dict[Side, Ruler]:
    """Return a ruler for each side, using the tokenizer of a module; raise AttributeError if it reads no texts."""
    return {side: _ruler(module, side) for side in SIDES}


def rulers_by_words(settings: Mapping[str, Any]) -> dict[Side, Ruler]:
    """Return rulers without a model, by words: a text has at least as many tokens as words."""
    return {
        side: Ruler(unit="words", count=count_words, limit=settings.get(f"model.max_{side}_length")) for side in SIDES
    }


def _ruler(module: Any, side: Side) -> Ruler:
    if hasattr(module, "codec"):  # a generator, which writes queries for passages given a prompt
        tokenizer, contract = module.codec.tokenizer, module.codec.contract
        prefix = contract.prompt if side == "passage" else ""
        limit = contract.max_passage_length if side == "passage" else contract.max_query_length
    else:
        tower = module.tower(side) if hasattr(module, "tower") else module.encoder
        tokenizer, contract = tower.tokenizer, tower.contract
        prefix, limit = contract.prefix(side), contract.max_length(side)

    def count(texts: Sequence[str]) -> list[int]:
        raw = [prefix + (text.lower() if contract.lower_case else text) for text in texts]
        return [len(ids) for ids in tokenizer(raw, truncation=False, padding=False, verbose=False)["input_ids"]]

    return Ruler(unit="tokens", count=count, limit=int(limit))


def fitting_length(lengths: Sequence[int]) -> int:
    """Return the smallest multiple of eight tokens that truncates at most one text in twenty."""
    return -(-int(np.percentile(lengths or [8], 95, method="higher")) // 8) * 8


def fitting_batch(units: int, at_most: int) -> int:
    """Return the expected units of a step: at most a quarter of all units, above which sampling amplifies little."""
    return min(at_most, max(1, units // 4))


def cut_texts(data: Any, rulers: Mapping[Side, Ruler]) -> list[str]:
    """Report the sides where the model's length truncates most texts; only for the data owner's terminal."""
    collection = getattr(data, "collection", None)
    texts = {"query": getattr(collection, "queries", {}), "passage": getattr(collection, "passages", {})}
    found = []
    for side, ruler in rulers.items():
        lengths = measure_lengths(texts[side].values(), count=ruler.count, limit=ruler.limit, at_most=MAX_TEXTS)
        if (lengths["share_cut"] or 0) > 0.5:
            least = "at least " if ruler.unit == "words" else ""
            fits = "task=check_data says what fits" if least else f"{fitting_length([lengths['p95']])} cuts under 5 %"
            share = f"{least}{lengths['share_cut']:.0%}"
            found.append(f"model.max_{side}_length={ruler.limit} cuts {share} of the {SIDES[side]}; {fits}.")
    return found
