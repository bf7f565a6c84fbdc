"""The measures of a run as a ``torchmetrics.Metric``: sums over queries, so that processes can add theirs up.

torchmetrics' own retrieval metrics see only the passages that were returned, and so take nDCG's ideal and recall's
denominator from those. This one takes them from the judgements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric as TorchMetric

from lit_dpret.errors import ConfigurationError
from lit_dpret.retrieval.metrics import Metric, Qrels
from lit_dpret.retrieval.runs import DEFAULT_METRICS, Ranking, Run, evaluate


class RetrievalMetrics(TorchMetric):
    """Means over all queries that `update` has seen, in every process.

    Guarantees:
        - ``compute`` equals `evaluate` on all runs and judgements together, up to the rounding of float64.
        - Under DDP the sums and the number of queries are added over processes. A query that two processes were
          given counts twice, so give each its own part of the judgements, and no sampler that pads.

    Example:
        >>> metric = RetrievalMetrics(metrics=["mrr@10"])
        >>> metric.update({"q1": {"a": 2.0, "b": 1.0}}, {"q1": {"b": 1}})
        >>> metric.compute()
        {'mrr@10': tensor(0.5000, dtype=torch.float64)}

    Args:
        metrics: What to measure, as ``ndcg@10``.
        kwargs: Of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: A metric is unknown, or there is none.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    totals: Tensor
    queries: Tensor

    def __init__(self, *, metrics: Sequence[str] = DEFAULT_METRICS, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.names = tuple(dict.fromkeys(str(Metric.parse(name)) for name in metrics))
        if not self.names:
            raise ConfigurationError("There is no metric to measure; name at least one, as ndcg@10.")
        self.add_state("totals", torch.zeros(len(self.names), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("queries", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, run: Run | Ranking, qrels: Qrels) -> None:
        """Add the queries of ``qrels``; those that ``run`` does not answer count as 0.

        Raises:
            ConfigurationError: As `evaluate`.
            DataError: As `evaluate`.
        """
        found = evaluate(run, qrels, self.names, resamples=1)
        sums = [float(found.per_query[name].sum()) for name in self.names]
        self.totals += torch.tensor(sums, dtype=torch.float64, device=self.totals.device)
        self.queries += len(found.query_ids)

    def compute(self) -> dict[str, Tensor]:
        """The mean of every metric by name; NaN where no query was seen."""
        means = self.totals / self.queries
        return dict(zip(self.names, means.unbind(), strict=True))
