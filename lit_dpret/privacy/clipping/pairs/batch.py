"""A batch of n records (query and passage), their embeddings, and one gradient of all their similarities.

The cotangents at the embeddings are known before any graph is built, so rows go through the encoder a few at a time
(GradCache, Gao et al. 2021, 2101.06983); docs/derivations.md has the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lit_dpret.errors import DataError, UnsupportedModelError
from lit_dpret.matmul_precision import exact_float32
from lit_dpret.privacy.clipping.base import LEAST_FACTOR, accumulator_dtype
from lit_dpret.settings import require_number

Embed = Callable[[Any], Tensor]

#: How much one row's embedding may differ between two passes, relative to its length 1: the rounding of two kernels.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 5e-2
#: Room for rounding in a pair's gradient, as a share of it: the amount by which its norm may be too small
#: (`base.LOOSE`), plus 2.1e-3 in float32. There is no proof: the norm comes from another pass.
PAIR_ROUNDING = {torch.float64: 1e-9, torch.float32: 6.1e-3}


@dataclass(frozen=True)
class Side:
    """The queries, or the passages, of a batch."""

    rows: Any  # a tensor, or nested dictionaries of tensors, with the rows on the first axis
    embed: Embed  # rows to embeddings, ``(rows, dim)``
    count: int  # the number of rows

    def take(self, index: Tensor | slice) -> Any:
        return tree_map(lambda leaf: leaf[index if isinstance(index, slice) else index.to(leaf.device)], self.rows)

    def embedded(self, index: Tensor | slice) -> Tensor:
        """Return the embeddings of some rows; refuse a result that is not one vector per row."""
        expected = len(range(self.count)[index]) if isinstance(index, slice) else len(index)
        found = self.embed(self.take(index))
        if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != expected:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UnsupportedModelError(f"The embeddings of {expected} rows have shape {shape}; (rows, dim) expected.")
        if found.requires_grad and found.dtype not in TOLERANCE:
            raise _low_precision("What embeds the rows", found.dtype)
        return found

    def blocks(self, size: int) -> Iterator[slice]:
        for start in range(0, self.count, size):
            yield slice(start, min(start + size, self.count))


@dataclass(frozen=True)
class PairBatch:
    """A batch of ``n`` records; record i is (query i, passage i)."""

    queries: Any  # a tensor, or nested dictionaries of tensors, with first axis n
    passages: Any  # the same
    # Rows to embeddings ``(rows, dim)``, of length 1 for the cosine. The function is differentiable through submodules
    # of the trained module, and does not enter autocast itself. An embedding depends on its own row alone.
    embed_queries: Embed
    embed_passages: Embed  # the same function (a shared encoder), another one (two towers), or one without a gradient
    n: int  # the number of records

    def __post_init__(self) -> None:
        for name in ("queries", "passages"):
            for leaf in tree_leaves(getattr(self, name)):
                if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != self.n:
                    found = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                    raise DataError(
                        f"{name} of a pair batch holds {found}; a tensor with first axis n={self.n} expected."
                    )

    @property
    def device(self) -> torch.device:
        leaf: Tensor = tree_leaves(self.queries)[0]
        return leaf.device

    @property
    def sides(self) -> tuple[Side, Side]:
        return (Side(self.queries, self.embed_queries, self.n), Side(self.passages, self.embed_passages, self.n))


def embed_all(batch: PairBatch, *, rows_at_once: int) -> tuple[Tensor, Tensor]:
    """Return the embeddings of all queries and of all passages, (n, dim) each, without a graph."""
    # A pair's gradient is bounded by a norm from another pass, so the two passes must agree. In bf16 they do not:
    # gradients clipped to B came out up to a tenth longer where query and passage are alike.
    with exact_float32(batch.device):
        queries, passages = (embed_side(side, rows_at_once=rows_at_once) for side in batch.sides)
    if queries.shape[1] != passages.shape[1]:
        raise UnsupportedModelError(
            f"Queries are embedded in {queries.shape[1]} dimensions and passages in {passages.shape[1]}."
        )
    return queries, passages


@torch.no_grad()
def embed_side(side: Side, *, rows_at_once: int) -> Tensor:
    """Return the embeddings of one side, without a graph, in fp32 or float64."""
    found = torch.cat([side.embedded(block) for block in side.blocks(rows_at_once)])
    return found if found.dtype == torch.float64 else found.float()


def refuse_low_precision(name: str, parameter: Tensor) -> None:
    """Refuse a trained parameter with lower precision than fp32."""
    if parameter.dtype not in TOLERANCE:
        raise _low_precision(f"Parameter {name}", parameter.dtype)


def _low_precision(what: str, dtype: torch.dtype) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} ({dtype}) has lower precision than fp32: norms and gradient come from two passes, whose rounding "
        "errors would exceed the bound. Train in fp32 (trainer.precision=32-true)."
    )


def refuse_other_function(first: Tensor, again: Tensor) -> None:
    """Refuse embeddings that differ between two passes over the same rows; broken rows are ignored."""
    gap = (first - again.detach().to(first.dtype)).abs().amax(1)
    if bool((gap > TOLERANCE.get(again.dtype, LOW_PRECISION_TOLERANCE) * first.abs().amax(1).clamp(min=1e-3)).any()):
        raise UnsupportedModelError(
            "The same rows are embedded differently in two passes, so norms and gradients belong to two functions and "
            "no clipping bounds them. Switch off what is random (dropout) before the step."
        )


def refuse_randomness(module: nn.Module) -> None:
    """Refuse active dropout, which differs between passes."""
    for name, layer in module.named_modules():
        of = f"{name or 'the module'} ({type(layer).__name__})"
        rate = getattr(layer, "p", 0.0) if isinstance(layer, nn.modules.dropout._DropoutNd) else 0.0
        if isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)):
            rate = layer.dropout
        if layer.training and rate > 0:
            raise UnsupportedModelError(
                f"{of} drops at random with p={rate:g}, differently in the pass that finds the norms and in the one "
                "that finds the gradient. Put it in eval mode for the step, or set p to 0."
            )


def clipped_pair_factors(norms: Tensor, max_logit_grad_norm: float) -> tuple[Tensor, int]:
    """Return the factor that clips each pair's similarity gradient, and the number of pairs that were dropped.

    Guarantees:
        - A factor times its norm is at most ``max_logit_grad_norm``, up to rounding; within the bound it is 1.
        - A norm that is not finite (a broken pair) gets factor zero, and is counted.
    """
    require_number("privacy", {"max_logit_grad_norm": max_logit_grad_norm})
    # A number divided by a tensor may be rounded twice; a norm equal to the bound would then get a factor below 1.
    factors = torch.where(norms <= max_logit_grad_norm, 1.0, max_logit_grad_norm / norms)
    # A factor that float32 cannot represent would round to another one, and the bound would be lost.
    kept = norms.isfinite() & (factors >= LEAST_FACTOR)
    return torch.where(kept, factors, torch.zeros_like(factors)), int((~kept).sum())


def weighted_backward(
    batch: PairBatch, weights: Tensor, parameters: Mapping[str, nn.Parameter], *, rows_at_once: int
) -> dict[str, Tensor]:
    """Compute the gradient of the weighted sum of all similarities, with memory for a few rows.

    ``weights`` are ``(n, n)``, queries in rows.

    Guarantees:
        - The result is the sum over i and j of ``weights[i, j]`` times the gradient of S_ij, whatever ``rows_at_once``.
        - A pair with a broken embedding, or with a weight that is not finite, contributes zero. A row whose pairs all
          weigh zero does not go through the backward pass at all, so its NaN does not spread.
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
    with exact_float32(batch.device):
        embeddings = embed_all(batch, rows_at_once=rows_at_once)
        cotangents = _cotangents(weights.detach().to(embeddings[0]), *embeddings)
        for side, of_side, before in zip(batch.sides, cotangents, embeddings, strict=True):
            _add_side(side, of_side, before, parameters, sums, rows_at_once)
    return sums


def _cotangents(weights: Tensor, queries: Tensor, passages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the weighted sum of similarities by each embedding; broken entries count as zero."""
    # Zeroed before the product, in which one NaN would reach every row.
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
    # Rows that weigh nothing are left out: their backward pass could still bring NaN.
    for rows in cotangents.any(1).nonzero().flatten().split(rows_at_once):  # type: ignore[no-untyped-call]
        if not len(rows):  # every pair weighs zero, as for a softmax over one candidate
            return
        with torch.enable_grad():
            embedded = side.embedded(rows)
        # Norms and gradient come from two passes, which must compute the same function.
        refuse_other_function(before[rows], embedded)
        if not embedded.requires_grad:  # a frozen tower
            return
        found = torch.autograd.grad(
            embedded, list(parameters.values()), cotangents[rows].to(embedded.dtype), allow_unused=True
        )
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                sums[name] += gradient.to_dense() if gradient.is_sparse else gradient
