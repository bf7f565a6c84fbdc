"""Ranking measures for all queries at once, as trec_eval defines them.

A ranking is a table of *gains*: the grade at each rank, 0 for an unjudged passage. The *ideal* gains are those of the
best possible ranking. A query without hits or without relevant passages counts as 0, as ``trec_eval -c`` averages.
Recall@10 is a hit rate in the synthetic-query paper (Carranza et al., section 6.1): here ``success@k``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from lit_dpret.errors import ConfigurationError, DataError

Qrels = Mapping[str, Mapping[str, int]]
"""Relevance judgements: query id -> passage id -> grade; a grade above 0 is relevant."""

MISSING = -1
"""The index that fills a row of a ranking when there are fewer than k passages to return."""

Gains = NDArray[np.int64]
Values = NDArray[np.float64]
MetricKind = Literal["ndcg", "recall", "success", "mrr", "map", "precision"]

_ALIASES = {"hit": "success", "p": "precision"}


@dataclass(frozen=True)
class Metric:
    """A measure and its rank cut-off, written ``ndcg@10``."""

    kind: MetricKind
    cutoff: int

    @classmethod
    def parse(cls, name: str) -> Metric:
        """Read ``ndcg@k``, ``recall@k``, ``success@k``, ``mrr@k``, ``map@k`` or ``precision@k``, in any letter case.

        ``hit@k`` is read as ``success@k`` and ``p@k`` as ``precision@k``.
        """
        match = re.fullmatch(r"([a-z]+)@([1-9][0-9]*)", str(name).strip().lower())
        kind = None if match is None else _ALIASES.get(match[1], match[1])
        if match is None or kind not in get_args(MetricKind):
            known = ", ".join(f"{known}@k" for known in get_args(MetricKind))
            raise ConfigurationError(f"metrics=[{name}]: {name!r} is not one of {known} with k at least 1.")
        return cls(cast(MetricKind, kind), int(match[2]))

    @property
    def shown(self) -> str:
        """The name for tables: ``nDCG@10``."""
        return f"{_MEASURES[self.kind][0]}@{self.cutoff}"

    @property
    def definition(self) -> str:
        """The definition in one phrase, to print in tables with the number."""
        return _MEASURES[self.kind][2].format(k=self.cutoff)

    def __str__(self) -> str:
        return f"{self.kind}@{self.cutoff}"

    def __call__(self, gains: Gains, ideal: Gains) -> Values:
        """Return the value of every query; see the function of the same name."""
        return _MEASURES[self.kind][1](gains, ideal, self.cutoff)


# Every measure takes the same three arguments and returns one value per query, shape ``(queries,)``, in [0, 1]:
#   gains: grades by rank, shape ``(queries, depth)``;
#   ideal: all positive grades of each query, descending, padded with 0, shape ``(queries, most)``;
#   k: the last rank that counts.


def ndcg(gains: Gains, ideal: Gains, k: int) -> Values:
    """Return the normalised discounted cumulative gain with linear gains: trec_eval's ``ndcg_cut``."""
    best = _discounted(ideal, k)
    value: Values = np.divide(_discounted(gains, k), best, out=np.zeros(len(best)), where=best > 0)
    return value


def recall(gains: Gains, ideal: Gains, k: int) -> Values:
    """Return the share found of all relevant passages, even if more than ``k``: trec_eval's ``recall_k``."""
    return _over_relevant((gains[:, :k] > 0).sum(axis=1).astype(np.float64), ideal)


def mrr(gains: Gains, ideal: Gains, k: int) -> Values:
    """Return trec_eval's ``recip_rank`` of the run cut at ``k``; trec_eval itself has no cut."""
    hit = gains[:, :k] > 0
    if not hit.shape[1]:
        return np.zeros(len(gains))
    return np.where(hit.any(axis=1), 1.0 / (hit.argmax(axis=1) + 1.0), 0.0)


def success(gains: Gains, ideal: Gains, k: int) -> Values:
    """Return 1 if any of the first ``k`` passages is relevant, otherwise 0: trec_eval's ``success_k``."""
    return np.where((gains[:, :k] > 0).any(axis=1), 1.0, 0.0)


def average_precision(gains: Gains, ideal: Gains, k: int) -> Values:
    """Return trec_eval's ``map_cut_k``; its mean over queries is MAP."""
    hit = gains[:, :k] > 0
    at_rank = hit.cumsum(axis=1) / np.arange(1, hit.shape[1] + 1)
    return _over_relevant(np.where(hit, at_rank, 0.0).sum(axis=1), ideal)


def precision(gains: Gains, ideal: Gains, k: int) -> Values:
    """Return the relevant passages among the first ``k`` over ``k``, even if fewer were returned: ``P_k``."""
    share: Values = (gains[:, :k] > 0).sum(axis=1) / float(k)
    return share


#: For each kind: its name in tables, its function, and its definition in one phrase.
_MEASURES: dict[MetricKind, tuple[str, Callable[[Gains, Gains, int], Values], str]] = {
    "ndcg": (
        "nDCG", ndcg, "discounted gain (grade / log2(rank + 1)) of the first {k} over that of the best possible {k}",
    ),
    "recall": ("Recall", recall, "share of all relevant passages that are among the first {k}"),
    "success": (
        "Success", success,
        "share of queries with a relevant passage among the first {k}; what the papers describe as recall",
    ),
    "mrr": ("MRR", mrr, "one over the rank of the first relevant passage, 0 if it comes after rank {k}"),
    "map": (
        "MAP", average_precision,
        "precision at the rank of each relevant passage among the first {k}, summed, over all relevant passages",
    ),
    "precision": (
        "Precision", precision,
        "number of relevant passages among the first {k}, divided by {k} even if fewer were returned",
    ),
}  # fmt: skip


def _over_relevant(total: Values, ideal: Gains) -> Values:
    relevant = (ideal > 0).sum(axis=1).astype(np.float64)
    share: Values = np.divide(total, relevant, out=np.zeros(len(total)), where=relevant > 0)
    return share


def _discounted(gains: Gains, k: int) -> Values:
    top = gains[:, :k].astype(np.float64)
    total: Values = (top / np.log2(np.arange(2, top.shape[1] + 2))).sum(axis=1)
    return total


def ideal_gains(query_ids: Sequence[str], qrels: Qrels) -> Gains:
    """Return each query's positive grades, descending, padded with 0: shape ``(queries, most)``."""
    grades = [sorted((int(g) for g in qrels.get(name, {}).values() if g > 0), reverse=True) for name in query_ids]
    table = np.zeros((len(grades), max((len(row) for row in grades), default=0)), dtype=np.int64)
    for row, found in enumerate(grades):
        table[row, : len(found)] = found
    return table


def gains_of_indices(
    indices: NDArray[np.int64], query_ids: Sequence[str], passage_ids: Sequence[str], qrels: Qrels
) -> Gains:
    """Return the grades at positions ``(queries, depth)``, best first, negative for none, in the same shape.

    Negative grades of ``qrels`` count as 0, as in trec_eval.
    """
    if indices.ndim != 2 or len(indices) != len(query_ids):
        raise DataError(f"A ranking of shape {indices.shape} does not rank passages for {len(query_ids)} queries.")
    if indices.size and int(indices.max()) >= len(passage_ids):  # it would be read as a passage of the next query
        raise DataError(f"A ranking has the index {int(indices.max())}, but only {len(passage_ids)} passages.")
    position = {name: place for place, name in enumerate(passage_ids)}
    width = max(1, len(passage_ids))
    judged = [
        (row * width + position[passage], int(grade))
        for row, query in enumerate(query_ids)
        for passage, grade in qrels.get(query, {}).items()
        if grade > 0 and passage in position
    ]
    if not judged or not indices.size:
        return np.zeros(indices.shape, dtype=np.int64)
    keys, grades = np.array(sorted(judged), dtype=np.int64).T
    asked = np.arange(len(indices), dtype=np.int64)[:, None] * width + indices
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where((indices >= 0) & (keys[place] == asked), grades[place], 0)


def gains_of_ids(ranked: Sequence[Sequence[str]], query_ids: Sequence[str], qrels: Qrels) -> Gains:
    """Return the grades of lists of passage ids, padded with 0, shape ``(queries, longest list)``.

    Negative grades count as 0, as in trec_eval.
    """
    table = np.zeros((len(query_ids), max((len(row) for row in ranked), default=0)), dtype=np.int64)
    for row, (query, passages) in enumerate(zip(query_ids, ranked, strict=True)):
        judged = qrels.get(query, {})
        if judged:
            table[row, : len(passages)] = [max(0, int(judged.get(passage, 0))) for passage in passages]
    return table
