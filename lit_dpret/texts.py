"""Equality of texts, for grouping units, finding copies, and comparing declarations with a run's own queries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from lit_dpret.errors import ConfigurationError

_LONG = 4
#: Units to inspect before concluding that rows hold no texts.
_TRIED = 99
_PUBLISHED = "it is published, and the queries are protected. Take a text from public data."
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


def collapse_whitespace(text: str) -> str:
    r"""Return a text with each run of whitespace as one space, and none at the ends.

    Example:
        >>> collapse_whitespace("  How  do\n tides work? ")
        'How do tides work?'
    """
    return " ".join(text.split())


def normalise(text: str) -> str:
    """Return a text in the form used for comparison: casefolded, whitespace collapsed.

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


def refuse_quoted(
    queries: Iterable[str], texts: Mapping[str, str], names: Mapping[str, str] = _NO_NAMES, *,
    because: str = _PUBLISHED,
) -> None:  # fmt: skip
    """Refuse published texts of a run that contain a protected query in the same words, ignoring case and punctuation.

    Args:
        queries: The protected ones.
        texts: Published texts, by the settings that hold them: none may equal a query, or contain one of four words or
            more.
        names: Short published texts, such as folder names. Short queries match them by chance, so only an equal query
            of three words or more, or a contained one of four or more, is refused.
        because: The reason and the remedy, for the message, which names the setting but never the query.
    """
    spoken = {knob: words_of(text).split() for knob, text in (*texts.items(), *names.items())}
    equal = {" ".join(words) for knob, words in spoken.items() if knob in texts or len(words) >= _LONG - 1}
    # There may be millions of queries or texts: each is read once, and compared only if the first words match.
    begun = {start for words in spoken.values() for _, start in _starts(words)}
    same, within = set[str](), dict[str, set[tuple[str, ...]]]()
    for query in filter(None, map(words_of, queries)):
        if query in equal:
            same.add(query)
        parts = tuple(query.split())
        if (start := " ".join(parts[:_LONG])) in begun and len(parts) >= _LONG:
            within.setdefault(start, set()).add(parts)
    lengths = {start: {len(words) for words in found} for start, found in within.items()}
    for knob, words in spoken.items() if same or within else ():
        if " ".join(words) in same or any(
            tuple(words[place : place + length]) in within[start]
            for place, start in _starts(words)
            for length in lengths.get(start, ())
        ):
            raise ConfigurationError(
                f"{knob} holds a query of the run's own data in the same words: {because}", trap="T25"
            )


def _starts(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the position and the first words of each part of a text that may be a long query."""
    for place in range(len(words) - _LONG + 1):
        yield place, " ".join(words[place : place + _LONG])


def train_queries(data: Any) -> Iterator[str]:
    """Yield the texts of a prepared DataModule's train queries, from its collection or its rows."""
    if (collection := getattr(data, "collection", None)) is not None:
        yield from (collection.queries[query] for query in collection.qrels.get("train", {}))
        return
    if not hasattr(data, "train_units"):
        return
    units = data.train_units()
    for unit in range(len(units)):
        for row in units.rows(unit):
            if not isinstance(text := None if isinstance(row, Mapping) else getattr(row, "query", None), str):
                return  # rows of another kind, which may be costly to read
            yield text


def queries_of(data: Any) -> Iterable[str]:
    """Return the queries of every split of a prepared DataModule, or the texts of its training rows."""
    collection = getattr(data, "collection", None)
    return chain(train_queries(data), _texts_in_rows(data)) if collection is None else collection.queries.values()


def _texts_in_rows(data: Any) -> Iterator[str]:
    """Yield the texts in rows, also nested ones; texts of few words may be labels, which are not secret."""
    units: Any = data.train_units() if hasattr(data, "train_units") else ()
    found = False
    for unit in range(len(units)):
        if unit == _TRIED and not found:
            return  # rows of numbers or pictures, which may be costly to read
        for row in units.rows(unit):
            for text in _texts_in(row):
                if len(text.split()) >= _LONG:
                    found = True
                    yield text


def _texts_in(row: Any, depth: int = 4) -> Iterator[str]:
    if isinstance(row, str):
        yield row
        return
    if callable(getattr(type(row), "to_dict", None)):  # a row of pandas
        row = row.to_dict()
    held = row.values() if isinstance(row, Mapping) else row if isinstance(row, (tuple, list)) else ()
    for each in held or (vars(row).values() if type(row).__dictoffset__ else ()) if depth else ():
        yield from _texts_in(each, depth - 1)
