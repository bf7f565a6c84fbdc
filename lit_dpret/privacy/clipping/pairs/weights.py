r"""The second of two passes: one gradient in which every pair has its own weight.

The gradient that Logit-DP releases is :math:`\sum_{ij} \lambda_{ij} \nabla S_{ij}` with
:math:`\lambda_{ij} = \tau_{ij} \min(1, B / N_{ij})` (section 5.3 of Kong, Munoz Medina and Ribero,
"Differentially private optimization for non-decomposable objective functions", 2025). As
:math:`S = E F^\top`, it takes the cotangents :math:`\lambda F` at the queries' embeddings and
:math:`\lambda^\top E` at the passages', which are known before any graph is built: so the rows can go
through the encoder a few at a time (GradCache, Gao et al. 2021, 2101.06983).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.privacy.clipping.base import LEAST_FACTOR, accumulator_dtype
from lit_dpret.privacy.clipping.pairs.batch import (
    PairBatch,
    Side,
    embed_all,
    refuse_low_precision,
    refuse_other_function,
    whole_digits,
)


def clipped_pair_factors(norms: Tensor, max_logit_grad_norm: float) -> tuple[Tensor, int]:
    """What to multiply each pair's similarity gradient by, and how many pairs were dropped.

    Guarantees:
        - A factor times its norm is at most ``max_logit_grad_norm``, up to rounding; within the bound it is 1.
        - A norm that is not finite (a broken pair) gets factor zero, and is counted.

    Example:
        >>> clipped_pair_factors(torch.tensor([[4.0, 0.5], [torch.nan, 1.0]]), 1.0)
        (tensor([[0.2500, 1.0000],
                [0.0000, 1.0000]]), 1)

    Args:
        norms: ``(n, n)``, at least the norm of each pair's gradient. Private.
        max_logit_grad_norm: The bound B.

    Raises:
        ConfigurationError: The bound is not a positive, finite number.
    """
    if not 0 < max_logit_grad_norm < float("inf"):
        raise ConfigurationError(f"privacy.max_logit_grad_norm={max_logit_grad_norm} is not a positive, finite number.")
    # A number over a tensor may be rounded twice, and a norm that is the bound would then get a factor below 1.
    factors = torch.where(norms <= max_logit_grad_norm, 1.0, max_logit_grad_norm / norms)
    kept = norms.isfinite() & (factors >= LEAST_FACTOR)
    return torch.where(kept, factors, torch.zeros_like(factors)), int((~kept).sum())


def weighted_backward(
    batch: PairBatch, weights: Tensor, parameters: Mapping[str, nn.Parameter], *, rows_at_once: int
) -> dict[str, Tensor]:
    """The gradient of the weighted sum of all similarities, in memory of a few rows.

    Guarantees:
        - The result is the sum over i and j of ``weights[i, j]`` times the gradient of S_ij, whatever
          ``rows_at_once``.
        - A pair with a broken embedding, or with a weight that is not finite, contributes zero; a row whose
          pairs all weigh zero does not go through the backward pass at all, so its NaN stays with it.

    Args:
        batch: The records.
        weights: ``(n, n)``; queries are rows.
        parameters: What to differentiate by, by name.
        rows_at_once: Rows that go through the encoder together.

    Returns:
        One gradient for each name, in fp32 or in float64 where the parameter is. It is clipped only if the weights
        were; it is private until noise is added.

    Raises:
        DataError: ``weights`` is not ``(n, n)``.
        UnsupportedModelError: An embedding changes from one pass to the next, or has fewer digits than fp32.
    """
    if weights.shape != (batch.n, batch.n):
        raise DataError(f"The weights of {batch.n} records have shape {tuple(weights.shape)}; (n, n) expected.")
    sums = {
        name: torch.zeros_like(p, dtype=accumulator_dtype(p), requires_grad=False) for name, p in parameters.items()
    }
    if not batch.n:
        return sums
    for name, parameter in parameters.items():
        refuse_low_precision(name, parameter)
    with whole_digits(batch.device):
        embeddings = embed_all(batch, rows_at_once=rows_at_once)
        cotangents = _cotangents(weights.detach().to(embeddings[0]), *embeddings)
        for side, of_side, before in zip(batch.sides, cotangents, embeddings, strict=True):
            _add_side(side, of_side, before, parameters, sums, rows_at_once)
    return sums


def _cotangents(weights: Tensor, queries: Tensor, passages: Tensor) -> tuple[Tensor, Tensor]:
    """What the weighted sum of similarities sends back to each embedding; what is broken counts as zero."""
    whole = queries.isfinite().all(1), passages.isfinite().all(1)
    weights = torch.where(weights.isfinite() & whole[0][:, None] & whole[1], weights, 0)
    queries, passages = torch.where(whole[0][:, None], queries, 0), torch.where(whole[1][:, None], passages, 0)
    return weights @ passages, weights.T @ queries


def _add_side(
    side: Side,
    cotangents: Tensor,
    before: Tensor,
    parameters: Mapping[str, nn.Parameter],
    sums: dict[str, Tensor],
    rows_at_once: int,
) -> None:
    """Pull the cotangents of one side back to the parameters, some rows at a time."""
    for rows in cotangents.any(1).nonzero().flatten().split(rows_at_once):  # type: ignore[no-untyped-call]
        if not len(rows):  # every pair weighs zero: a softmax over one candidate, say
            return
        with torch.enable_grad():
            embedded = side.embedded(rows)
        refuse_other_function(before[rows], embedded)
        if not embedded.requires_grad:  # a frozen tower
            return
        found = torch.autograd.grad(
            embedded, list(parameters.values()), cotangents[rows].to(embedded.dtype), allow_unused=True
        )
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                sums[name] += gradient.to_dense() if gradient.is_sparse else gradient
