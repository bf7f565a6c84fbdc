"""Equality of texts, for grouping units, finding copies, and comparing declarations with data."""

from __future__ import annotations


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
