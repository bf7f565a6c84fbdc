"""Match an embedding to one of several texts: needs no training, and is the strongest attack on guessable texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_dpret.audit.attacks.signals import unit_rows
from lit_dpret.audit.statistics.error_rates import Rate, rate
from lit_dpret.audit.statistics.evidence import check_confidence, check_count
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.synthesis.textsim.bleu import corpus_bleu
from lit_dpret.synthesis.textsim.words import words

Floats = NDArray[np.float64]

_RIDGE = 1e-2  # weight of the penalty, relative to the mean square of the known embeddings


def identify(
    embeddings: Floats, guesses: Floats, *, candidates: int = 100, confidence: float = 0.95, seed: int = 0
) -> Rate:
    """Identify the text of each embedding among candidates, by cosine.

    Guarantees:
        - A tie with another candidate is not a hit.

    Args:
        embeddings: The attacked embeddings, shape ``(texts, dim)``.
        guesses: The same texts embedded by the attacker's encoder, in the same order and space.
        candidates: Candidates per text: the text itself and ``candidates - 1`` others, drawn without replacement.
        confidence: Confidence level of the interval, which assumes independent texts.
        seed: The seed of the draw.
    """
    if embeddings.shape != guesses.shape or embeddings.ndim != 2:
        raise DataError(
            f"Embeddings of shape {embeddings.shape} and guesses of {guesses.shape} are not of the same texts in one "
            "space. An attacker with another encoder needs a map between the spaces: see align."
        )
    if not 2 <= candidates <= len(embeddings):
        raise ConfigurationError(f"task.candidates={candidates} must be between 2 and the {len(embeddings)} texts.")
    own, theirs = unit_rows(embeddings), unit_rows(guesses)
    rng, hits = np.random.default_rng(seed), 0
    for place in range(len(own)):
        others = rng.choice(len(own) - 1, candidates - 1, replace=False)
        others += others >= place
        hits += bool((theirs[others] @ own[place] < theirs[place] @ own[place]).all())
    return rate(hits, len(own), chance=1 / candidates, confidence=confidence)


def align(known: Floats, guesses: Floats) -> Floats:
    """Return the linear map from embeddings of known texts to the attacker's own embeddings of these texts.

    Use it for an attacker whose encoder has another space, by training or by a secret rotation, and who knows some
    texts with their embeddings. It is ridge regression in closed form.

    Args:
        known: Embeddings in the attacked space, shape ``(texts, dim)``.
        guesses: Embeddings in the attacker's space, shape ``(texts, own dim)``.

    Returns:
        Shape ``(dim, own dim)``; ``embeddings @ align(...)`` is in the attacker's space.
    """
    if known.ndim != 2 or guesses.ndim != 2 or len(known) != len(guesses) or not known.size:
        raise DataError(f"{known.shape} and {guesses.shape} are not embeddings of the same texts.")
    square = known.T @ known
    penalty = _RIDGE * float(np.trace(square)) / len(square)
    return np.asarray(np.linalg.solve(square + penalty * np.eye(len(square)), known.T @ guesses))


@dataclass(frozen=True, kw_only=True)
class EmbeddingGain:
    """The information that embeddings give about a token, beyond that of shuffled ones."""

    nats: float  # per token, averaged over tokens; below zero if the embedding only confused
    low: float  # lower end of the paired bootstrap interval over texts
    high: float
    bits: float  # the same as ``nats``, in bits
    perplexity: float  # with the texts' own embeddings
    shuffled_perplexity: float  # with other texts' embeddings
    texts: int
    confidence: float

    @property
    def significant(self) -> bool:
        return self.low > 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "significant": self.significant}


def embedding_gain(
    own: ArrayLike, shuffled: ArrayLike, tokens: ArrayLike, *, confidence: float = 0.95, resamples: int = 2000,
    seed: int = 0,
) -> EmbeddingGain:  # fmt: skip
    """Return the nats per token between two networks' losses on the same texts.

    The interval covers the choice of texts, for these two trained networks. Training them again would vary as well.

    All arguments have shape ``(texts,)``: summed losses in nats with a text's ``own`` embedding and with another
    text's, and its number of tokens.
    """
    tail = check_confidence(confidence) / 2
    check_count("resamples", resamples, least=1)
    with_own, with_other, counts = (np.asarray(part, dtype=np.float64) for part in (own, shuffled, tokens))
    gained = with_other - with_own
    weights = np.random.default_rng(seed).multinomial(len(gained), np.full(len(gained), 1 / len(gained)), resamples)
    low, high = np.quantile((weights @ gained) / (weights @ counts), [tail, 1 - tail])
    nats, total = float(gained.sum() / counts.sum()), counts.sum()
    return EmbeddingGain(
        nats=nats, low=float(low), high=float(high), bits=nats / math.log(2),
        perplexity=math.exp(with_own.sum() / total), shuffled_perplexity=math.exp(with_other.sum() / total),
        texts=len(gained), confidence=confidence,
    )  # fmt: skip


def shuffled_order(count: int, *, seed: int) -> NDArray[np.int64]:
    """Return a permutation without a fixed point: every text gets the embedding of another text."""
    if count < 2:
        raise DataError(f"{count} texts cannot be shuffled: at least two are needed.")
    order = np.random.default_rng(seed).permutation(count)
    found = np.empty(count, dtype=np.int64)
    found[order] = np.roll(order, 1)
    return found


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """Scores of reconstructed texts against the originals, averaged over texts."""

    bleu: float  # of the corpus, from 0 to 100, by sacrebleu
    token_f1: float  # harmonic mean of precision and recall of the sets of words
    exact: float  # the share equal to the original, ignoring case and punctuation
    # Between the written text's embedding and the attacked one; None if the texts were not embedded again.
    cosine: float | None
    texts: int


def token_set_f1(written: str, original: str) -> float:
    """Return the F1 of the two sets of words.

    >>> round(token_set_f1("a claim on my house", "file a claim"), 4)
    0.5
    """
    found, wanted = set(words(written)), set(words(original))
    shared = len(found & wanted)
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0


def recovered(written: Sequence[str], originals: Sequence[str], *, cosines: Sequence[float] | None = None) -> Recovered:
    """Compare reconstructed texts with the originals."""
    return Recovered(
        bleu=corpus_bleu(written, [[text] for text in originals], lower_case=True).score,
        token_f1=float(np.mean([token_set_f1(a, b) for a, b in zip(written, originals, strict=True)])),
        exact=float(np.mean([words(a) == words(b) for a, b in zip(written, originals, strict=True)])),
        cosine=None if cosines is None else float(np.mean(cosines)),
        texts=len(originals),
    )
