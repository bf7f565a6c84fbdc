"""The common definition of *word* and of *equal texts* for all text comparisons."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.lazy import optional

_APOSTROPHES = re.compile(r"(?<=\w)['’ʼ](?=\w)")
_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Return the words of a text: NFKC, case-folded, without punctuation; ``what's`` is one word.

    Joined without spaces, they are `lit_dpret.assets.overlap.without_punctuation` of the text, so equal words mean
    equal normalised texts.
    """
    return _WORD.findall(_APOSTROPHES.sub("", unicodedata.normalize("NFKC", text).casefold()))


def ngrams(tokens: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """Yield every run of ``n`` consecutive words; nothing if there are fewer."""
    check_n(n)
    return (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def check_n(n: int) -> None:
    """Refuse a length of n-grams below 1."""
    if n < 1:
        raise ConfigurationError(f"n={n} is not a length of an n-gram; it must be at least 1.")


def check_texts(texts: Sequence[object], what: str) -> None:
    """Refuse an empty list, whose shares are undefined."""
    if not texts:
        raise DataError(f"There are no {what} to compare.")


_NEEDS = {"sacrebleu": ("BLEU", "sacrebleu"), "sklearn": ("MAUVE", "scikit-learn")}


def need(package: Literal["sacrebleu", "sklearn"]) -> Any:
    """Return the imported package."""
    measure, name = _NEEDS[package]
    return optional(package, measure, "lit-dpret[quality]", package=name)
