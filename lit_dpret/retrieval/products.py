"""Matrix products that propose candidates, and bounds on their rounding errors.

Processors with bfloat16 instructions multiply it more than twice as fast as float32. With e the length of an
embedding's rounding loss, |q.p - q'.p'| <= e(q) |p'| + |q| e(p) by Cauchy and Schwarz; products are summed in float32.
Rounding scores to bfloat16 costs nothing: a score is compared with the rounded threshold.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_UNIT_ROUNDOFF, _LOW_ROUNDOFF = 2.0**-24, 2.0**-8
_LARGEST = 1e10  # for embeddings in bfloat16; above this, underflow was not examined
_LEAST_GAIN = 1.3
_PAYS_FROM = 16
_PROBE = 256, 256, 4096


class Products:
    """Queries (float64, ``(queries, dim)``), ready for matrix products in float32 or bfloat16.

    Guarantees:
        - A score before its last rounding, from the products of ``queries`` and the result of `passages`, differs
          from the float64 dot product by at most `slack`.
    """

    def __init__(self, queries: Tensor, dtype: torch.dtype) -> None:
        self.dtype, self.low = dtype, dtype == torch.bfloat16
        self.queries = queries.float().to(dtype)
        self._lengths = torch.linalg.vector_norm(queries, dim=1)
        self._errors = torch.linalg.vector_norm(queries - self.queries, dim=1) if self.low else None

    def passages(self, part: Tensor) -> tuple[Tensor, float]:
        """Return float32 passages in this precision, and the largest norm of their rounding errors."""
        if not self.low:
            return part, 0.0
        rounded = part.to(self.dtype)
        return rounded, float(torch.linalg.vector_norm(part - rounded, dim=1).max()) * 1.0001

    def loss(self, longest: float) -> float:
        """Return the most that rounding a passage of this length can lose."""
        return longest * _LOW_ROUNDOFF if self.low else 0.0

    def slack(self, longest: float, error: float) -> Tensor:
        """Return twice the possible error of float32 sums for each query, plus the loss from lower precision.

        ``longest`` is the length of the longest passage, ``error`` the most that one lost. Infinite where nothing
        is known.
        """
        relative = 4.0 * (self.queries.shape[1] + 4) * _UNIT_ROUNDOFF
        slack: Tensor = self._lengths.mul(relative * longest).add(1e-37)
        if self._errors is not None:
            lost = self._errors * (longest + error) + self._lengths * error
            slack = slack + lost * 1.0001 + 1e-24  # products below float32's normal range may become zero
            if longest > _LARGEST:
                return torch.full_like(slack, math.inf).float()
            slack[self._lengths > _LARGEST] = math.inf
        return slack.float()

    def at_most(self, scores: Tensor, beyond: float = math.inf) -> Tensor:
        """Return the largest score that rounds to one of these; with ``beyond=-math.inf`` the smallest."""
        if not self.low:
            return scores
        rounded = scores.to(self.dtype)
        return torch.nextafter(rounded, torch.full_like(rounded, beyond)).float()

    def candidates(self, scores: Tensor, passages: Tensor, some: slice, width: int, count: int) -> int:
        """Return how many candidates prove the ``width`` best of ``count`` passages, for nine in ten queries.

        ``scores`` are those of ``some`` queries and a sample, ``passages`` that sample in float32.
        """
        rank = max(1, round(width * len(passages) / count))
        last = scores.topk(rank, dim=1).values[:, -1]
        longest = float(torch.linalg.vector_norm(passages, dim=1).max())
        reach = self.slack(longest, self.passages(passages)[1])[some] + last.abs() * 2.0**-7
        near = (scores >= (last - reach)[:, None]).sum(dim=1) / rank
        return math.ceil(width * float(near.quantile(0.9)))


@dataclass(frozen=True)
class Attempt:
    """One way to search a group of passages."""

    products: Products
    width: int  # candidates kept for each query
    guess: Tensor | None  # for each query, a score below which nothing is kept; None keeps everything at first


def bfloat16_pays(device: torch.device, queries: int) -> bool:
    """Return whether bfloat16 products are worthwhile: on a CPU, if a measurement finds them faster."""
    return device.type == "cpu" and queries >= _PAYS_FROM and _probe()


@cache
def _probe() -> bool:
    """Return whether test products in bfloat16 are clearly faster, by a library that sums in float32."""
    rows, dim, columns = _PROBE
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(rows, dim, generator=generator), torch.randn(columns, dim, generator=generator)
    low_left, low_right = left.bfloat16(), right.bfloat16()
    exact = low_left.double() @ low_right.double().T
    sizes = torch.linalg.vector_norm(left, dim=1)[:, None] * torch.linalg.vector_norm(right, dim=1)
    bound = 2.0**-8 * exact.abs() + 8 * (dim + 4) * _UNIT_ROUNDOFF * sizes
    for some in (rows, _PAYS_FROM):  # a library may multiply flat matrices differently
        if bool(((low_left[:some] @ low_right.T).double() - exact[:some]).abs().gt(bound[:some]).any()):
            return False
    seconds = {
        name: min(_seconds(*sides) for _ in range(3))
        for name, sides in (("low", (low_left, low_right)), ("float32", (left, right)))
    }
    return seconds["low"] * _LEAST_GAIN < seconds["float32"]


def _seconds(left: Tensor, right: Tensor) -> float:
    start = time.perf_counter()
    torch.mm(left, right.T)
    return time.perf_counter() - start


def prepared(embeddings: Tensor, cosine: bool) -> Tensor:
    """Return embeddings whose dot product is the similarity."""
    return F.normalize(embeddings, dim=-1) if cosine else embeddings
