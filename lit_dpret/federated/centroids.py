r"""Private centroids of embeddings, sent instead of the embeddings as requests and answers.

Lloyd's iterations with noised sums and counts (Blum et al., "Practical Privacy: the SuLQ Framework", PODS 2005, section
3.1; Su et al., "Differentially Private K-Means Clustering", CODASPY 2016): one centroid of fifty embeddings gets noise
once, where fifty embeddings would drown in noise. Everything but the noised tables is computed from released tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dpret.negatives.base import public_coins

# Takes a table and its sensitivity C, records the release, and returns the table with noise.
Noised = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, kw_only=True)
class CentroidPlan:
    """Public settings of private centroids."""

    count: int  # of centroids. About one for fifty rows; a constant if the number of rows is private.
    iterations: int = 3  # releases
    radius: float = 1.0  # the length to which rows are bounded; 1 for requests, whose length does not affect a ranking
    normalise: bool = True  # scale every row to length ``radius`` instead of clipping longer ones
    seed: int = 0  # of the initial directions; public

    @property
    def sensitivity(self) -> float:
        """C: how far emptying one unit moves the table (L2)."""
        return self.radius * math.sqrt(2.0)

    def start(self, dim: int) -> Tensor:
        """Draw directions of length ``radius`` that do not depend on the data, ``(count, dim)``."""
        drawn = public_coins(self.seed, "first centroids", self.count, dim).standard_normal((self.count, dim))
        return self.radius * F.normalize(torch.from_numpy(drawn), dim=-1)


def table_of(
    embeddings: Tensor, centroids: Tensor, plan: CentroidPlan, units: Sequence[Hashable] | None = None
) -> Tensor:
    """Return sums and weighted counts of the rows by nearest centroid, float64, ``(count, dim + 1)``, the count last.

    A row x is bounded to length ``radius`` and adds (x, radius) to its centroid's row. Only the first row of a unit
    counts, if it is finite.

    Guarantees:
        - Emptying, adding or removing the rows of one unit moves the table by at most ``plan.sensitivity`` (L2), and
          replacing them by at most twice that, whatever the rows are: a row that is not finite is ignored.

    Args:
        embeddings: Private rows, ``(rows, dim)``, each a function of its own text only (``apart`` of
            `TextEncoder.encode`).
        centroids: Already released, ``(count, dim)``.
        plan: The bounds.
        units: The unit of each row; None makes each row its own unit.
    """
    rows = embeddings.detach().double().cpu()
    kept = torch.isfinite(rows).all(dim=1) & _first_of_unit(units, len(rows))
    bounded = _bounded(rows[kept], plan)
    # By differences: the rounding of matrix products depends on the number of rows, and would move other units' rows.
    exact = "donot_use_mm_for_euclid_dist"
    nearest = torch.cdist(bounded, centroids.double(), compute_mode=exact).argmin(dim=1)
    table = torch.zeros(len(centroids), rows.shape[1] + 1, dtype=torch.float64)
    weight = torch.full((len(bounded), 1), plan.radius, dtype=torch.float64)
    return table.index_add_(0, nearest, torch.cat([bounded, weight], dim=1))


def dp_centroids(
    embeddings: Tensor, plan: CentroidPlan, noised: Noised, *, units: Sequence[Hashable] | None = None
) -> Tensor:
    """Return centroids of private rows, ``(count, dim)``, float32: a function of the results of ``noised`` only."""
    centroids = plan.start(embeddings.shape[1])
    for _ in range(plan.iterations):
        table = noised(table_of(embeddings, centroids, plan, units), plan.sensitivity)
        counts = table[:, -1:] / plan.radius
        moved = table[:, :-1] / counts.clamp(min=1.0)
        # A centroid with less than one row holds mostly noise: keep its direction.
        centroids = torch.where(counts >= 1.0, _shortened(moved, plan.radius), centroids)
    return centroids.float()


def _bounded(rows: Tensor, plan: CentroidPlan) -> Tensor:
    return plan.radius * F.normalize(rows, dim=-1) if plan.normalise else _shortened(rows, plan.radius)


def _shortened(rows: Tensor, radius: float) -> Tensor:
    lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    shortened: Tensor = rows * (radius / lengths.clamp(min=radius))
    return shortened


def _first_of_unit(units: Sequence[Hashable] | None, count: int) -> Tensor:
    """Mark the first row of every unit: counting more would cost noise for all rows."""
    first = torch.ones(count, dtype=torch.bool)
    if units is not None:
        seen: set[Hashable] = set()
        for place, unit in enumerate(units):
            first[place] = unit not in seen
            seen.add(unit)
    return first
