"""How many bits of each word does the embedding tell? Measured against the embedding of somebody else.

Paper 004 (section 3.6, table 3) finds perplexities of 25.6 with and 25.9 without the embedding, which are 0.0117 nats a
token apart (its appendix C has losses of 3.239 and 3.245, 0.006 apart), and calls the difference insignificant without
saying how large one would have to be. Two things are added here. The control is the same network on shuffled
embeddings, so that more weights are not taken for knowledge. And the difference has an interval, since both networks
are asked about the same texts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_dpret.audit.statistics.checks import check_confidence, check_count
from lit_dpret.errors import ConfigurationError, DataError

Floats = NDArray[np.float64]


def nats_between(without: float, given: float) -> float:
    """Nats a token between two perplexities.

    >>> round(nats_between(25.9, 25.6), 5)
    0.01165

    Raises:
        ConfigurationError: A perplexity is below 1.
    """
    if not (without >= 1 and given >= 1):
        raise ConfigurationError(f"Perplexities of {without} and {given} cannot be: they are at least 1.")
    return math.log(without / given)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What embeddings tell of a token, beyond what shuffled ones do.

    Attributes:
        nats: A token, in the mean over tokens; below zero where the embedding only confused.
        low: Lower end of the paired bootstrap interval over texts.
        high: Upper end.
        bits: The same as ``nats``, in bits.
        perplexity: With the texts' own embeddings.
        shuffled_perplexity: With other texts' embeddings.
        texts: How many.
        confidence: Of the interval.
    """

    nats: float
    low: float
    high: float
    bits: float
    perplexity: float
    shuffled_perplexity: float
    texts: int
    confidence: float

    @property
    def significant(self) -> bool:
        """Whether the interval excludes that the embeddings tell nothing."""
        return self.low > 0

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "significant": self.significant}


def told(
    own: ArrayLike, shuffled: ArrayLike, tokens: ArrayLike, *, confidence: float = 0.95, resamples: int = 2000,
    seed: int = 0,
) -> Told:  # fmt: skip
    """Nats a token between two networks' losses of the same texts.

    The interval is over the choice of texts, for these two trained networks; another training of them would differ too.

    Args:
        own: Summed loss of each text in nats, with its own embedding, shape ``(texts,)``.
        shuffled: With another text's, likewise.
        tokens: Of each text, likewise.
        confidence: Of the interval.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.

    Raises:
        DataError: Shapes differ, or there are fewer than two texts.
        ConfigurationError: ``confidence`` or ``resamples`` is out of its range.
    """
    tail = check_confidence(confidence) / 2
    check_count("resamples", resamples, least=1)
    with_own, with_other, counts = (np.asarray(part, dtype=np.float64) for part in (own, shuffled, tokens))
    if with_own.ndim != 1 or not with_own.shape == with_other.shape == counts.shape or len(with_own) < 2:
        raise DataError(
            f"Losses of shapes {with_own.shape} and {with_other.shape} and tokens of {counts.shape} are no pairs."
        )
    gained = with_other - with_own
    weights = np.random.default_rng(seed).multinomial(len(gained), np.full(len(gained), 1 / len(gained)), resamples)
    low, high = np.quantile((weights @ gained) / (weights @ counts), [tail, 1 - tail])
    nats, total = float(gained.sum() / counts.sum()), counts.sum()
    return Told(
        nats=nats, low=float(low), high=float(high), bits=nats / math.log(2),
        perplexity=math.exp(with_own.sum() / total), shuffled_perplexity=math.exp(with_other.sum() / total),
        texts=len(gained), confidence=confidence,
    )  # fmt: skip


def shuffled_order(count: int, *, seed: int) -> NDArray[np.int64]:
    """A permutation without a fixed point: every text gets the embedding of another one.

    Raises:
        DataError: There are fewer than two texts.
    """
    if count < 2:
        raise DataError(f"{count} texts cannot be shuffled.")
    order = np.random.default_rng(seed).permutation(count)
    found = np.empty(count, dtype=np.int64)
    found[order] = np.roll(order, 1)
    return found
