"""Does a query find the passage it was written for?

Round-trip recall is the share of synthetic queries whose source passage is among the first k that a
retriever ranks for them. It needs no private data, so it may be computed, tuned on and published
freely. Its number means little alone: a retriever that loves some passages finds them for any query.
The control asks the same queries for a wrong passage each, in a derangement of the passages, and is
to be read beside it. (Round-trip consistency: Alberti et al., 2019; as a filter, Dai et al., 2022.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lit_dpret.errors import ConfigurationError, DataError


def hits(sources: Mapping[str, str], ranked: Mapping[str, Sequence[str]], k: int = 10) -> dict[str, bool]:
    """Return for each query id whether its source passage is among the first ``k`` ids ranked for it.

    A query without a ranking has no hit; it is not left out.

    Example:
        >>> hits({"q1": "a", "q2": "b"}, {"q1": ["c", "a"], "q2": ["c", "a"]}, k=2)
        {'q1': True, 'q2': False}
    """
    if k < 1:
        raise ConfigurationError(f"k={k} must be at least 1.")
    return {query: passage in ranked.get(query, ())[:k] for query, passage in sources.items()}


def wrong_sources(sources: Mapping[str, str], seed: int = 0) -> dict[str, str]:
    """Return each query with a passage that is not its own, every passage's queries moving together.

    The distinct passages are permuted by one random cycle (Sattolo's algorithm), so none stays in place.

    Raises:
        DataError: There are fewer than two passages.
    """
    passages = sorted(set(sources.values()))
    if len(passages) < 2:
        raise DataError(f"A shuffled control needs two passages with queries; there are {len(passages)}.")
    coins = np.random.Generator(np.random.Philox(key=seed))
    cycle = list(range(len(passages)))
    for last in range(len(cycle) - 1, 0, -1):
        other = int(coins.integers(last))
        cycle[last], cycle[other] = cycle[other], cycle[last]
    moved = {passage: passages[place] for passage, place in zip(passages, cycle, strict=True)}
    return {query: moved[passage] for query, passage in sources.items()}
