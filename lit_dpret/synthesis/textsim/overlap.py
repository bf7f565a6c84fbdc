"""Count synthetic queries that repeat an original one: word for word, or in a run of words.

A generator may repeat its training data. So may chance: short questions are asked again and again. To distinguish the
two, count the same against equally many original queries that the generator never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy.special import betaincinv

from lit_dpret.assets.overlap import without_punctuation
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.textsim.words import check_n, check_texts, ngrams, words


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The number of texts found among others."""

    exact: Share  # texts that equal one of the others, ignoring case, punctuation and spaces
    ngram: Share  # texts that share a run of ``n`` words with one of the others, of those with at least ``n`` words
    n: int
    references: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "exact": self.exact.to_dict(), "ngram": self.ngram.to_dict(), "n": self.n, "references": self.references,
        }  # fmt: skip


def overlap(texts: Sequence[str], references: Sequence[str], *, n: int = 8) -> Overlap:
    """Return how many of ``texts`` are found in ``references``, whole or by ``n`` words in a row.

    Guarantees:
        - Each text counts once, however often it is found; equal texts count as often as they occur.
        - A text without any word is never found. A text with fewer than ``n`` words is not in that share's total.
    """
    check_n(n)
    check_texts(texts, "synthetic queries")
    check_texts(references, "original queries")
    whole = {without_punctuation(text) for text in references} - {""}
    runs = {gram for text in references for gram in ngrams(words(text), n)}
    split = [words(text) for text in texts]
    long = [tokens for tokens in split if len(tokens) >= n]
    return Overlap(
        exact=Share(sum(without_punctuation(text) in whole for text in texts), len(texts)),
        ngram=Share(sum(any(gram in runs for gram in ngrams(tokens, n)) for tokens in long), len(long)),
        n=n,
        references=len(references),
    )


@dataclass(frozen=True)
class Share:
    """``positives`` of ``total``, with an exact interval for the underlying share.

    The interval is Clopper and Pearson's (Biometrika 26, 1934). It covers the share with probability at least
    ``level``, for every share and total, even without positives. It is about the choice of the examined texts as an
    independent draw from many more; if they are all there are, it says nothing.
    """

    positives: int
    total: int  # how many were examined; 0 if none could be positive
    level: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.positives <= self.total:
            raise DataError(f"{self.positives} positives of {self.total} are impossible.")
        if not 0 < self.level < 1:
            raise ConfigurationError(f"level={self.level} must lie strictly between 0 and 1.")

    @property
    def value(self) -> float | None:
        """The share; None for a total of 0."""
        return self.positives / self.total if self.total else None

    @property
    def low(self) -> float:
        """Lower bound of the interval; 0 for a total of 0."""
        k, n = self.positives, self.total
        return 0.0 if k == 0 else float(betaincinv(k, n - k + 1, (1 - self.level) / 2))

    @property
    def high(self) -> float:
        """Upper bound of the interval; 1 for a total of 0."""
        k, n = self.positives, self.total
        return 1.0 if k == n else float(betaincinv(k + 1, n - k, (1 + self.level) / 2))

    def to_dict(self) -> dict[str, Any]:
        """Return counts, share and bounds as JSON values."""
        return {**asdict(self), "share": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        if self.value is None:
            return "none could be looked at"
        return f"{self.value:.2%} [{self.low:.2%}, {self.high:.2%}] ({self.positives:,} of {self.total:,})"
