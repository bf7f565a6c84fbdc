"""How long texts are to the model that is to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lit_dpret.datamodules.survey import count_words
from lit_dpret.errors import LitDpretError
from lit_dpret.tasks.parts import Parts

Side = Literal["query", "passage"]


@dataclass(frozen=True, kw_only=True)
class Ruler:
    """Measures texts of one side.

    Args:
        unit: ``tokens`` or ``words``.
        count: The length of each text, uncut, with prefix or prompt and special tokens.
        limit: Where the model cuts; None for words.
    """

    unit: Literal["tokens", "words"]
    count: Callable[[Sequence[str]], Sequence[int]]
    limit: int | None = None


def make_rulers(parts: Parts, privacy: Any) -> tuple[dict[Side, Ruler], str]:
    """A ruler for each side by the tokenizer of ``model=``, or by words where it cannot be had.

    Returns:
        The rulers, and what they measure by, in words.
    """
    words = Ruler(unit="words", count=count_words)
    try:
        module = parts.make_module(privacy=privacy)
        rulers: dict[Side, Ruler] = {"query": _ruler(module, "query"), "passage": _ruler(module, "passage")}
    except (LitDpretError, AttributeError) as error:
        why = str(error) if isinstance(error, LitDpretError) else "the model of model= reads no texts"
        return {"query": words, "passage": words}, f"words between white space ({why})"
    return rulers, f"tokens of {type(module).__name__}, with its prefix and special tokens"


def _ruler(module: Any, side: Side) -> Ruler:
    if hasattr(module, "codec"):  # a generator, which writes queries for passages after a prompt
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
