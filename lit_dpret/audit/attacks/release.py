"""Attacks on a synthetic data set alone, without the model.

The first two follow Meeus et al. 2025, "The Canary's Echo", arXiv 2502.14921; the third follows Amin et al. 2026,
"Phantoms and Disclosures": a release that repeats held-out rare queries as often as trained ones repeats common ways of
asking. Neither paper's code was available, so these numbers are not theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dpret.audit.attacks.signals import unit_rows
from lit_dpret.audit.statistics.evidence import Evidence
from lit_dpret.audit.statistics.one_run import one_run_counts
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.textsim.words import ngrams, words

Floats = NDArray[np.float64]

_START, _END = "\x02", "\x03"


class BigramModel:
    """Probability of each word given the previous one, with Laplace smoothing.

    ``vocabulary`` holds further texts whose words the model must know; all other words count as one unknown word.
    Models that are compared need the same vocabulary.
    """

    def __init__(self, texts: Sequence[str], *, vocabulary: Sequence[str] = ()) -> None:
        if not texts:
            raise DataError("A language model needs texts to learn from.")
        self._known = {word for text in (*texts, *vocabulary) for word in words(text)}
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._firsts: Counter[str] = Counter()
        for text in texts:
            for first, second in self._bigrams(text):
                self._pairs[first, second] += 1
                self._firsts[first] += 1
        self._choices = len(self._known) + 2  # the end, and the unknown word

    def mean_log_probs(self, texts: Sequence[str]) -> Floats:
        """Return the mean log probability in nats of each text's words and end, shape ``(texts,)``."""
        return np.array([self._mean(self._bigrams(text)) for text in texts])

    def _mean(self, bigrams: list[tuple[str, str]]) -> float:
        counts = np.array([[self._pairs[pair], self._firsts[pair[0]]] for pair in bigrams], dtype=np.float64)
        return float(np.log((counts[:, 0] + 1) / (counts[:, 1] + self._choices)).mean())

    def _bigrams(self, text: str) -> list[tuple[str, str]]:
        known = [word if word in self._known else "" for word in words(text)]
        return list(zip([_START, *known], [*known, _END], strict=True))


def bigram_scores(queries: Sequence[str], release: Sequence[str], reference: Sequence[str] | None = None) -> Floats:
    """Return each query's mean log probability under a bigram model of the release, minus that of the reference.

    ``reference`` holds queries that resemble the release but are not from the people under attack. None subtracts
    nothing, and finds common words rather than members. Shape ``(queries,)``; higher means member.
    """
    both = [*release, *(reference or ())]
    scores = BigramModel(release, vocabulary=both).mean_log_probs(queries)
    if reference is None:
        return scores
    return np.asarray(scores - BigramModel(reference, vocabulary=both).mean_log_probs(queries))


def nearest_scores(queries: Floats, release: Floats, *, nearest: int = 25) -> Floats:
    """Return each query's mean cosine with the ``nearest`` synthetic queries, shape ``(queries,)``.

    ``queries`` and ``release`` are embeddings by an encoder trained on neither, shape ``(texts, dim)``.
    """
    if queries.ndim != 2 or release.ndim != 2 or queries.shape[1:] != release.shape[1:] or not release.size:
        raise DataError(f"Embeddings of shapes {queries.shape} and {release.shape} cannot be compared.")
    made = unit_rows(release)
    kept = min(nearest, len(made))
    found = np.empty(len(queries))
    for start in range(0, len(queries), 256):  # the whole table of cosines may not fit
        cosines = unit_rows(queries[start : start + 256]) @ made.T
        found[start : start + 256] = np.partition(cosines, -kept, axis=1)[:, -kept:].mean(axis=1)
    return found


def repeated(queries: Sequence[str], release: Sequence[str], *, overlap: float = 1.0) -> NDArray[np.bool_]:
    """Return a mask of the queries that the release repeats, shape ``(queries,)``.

    Args:
        queries: Queries that may have been trained on.
        release: The synthetic queries.
        overlap: 1 requires all words of the query, in order and with nothing else, ignoring case and punctuation.
            Below 1, this share of the query's distinct trigrams must be in one synthetic query.
    """
    if not 0 < overlap <= 1:
        raise ConfigurationError(f"overlap={overlap} must be above 0 and at most 1.")
    made = [tuple(words(text)) for text in release]
    whole = set(made)
    holders: dict[tuple[str, ...], set[int]] = {}
    if overlap < 1:
        for place, tokens in enumerate(made):
            for gram in ngrams(tokens, 3):
                holders.setdefault(gram, set()).add(place)

    def found(text: str) -> bool:
        own = tuple(words(text))
        grams = set(ngrams(own, 3)) if overlap < 1 else set()
        if (own and own in whole) or not grams:
            return bool(own) and own in whole
        shared = Counter(place for gram in grams for place in holders.get(gram, ()))
        return max(shared.values(), default=0) >= overlap * len(grams)

    return np.array([found(text) for text in queries], dtype=bool)


@dataclass(frozen=True, kw_only=True)
class Disclosures:
    """Rare queries that a release repeats, half of which were held out by coins before training."""

    queries: int
    repeated: int
    trained: int
    evidence: Evidence

    @property
    def phantoms(self) -> int:
        """Repeated queries that were held out, and so were not disclosed."""
        return self.repeated - self.trained

    @property
    def excess(self) -> int:
        return self.trained - self.phantoms

    @property
    def precision(self) -> float:
        """The share of repeated queries that were trained on; one half without leakage."""
        return self.trained / self.repeated if self.repeated else 0.5

    def to_dict(self) -> dict[str, Any]:
        return {
            "queries": self.queries, "repeated": self.repeated, "trained": self.trained, "phantoms": self.phantoms,
            "excess": self.excess, "precision": self.precision, "evidence": self.evidence.to_dict(),
        }  # fmt: skip


def disclosures(*, queries: int, repeated: int, trained: int, delta: float, confidence: float = 0.95) -> Disclosures:
    """Audit a release from the counts of repeated queries.

    The release decides how many queries are repeated, so the bound is the one that holds for every number. (The bound
    for a number fixed beforehand would be 0.46894 here.)

    >>> found = disclosures(queries=20_000, repeated=763, trained=492, delta=1e-6)
    >>> found.phantoms, found.excess, round(found.precision, 4), round(found.evidence.eps_lower, 3)
    (271, 221, 0.6448, 0.462)
    """
    evidence = one_run_counts(
        canaries=queries, guesses=repeated, correct=trained, delta=delta, confidence=confidence, planned=False
    )
    return Disclosures(queries=queries, repeated=repeated, trained=trained, evidence=evidence)
