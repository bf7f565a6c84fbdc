"""Sentence boundaries by a few rules for edited English, the same on every machine and with every library version.

A sentence ends at ``.``, ``!`` or ``?`` before white space and something that can begin one, unless the dot belongs to
an abbreviation, an initial or a number. It also ends at every blank line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ABBREVIATIONS = frozenset(
    ["mr", "mrs", "ms", "dr", "prof", "sen", "rep", "gov", "gen", "col", "lt", "sgt", "capt", "st", "jr", "sr", "rev",
     "hon", "pres", "vs", "etc", "inc", "ltd", "co", "corp", "dept", "est", "no", "vol", "fig", "eq", "al", "approx",
     "e.g", "i.e", "u.s", "u.k", "u.n", "a.m", "p.m", "ph.d", "m.d", "jan", "feb", "mar", "apr", "jun", "jul", "aug",
     "sep", "sept", "oct", "nov", "dec"]
)  # fmt: skip
_END = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s)|\n\s*\n")
_BEGIN = re.compile(r"\s*[\"'“‘(\[]*[A-Z0-9À-Þ]")
_MOST = 2000  # characters; a list without a full stop is cut instead of being kept whole


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Return the start and end of every sentence, without surrounding white space.

    Guarantees:
        - The spans are in order and do not overlap, and every character outside of them is white space.
        - A span is neither empty nor all white space.

    Example:
        >>> text = "Dr. Jones paid $1.50. Did he? Yes."
        >>> [text[a:b] for a, b in sentence_spans(text)]
        ['Dr. Jones paid $1.50.', 'Did he?', 'Yes.']
    """
    found: list[tuple[int, int]] = []
    start = 0
    for end in [*_ends(text), len(text)]:
        found += _stripped(text, start, end)
        start = end
    return found


def sentences_of(text: str) -> list[str]:
    r"""Return the sentences, with each run of white space reduced to one space.

    Example:
        >>> sentences_of("One line\ngoes on. Two.")
        ['One line goes on.', 'Two.']
    """
    return [" ".join(text[start:end].split()) for start, end in sentence_spans(text)]


def _ends(text: str) -> Iterator[int]:
    for match in _END.finditer(text):
        if match[0].isspace():
            yield match.end()
            continue
        if not _BEGIN.match(text, match.end()):
            continue
        if match[0][0] == "." and not match[0].startswith(".."):
            before = text[max(0, match.start() - 24) : match.start()].split()
            word = before[-1].strip("\"'“‘([").casefold() if before else ""
            if word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha() and word != "i"):
                continue
        yield match.end()


def _stripped(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return the span without surrounding white space, in pieces of at most `_MOST` characters."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    pieces: list[tuple[int, int]] = []
    while end - start > _MOST:
        cut = text.rfind(" ", start + 1, start + _MOST)
        cut = start + _MOST if cut < 0 else cut
        pieces += _stripped(text, start, cut)
        start = cut
        while start < end and text[start].isspace():
            start += 1
    return [*pieces, (start, end)] if end > start else pieces
