"""Which synthetic queries find the passage that they were made from: a number for the report, and a filter.

A retriever that learns from queries which do not belong to their passages learns noise. Keeping those
that find their source among the first k results of a public retriever (Dai et al., "Promptagator", 2022,
section 3.2) looks at nothing private, so the claim of the queries stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_dpret.errors import DataError
from lit_dpret.modules import FrozenDualEncoder
from lit_dpret.report.html import RoundTrip
from lit_dpret.retrieval.statistics import Interval, bootstrap_interval
from lit_dpret.synthesis.filters import ReleasedQueries
from lit_dpret.synthesis.filters.released import require_covered, require_released
from lit_dpret.synthesis.round_trip import hits, wrong_sources
from lit_dpret.tasks.scoring import rank_embeddings

KEPT = "kept_queries.txt"


def check_round_trip(
    model: FrozenDualEncoder,
    released: ReleasedQueries,
    folder: Path,
    *,
    k: int,
    seed: int,
) -> dict[str, Any]:
    """Measure the round trip of released queries; ``folder/kept_queries.txt`` lists the ids of those that pass.

    Args:
        model: A retriever that saw neither the private nor the synthetic queries.
        released: Synthetic queries with their sources; all their passages are searched.
        folder: Where the list is written.
        k: How far down the list a source may stand.
        seed: Of the control, in which every query is held against a wrong passage.

    Returns:
        ``recall`` and ``control`` as [mean, low, high], ``k``, ``queries`` and ``kept``, as JSON values.

    Raises:
        DataError: No query passes.
        PrivateDataError: ``released`` is something else, or the model was trained on other private data.
    """
    require_released(released, "check_round_trip")
    if model.pretrained is not None:  # without a card it is public, as everywhere in training
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
    if not kept:
        raise DataError(
            f"None of {len(found)} synthetic queries finds its own passage among the first {k} results: they say "
            "nothing about their passages. Train the generator longer, or set task.round_trip_filter=null."
        )
    (folder / KEPT).write_text("".join(f"{query}\n" for query in kept), encoding="utf-8")
    recall, control = (bootstrap_interval([float(hit) for hit in each.values()]) for each in (found, wrong))
    return {
        "recall": [recall.mean, recall.low, recall.high],
        "control": [control.mean, control.low, control.high],
        "k": k,
        "queries": len(found),
        "kept": len(kept),
    }


def as_round_trip(result: Mapping[str, Any]) -> RoundTrip:
    """What `check_round_trip` returned, for the report."""
    return RoundTrip(
        recall=Interval(*result["recall"]),
        control=Interval(*result["control"]),
        k=result["k"],
        queries=result["queries"],
        retriever="the zero-shot encoder",
    )
