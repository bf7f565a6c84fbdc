"""Membership signals: a dual encoder's similarity of query and passage, and a generator's likelihood of a query.

Training pulls a query towards its passage and away from others. A fixed pool of public passages, chosen by the
attacker, shows how far that went.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from lit_dpret.audit.statistics.shadow import logit
from lit_dpret.encoders import Side, TextEncoder, Towers
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.modules.token_scores import TokenScores

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class EncodedPairs:
    """Pairs and a public pool under one encoder, before normalisation."""

    queries: Floats  # shape ``(pairs, dim)``
    passages: Floats  # same shape
    pool: Floats  # shape ``(public passages, dim)``
    # Pairs by pool; true where the pool's text is the pair's own passage and therefore not a negative.
    own: NDArray[np.bool_]
    normalise: bool  # whether the encoder compares by cosine; otherwise by dot product

    def __repr__(self) -> str:
        return f"EncodedPairs({len(self.queries)} pairs, {len(self.pool)} public passages)"


def encode_pairs(
    towers: Towers,
    queries: Sequence[str],
    passages: Sequence[str],
    pool: Sequence[str],
    *,
    batch_size: int = 64,
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EncodedPairs:
    """Embed pairs and pool with the encoder, without normalisation."""
    if len(queries) != len(passages) or not queries or len(pool) < 2:
        raise DataError(
            f"{len(queries)} queries, {len(passages)} passages and a pool of {len(pool)}: give a passage for each "
            "query, and at least two public passages."
        )

    def embed(encoder: TextEncoder, texts: Sequence[str], side: Side) -> Floats:
        contract = replace(encoder.contract, normalise=False)
        raw = TextEncoder(encoder.backbone, encoder.tokenizer, contract, encoder.projection)
        found = raw.encode(texts, side, batch_size=batch_size, device=device, progress=progress)
        return np.asarray(found.double().numpy())

    return EncodedPairs(
        queries=embed(towers.query_encoder, queries, "query"),
        passages=embed(towers.passage_encoder, passages, "passage"),
        pool=embed(towers.passage_encoder, pool, "passage"),
        own=np.array([[text == passage for text in pool] for passage in passages]),
        normalise=towers.query_encoder.contract.normalise,
    )


def encoder_signals(
    pairs: EncodedPairs, *, temperature: float = 0.05, reference: EncodedPairs | None = None
) -> dict[str, Floats]:
    """Return the signals of each pair, shape ``(pairs,)``; higher for likely members.

    * ``logit``: ln(p / (1 - p)), p the softmax of the pair's similarity over its passage and the pool. For an
      in-batch softmax this is what the logit of the loss is for a classifier, and it suits shadow models.
    * ``margin``: cosine of the pair minus the pool's mean cosine with the query.
    * ``rank``: minus the logarithm of the passage's rank among passage and pool; ties count against it.
    * ``norm``: length of the query's embedding before normalisation, which the loss ignores but training changes.
    * With a reference, an encoder that never saw private data: ``shift``, the distance between the query's embeddings
      under both, and each of the four minus the same under the reference, as ``logit_reference`` and so on.

    These do not reproduce a published attack on dual encoders. They are the text-embedding attacks of Song and
    Raghunathan (2020, arXiv 2004.00053, section 5) with a public pool instead of a context window.

    ``temperature`` divides the similarity in the softmax: use that of training, if known.
    """
    if not temperature > 0:
        raise ConfigurationError(f"temperature={temperature} must be above 0.")
    found = _signals(pairs, temperature)
    if reference is None:
        return found
    other = _signals(reference, temperature)
    if reference.queries.shape == pairs.queries.shape:  # a distance is meaningful only within one space
        found["shift"] = np.linalg.norm(unit_rows(pairs.queries) - unit_rows(reference.queries), axis=1)
    return found | {f"{name}_reference": found[name] - value for name, value in other.items()}


def mean_by_query(signals: dict[str, Floats], query_of_row: Any, queries: int) -> dict[str, Floats]:
    """Average row signals over a query's rows, shape ``(queries,)``."""
    counts = np.bincount(query_of_row, minlength=queries)
    return {name: np.bincount(query_of_row, value, minlength=queries) / counts for name, value in signals.items()}


def _signals(pairs: EncodedPairs, temperature: float) -> dict[str, Floats]:
    queries, passages, pool = map(unit_rows, (pairs.queries, pairs.passages, pairs.pool))
    own, others = (queries * passages).sum(axis=1), queries @ pool.T
    similarity, negatives = own, others
    if not pairs.normalise:
        similarity, negatives = (pairs.queries * pairs.passages).sum(axis=1), pairs.queries @ pairs.pool.T
    masked = np.where(pairs.own, -np.inf, negatives)
    if np.isneginf(masked).all(axis=1).any():
        raise DataError("The pool contains only the passage of a pair: use another pool.")
    counted = (~pairs.own).sum(axis=1)
    ahead = (masked >= similarity[:, None]).sum(axis=1)
    return {
        "logit": np.asarray(similarity / temperature - logsumexp(masked / temperature, axis=1)),
        "margin": np.asarray(own - np.where(pairs.own, 0.0, others).sum(axis=1) / counted),
        "rank": np.asarray(-np.log(1.0 + ahead)),
        "norm": np.asarray(np.linalg.norm(pairs.queries, axis=1)),
    }


def generator_signals(
    scores: TokenScores, queries: Sequence[str], *, reference: TokenScores | None = None, lowest: float = 0.2
) -> dict[str, Floats]:
    """Return the signals of each query, shape ``(queries,)``; higher for likely members.

    * ``loss``: mean log probability of a token (Yeom et al. 2018, arXiv 1709.01604).
    * ``logit``: ln(p / (1 - p)) of p = exp(loss). It is roughly normal, and shadow models are compared by it
      (Carlini et al. 2022, arXiv 2112.03570, section IV.C).
    * ``reference``: log probability of the query minus that under a ``reference`` model that never saw private data
      (Carlini et al. 2021, arXiv 2012.07805, section 5.2).
    * ``zlib``: the loss divided by the query's size in bytes after compression (same reference).
    * ``min_k``: mean log probability of the least likely tokens, a share ``lowest`` of all (Shi et al. 2024,
      arXiv 2310.16789).
    * ``min_k_plus``: the same after standardising each token's log probability by mean and deviation of the
      model's next-token distribution (Zhang et al. 2024, arXiv 2404.02936), if the scores include its moments.
    """
    loss = scores.per_token()
    sizes = np.array([len(zlib.compress(query.encode("utf-8"))) for query in queries])
    found = {
        "loss": loss,
        "logit": logit(np.minimum(loss, -1e-12)),  # a model can be certain to within rounding
        "zlib": loss / sizes,
        "min_k": _lowest_mean(scores.log_probs, scores.mask, lowest),
    }
    if reference is not None:
        found["reference"] = scores.sums() - reference.sums()
    if scores.means is not None and scores.deviations is not None:
        # A token of which the model is certain is exactly as expected: neither likely nor unlikely.
        above = np.where(scores.deviations > 0, scores.log_probs - scores.means, 0.0)
        standardised = above / np.where(scores.deviations > 0, scores.deviations, 1.0)
        found["min_k_plus"] = _lowest_mean(standardised, scores.mask, lowest)
    return found


def _lowest_mean(values: Floats, mask: NDArray[np.bool_], share: float) -> Floats:
    """Return the mean of the lowest ``share`` of each row's values, where the mask is true."""
    ordered = np.sort(np.where(mask, values, np.inf), axis=1)
    counts = np.maximum(1, np.floor(share * mask.sum(axis=1) + 1e-9).astype(int))
    taken = np.arange(values.shape[1]) < counts[:, None]
    return np.asarray(np.where(taken, ordered, 0.0).sum(axis=1) / counts)


def unit_rows(vectors: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Return every row divided by its Euclidean norm, shape ``(rows, dim)``; a row of zeros stays zero."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))
