"""Equality of texts, for grouping units, finding copies, and comparing declarations with data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from lit_dpret.errors import ConfigurationError

_LONG = 4
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


def collapse_whitespace(text: str) -> str:
    r"""Return a text with every run of whitespace as one space, and none at the ends.

    Example:
        >>> collapse_whitespace("  How  do\n tides work? ")
        'How do tides work?'
    """
    return " ".join(text.split())


def normalise(text: str) -> str:
    """Return the form in which texts are compared: casefolded, whitespace collapsed.

    Example:
        >>> normalise("How Do  Tides Work?") == normalise("how do tides work?")
        True
    """
    return collapse_whitespace(text).casefold()


def words_of(text: str) -> str:
    """Return the words of a text, without case and punctuation.

    Example:
        >>> words_of("Does it pay? runs/my_notes-2")
        'does it pay runs my notes 2'
    """
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))


def refuse_quoted(queries: Iterable[str], texts: Mapping[str, str], names: Mapping[str, str] = _NO_NAMES) -> None:
    """Refuse a protected query in what is published with a run, in the same words; case and punctuation aside.

    Args:
        queries: The protected ones.
        texts: Published texts, by the settings that hold them: no query is such a text, or stands in one with four
            words or more.
        names: Short ones, as of folders: words of short queries occur there by chance, so that one is refused that
            equals it with three words or more, or stands in it with four.

    Raises:
        ConfigurationError: One does. The message names the setting, and never the query.
    """
    spoken = {knob: words_of(text) for knob, text in (*texts.items(), *names.items())}
    equal = {words for knob, words in spoken.items() if knob in texts or words.count(" ") >= _LONG - 2}
    # In one piece, because there may be millions of queries; no query holds the mark in between.
    whole = "|".join(f" {words} " for words in spoken.values())
    for query in filter(None, map(words_of, queries)):
        long = query.count(" ") >= _LONG - 1
        if query not in equal and not (long and f" {query} " in whole):
            continue
        knob = next(knob for knob, words in spoken.items() if query == words or (long and f" {query} " in f" {words} "))
        raise ConfigurationError(
            f"{knob} holds a query of the run's own data in the same words: it is published, and the queries are "
            "protected. Take a text of public data.",
            trap="T25",
        )
