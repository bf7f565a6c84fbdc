"""A draw from a large nucleus without sorting the vocabulary.

A flat distribution has a nucleus of tens of thousands of tokens, and sorting as many scores for every row of
every step takes longer than the model that made them. Only two places of the order are wanted: where the
nucleus ends, and where the drawn token stands. So scores are dropped into buckets by size, masses are added
up bucket by bucket, and the one or two buckets that hold these places are sorted.
"""

from __future__ import annotations

import numpy as np

_BUCKETS = 2048
_DEPTH = 40.0  # scores so far below the largest, in nats, share the last bucket


def from_nucleus_unsorted(scores: np.ndarray, log_mass: float, u: float, top_p: float) -> int:
    """The token at ``u`` of the distribution function of one row's nucleus.

    Guarantees:
        - The token is the one that sorting the row by (score, token id) gives, up to float64 rounding of
          the sums.

    Args:
        scores: Scaled scores of the whole vocabulary, float64, shape ``(vocabulary,)``; -inf is never drawn.
        log_mass: Their log-sum-exp.
        u: In [0, 1).
        top_p: Mass of the nucleus.
    """
    depth = scores.max() - scores
    finite = depth < np.inf
    span = min(float(depth[finite].max()), _DEPTH)
    scale = (_BUCKETS - 1) / span if span > 0 else 0.0
    with np.errstate(invalid="ignore"):  # inf * 0: a row of equal scores with forbidden ones
        bucket = np.where(finite, np.minimum(depth * scale, _BUCKETS - 1), _BUCKETS).astype(np.int64)
    probabilities = np.exp(scores - log_mass)
    through = np.cumsum(np.bincount(bucket, weights=probabilities, minlength=_BUCKETS)[:_BUCKETS])

    def within(number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of one bucket in order, and the mass up to and with each of them."""
        ids = np.flatnonzero(bucket == number)
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        before = through[number - 1] if number else 0.0
        return ids, before + np.cumsum(probabilities[ids])

    end = int(np.searchsorted(through, top_p))  # the first bucket with which the nucleus is full
    end = min(end, int(bucket[finite].max()))  # rounding may keep the whole vocabulary from reaching top_p
    ids, cumulated = within(end)
    last = min(int(np.searchsorted(cumulated, top_p)), len(ids) - 1)
    target = u * cumulated[last]
    number = int(np.searchsorted(through[:end], target, side="right"))
    if number < end:
        ids, cumulated = within(number)
        last = len(ids) - 1
    return int(ids[min(int(np.searchsorted(cumulated, target, side="right")), last)])  # u * total may round up to it
