"""A retrieval measure as a ``torchmetrics.Metric``: for ``self.log``, a ``MetricCollection``, any number of ranks.

It is called like torchmetrics' own retrieval metrics, with ``indexes=``. But its values are trec_eval's. Passages that
were judged but not returned can be passed too, so that nDCG's ideal and recall's denominator use all judgements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.retrieval.base import RetrievalMetric as _RetrievalMetric
from torchmetrics.retrieval.base import _retrieval_aggregate
from torchmetrics.utilities.data import dim_zero_cat

from lit_dpret.errors import DataError
from lit_dpret.retrieval.metrics import Gains, Metric, Values


class RetrievalMetric(_RetrievalMetric):
    """One measure, such as ``ndcg@10``, as a mean over queries.

    Guarantees:
        - `compute` is the mean that `lit_dpret.retrieval.trec_runs.evaluate` gives for the same ranking and judgements.
        - Neither the order of batches nor the number of ranks matters; rows of a query may come in several batches.
        - Among passages with equal scores, the one passed first ranks first.

    Example:
        >>> metric = RetrievalMetric("mrr@10")
        >>> scores, grades = torch.tensor([0.9, 0.4, 0.7, -torch.inf]), torch.tensor([0, 1, 0, 1])
        >>> metric.update(scores, grades, indexes=torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()  # the second query's relevant passage was not returned
        tensor(0.2500, dtype=torch.float64)

    Args:
        name: A name that `Metric.parse` reads.
        kwargs: Arguments of torchmetrics: ``empty_target_action`` (``neg`` counts a query without a relevant passage
            as 0, like trec_eval), ``ignore_index``, ``aggregation``, and those of every ``torchmetrics.Metric``.
    """

    def __init__(self, name: str = "ndcg@10", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.measure = Metric.parse(name)
        self.allow_non_binary_target = True

    def update(self, preds: Tensor, target: Tensor, indexes: Tensor) -> None:
        """Add rows of any number of queries.

        All have the same shape: scores, ``-inf`` for a passage that was judged but not returned; grades, where 0 and
        below mean not relevant; and the query of each row, long.
        """
        if bool(preds.isnan().any()):
            raise DataError(f"{int(preds.isnan().sum())} of {preds.numel()} scores are NaN.")
        super().update(preds, target, indexes)

    def per_query(self) -> Values:
        """Return the value of every query so far, ordered by index; shape ``(queries,)``."""
        rows = (dim_zero_cat(state).cpu().numpy() for state in (self.preds, self.target, self.indexes))
        gains, ideal = _tables(*rows)
        values, empty = self.measure(gains, ideal), np.asarray(~(ideal > 0).any(axis=1))
        if self.empty_target_action == "error" and empty.any():
            raise ValueError(f"{int(empty.sum())} of {len(empty)} queries have no relevant passage.")
        if self.empty_target_action == "pos":
            values = np.where(empty, 1.0, values)
        return values[~empty] if self.empty_target_action == "skip" else values

    def _metric(self, preds: Tensor, target: Tensor) -> Tensor:
        """Return the value of a single query, as torchmetrics' loop over queries would ask for it."""
        tables = _tables(preds.numpy(), target.numpy(), np.zeros(len(preds), np.int64))
        return torch.from_numpy(self.measure(*tables))[0]

    def compute(self) -> Tensor:
        """Return the mean over queries (or ``aggregation``), a scalar in float64; 0 without queries."""
        values = self.per_query() if self.indexes else np.zeros(0)
        if not len(values):
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return _retrieval_aggregate(torch.from_numpy(values), self.aggregation).to(self.device)


def _tables(preds: np.ndarray, target: np.ndarray, indexes: np.ndarray) -> tuple[Gains, Gains]:
    """Return grades by rank and descending ideal grades, one row per query, no wider than necessary."""
    order = np.lexsort((-preds, indexes))  # stable, so that equal scores stay in the order given
    preds, target, indexes = preds[order], np.maximum(target[order], 0), indexes[order]
    first = np.flatnonzero(np.diff(indexes, prepend=indexes[0] - 1))
    counts = np.diff(np.append(first, len(indexes)))
    place = np.repeat(np.arange(len(first)), counts), np.arange(len(indexes)) - np.repeat(first, counts)
    gains = np.zeros((len(first), counts.max()), dtype=target.dtype)
    ideal, returned = np.zeros_like(gains), np.zeros(gains.shape, dtype=bool)
    returned[place] = preds > -np.inf
    gains[place] = np.where(preds > -np.inf, target, 0)
    ideal[place] = target
    ideal = -np.sort(-ideal, axis=1)
    return gains[:, : returned.sum(axis=1).max()], ideal[:, : (ideal > 0).sum(axis=1).max()]
