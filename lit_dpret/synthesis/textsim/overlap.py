"""How many synthetic queries repeat an original one: word for word, or in a run of words.

A generator may repeat what it was trained on. So may chance: short questions are asked again and again. What
tells the two apart is the same count against original queries that the generator never saw, equally many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_dpret.assets.overlap import normalise
from lit_dpret.synthesis.textsim.share import Share
from lit_dpret.synthesis.textsim.words import check_n, check_texts, ngrams, words


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How many texts are found among others.

    Attributes:
        exact: Texts that equal one of the others after normalisation (case, punctuation and spaces aside).
        ngram: Texts that share a run of ``n`` words with one of the others, of those with ``n`` words at least.
        n: Length of that run.
        references: How many others there were.
    """

    exact: Share
    ngram: Share
    n: int
    references: int

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "exact": self.exact.to_dict(), "ngram": self.ngram.to_dict(), "n": self.n, "references": self.references,
        }  # fmt: skip


def overlap(texts: Sequence[str], references: Sequence[str], *, n: int = 8) -> Overlap:
    """How many of ``texts`` are found in ``references``.

    Guarantees:
        - Each text counts once, however often it is found; equal texts count as often as they stand there.
        - A text without any word is never found.

    Args:
        texts: The synthetic ones.
        references: The original ones.
        n: Words in a row that count as copied. A text with fewer cannot share them and is not in that share's total.

    Raises:
        ConfigurationError: ``n`` is below 1.
        DataError: One of the lists is empty.
    """
    check_n(n)
    check_texts(texts, "synthetic queries")
    check_texts(references, "original queries")
    whole = {normalise(text) for text in references} - {""}
    runs = {gram for text in references for gram in ngrams(words(text), n)}
    split = [words(text) for text in texts]
    long = [tokens for tokens in split if len(tokens) >= n]
    return Overlap(
        exact=Share(sum(normalise(text) in whole for text in texts), len(texts)),
        ngram=Share(sum(any(gram in runs for gram in ngrams(tokens, n)) for tokens in long), len(long)),
        n=n,
        references=len(references),
    )
