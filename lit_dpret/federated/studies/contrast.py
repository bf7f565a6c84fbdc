"""Which differences would show an effect that a paper reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Two points of a study, compared seed by seed.

    Args:
        claim: What is reported of them; empty where nothing is.
        more: The point that the claim has above the other.
        less: The other.
    """

    claim: str
    more: str
    less: str


@dataclass(frozen=True, kw_only=True)
class Trend:
    """A difference between two lines that falls with the number of a client's queries.

    Args:
        claim: What is reported.
        of: The line that gains.
        over: The line that it gains over.
    """

    claim: str
    of: str
    over: str
