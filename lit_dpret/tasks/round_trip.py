"""Check whether a synthetic query retrieves the passage that it was written for.

Round-trip recall is the share of synthetic queries whose source passage is among the first k that a retriever ranks; it
needs no private data. The control pairs the same queries with wrong passages, in a derangement of the passages.
(Round-trip consistency: Alberti et al., 2019; as a filter, Dai et al., 2022.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lit_dpret.callbacks import ProgressLine
from lit_dpret.datamodules import SyntheticDataModule
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.modules import DualEncoder, FrozenDualEncoder
from lit_dpret.retrieval.statistics import bootstrap_interval
from lit_dpret.synthesis.filters import ReleasedQueries, load_released
from lit_dpret.synthesis.filters.released import require_covered, require_released
from lit_dpret.tasks.ranking import rank_embeddings


def hits(sources: Mapping[str, str], ranked: Mapping[str, Sequence[str]], k: int = 10) -> dict[str, bool]:
    """Return for each query id whether its source passage is among the first ``k`` ids ranked for it.

    A query without a ranking counts as a miss.

    Example:
        >>> hits({"q1": "a", "q2": "b"}, {"q1": ["c", "a"], "q2": ["c", "a"]}, k=2)
        {'q1': True, 'q2': False}
    """
    if k < 1:
        raise ConfigurationError(f"k={k} must be at least 1.")
    return {query: passage in ranked.get(query, ())[:k] for query, passage in sources.items()}


def wrong_sources(sources: Mapping[str, str], seed: int = 0) -> dict[str, str]:
    """Return each query with a wrong passage, from one random cycle of the passages (Sattolo's algorithm)."""
    passages = sorted(set(sources.values()))
    if len(passages) < 2:
        raise DataError(f"A shuffled control needs at least two passages with queries; there are {len(passages)}.")
    coins = np.random.Generator(np.random.Philox(key=seed))
    cycle = list(range(len(passages)))
    for last in range(len(cycle) - 1, 0, -1):
        other = int(coins.integers(last))
        cycle[last], cycle[other] = cycle[other], cycle[last]
    moved = {passage: passages[place] for passage, place in zip(passages, cycle, strict=True)}
    return {query: moved[passage] for query, passage in sources.items()}


KEPT = "kept_queries.txt"


def check_round_trip(
    model: DualEncoder | FrozenDualEncoder, released: ReleasedQueries, folder: Path, *, k: int, seed: int
) -> dict[str, Any]:
    """Measure the round trip of released queries with a model that saw neither them nor the private ones.

    ``folder/kept_queries.txt`` lists the ids of those whose source is among the first ``k`` of all passages.

    Returns:
        ``recall`` and ``control`` as [mean, low, high], ``k``, ``queries`` and ``kept``, as JSON values.
    """
    require_released(released, "check_round_trip")
    if model.pretrained is not None:  # a model without a trace of a run counts as public, as everywhere in training
        require_covered(model.pretrained, released, declared_public=True, knob="model.encoder")
    queries = {query.query_id: query.text for query in released}
    sources = {query.query_id: query.passage_id for query in released}
    names = list(released.passages)
    ranking = rank_embeddings(
        list(queries),
        model.encode_queries(list(queries.values())),
        names,
        model.encode_passages(list(released.passages.values())),
        k=k,
    )
    places = zip(queries, ranking.top.indices.tolist(), strict=True)
    ranked = {query: [names[i] for i in row if i >= 0] for query, row in places}
    found = hits(sources, ranked, k=k)
    wrong = hits(wrong_sources(sources, seed=seed), ranked, k=k)
    kept = [query for query, hit in found.items() if hit]
    (folder / KEPT).write_text("".join(f"{query}\n" for query in kept), encoding="utf-8")
    recall, control = (bootstrap_interval([float(hit) for hit in each.values()]) for each in (found, wrong))
    return {
        "recall": [recall.mean, recall.low, recall.high],
        "control": [control.mean, control.low, control.high],
        "k": k,
        "queries": len(found),
        "kept": len(kept),
    }


def check_made(
    model: FrozenDualEncoder, data: SyntheticDataModule, folder: Path, *, passages: Mapping[str, str], k: int, seed: int
) -> dict[str, Any]:
    """Measure the round trip of a whole data set among ``passages``, as `check_round_trip`, encoding each text once.

    Queries without a required card count as public.
    """
    data.setup("fit")
    with ProgressLine("encoding synthetic queries") as progress:
        model.prepare(data, progress=progress)
    released = load_released(str(data.folder), declared_public=not data.require_privacy_card)
    return check_round_trip(model, replace(released, passages=passages), folder, k=k, seed=seed)
