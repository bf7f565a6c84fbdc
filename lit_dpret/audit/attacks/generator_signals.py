"""Signals of membership from a generator: how likely it finds a query, measured against what one would expect.

The likelihood alone tells common questions from odd ones better than members from others. Each signal but the
first divides by, or subtracts, a guess at what the likelihood would be without training on the query.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lit_dpret.audit.statistics.shadow import logit
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.modules.token_scores import TokenScores

Floats = NDArray[np.float64]


def generator_signals(
    scores: TokenScores, queries: Sequence[str], *, reference: TokenScores | None = None, lowest: float = 0.2
) -> dict[str, Floats]:
    """Signals of each query, shape ``(queries,)``; the higher, the likelier a member.

    * ``loss``: mean log probability of a token (Yeom et al. 2018, arXiv 1709.01604).
    * ``logit``: ln(p / (1 - p)) of p = exp(loss), which is roughly normal and what shadow models are compared by
      (Carlini et al. 2022, arXiv 2112.03570, section IV.C).
    * ``reference``: log probability of the query minus that under a model which never saw private data: the
      model that the generator started from is free (Carlini et al. 2021, arXiv 2012.07805, section 5.2).
    * ``zlib``: the loss divided by the query's bytes after compression (the same).
    * ``min_k``: mean log probability of the least likely tokens, a share ``lowest`` of them (Shi et al. 2024,
      arXiv 2310.16789).
    * ``min_k_plus``: the same after each token's log probability was standardised by mean and deviation of the
      model's next-token distribution (Zhang et al. 2024, arXiv 2404.02936).

    Args:
        scores: Under the attacked model; ``min_k_plus`` needs its moments and is left out without them.
        queries: The texts.
        reference: Under the public model; without it ``reference`` is left out. Its tokens may be others.
        lowest: Share of tokens that ``min_k`` looks at; one token at least.

    Raises:
        ConfigurationError: ``lowest`` is no share.
        DataError: There are not as many queries as scores.
    """
    if not 0 < lowest <= 1:
        raise ConfigurationError(f"lowest={lowest} must be above 0 and at most 1.")
    count = len(scores.mask)
    if len(queries) != count or (reference is not None and len(reference.mask) != count):
        raise DataError(f"{len(queries)} queries do not go with scores of {count}.")
    loss = scores.per_token()
    sizes = np.array([len(zlib.compress(query.encode("utf-8"))) for query in queries])
    found = {
        "loss": loss,
        "logit": logit(np.minimum(loss, -1e-12)),  # a model can be certain to the last bit
        "zlib": loss / sizes,
        "min_k": _lowest_mean(scores.log_probs, scores.mask, lowest),
    }
    if reference is not None:
        found["reference"] = scores.sums() - reference.sums()
    if scores.means is not None and scores.deviations is not None:
        # A token that the model is certain of is as expected: neither likely nor unlikely.
        above = np.where(scores.deviations > 0, scores.log_probs - scores.means, 0.0)
        standardised = above / np.where(scores.deviations > 0, scores.deviations, 1.0)
        found["min_k_plus"] = _lowest_mean(standardised, scores.mask, lowest)
    return found


def _lowest_mean(values: Floats, mask: NDArray[np.bool_], share: float) -> Floats:
    """Mean of the lowest ``share`` of the values in each row where the mask holds."""
    ordered = np.sort(np.where(mask, values, np.inf), axis=1)
    counts = np.maximum(1, np.floor(share * mask.sum(axis=1) + 1e-9).astype(int))
    taken = np.arange(values.shape[1]) < counts[:, None]
    return np.asarray(np.where(taken, ordered, 0.0).sum(axis=1) / counts)
