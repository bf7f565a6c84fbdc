"""n records, each a query and a passage, and the two functions that embed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lit_dpret.errors import DataError, UnsupportedModelError
from lit_dpret.matmul_precision import whole_products

Embed = Callable[[Any], Tensor]

#: What one row may give in two passes, relative to its length 1: the rounding of two kernels.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Side:
    """The queries, or the passages, of a batch.

    Args:
        rows: A tensor, or nested dictionaries of tensors, with the rows on the first axis.
        embed: Rows to embeddings, ``(rows, dim)``.
        count: How many rows there are.
    """

    rows: Any
    embed: Embed
    count: int

    def take(self, index: Tensor | slice) -> Any:
        """Some of the rows."""
        return tree_map(lambda leaf: leaf[index if isinstance(index, slice) else index.to(leaf.device)], self.rows)

    def embedded(self, index: Tensor | slice) -> Tensor:
        """The embeddings of some rows.

        Raises:
            UnsupportedModelError: What comes out is not one vector for each row.
        """
        expected = len(range(self.count)[index]) if isinstance(index, slice) else len(index)
        found = self.embed(self.take(index))
        if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != expected:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UnsupportedModelError(f"The embeddings of {expected} rows have shape {shape}; (rows, dim) expected.")
        if found.requires_grad and found.dtype not in TOLERANCE:
            raise _low_precision("What embeds the rows", found.dtype)
        return found

    def blocks(self, size: int) -> Iterator[slice]:
        """The rows in blocks of at most ``size``."""
        for start in range(0, self.count, size):
            yield slice(start, min(start + size, self.count))


@dataclass(frozen=True)
class PairBatch:
    """``n`` records; record i is (query i, passage i).

    Args:
        queries: A tensor, or nested dictionaries of tensors, with first axis n.
        passages: The same.
        embed_queries: Rows to embeddings ``(rows, dim)``, of length 1 for the cosine; differentiable, by way of
            submodules of what is trained, and does not enter autocast itself. An embedding is a function of its own
            row alone.
        embed_passages: The same function (a shared encoder), another one (two towers), or one without a gradient.
        n: How many records there are.

    Raises:
        DataError: Something in ``queries`` or ``passages`` does not have n rows.
    """

    queries: Any
    passages: Any
    embed_queries: Embed
    embed_passages: Embed
    n: int

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
        """Where the queries are."""
        leaf: Tensor = tree_leaves(self.queries)[0]
        return leaf.device

    @property
    def sides(self) -> tuple[Side, Side]:
        """The queries and the passages."""
        return (
            Side(self.queries, self.embed_queries, self.n),
            Side(self.passages, self.embed_passages, self.n),
        )


def embed_all(batch: PairBatch, *, rows_at_once: int) -> tuple[Tensor, Tensor]:
    """The embeddings of all queries and of all passages, (n, dim) each, without a graph.

    They come in the accumulator's precision: float64 where the model runs in it, else fp32. The caller's autocast
    is off, as in every pass over pairs.
    """
    with whole_digits(batch.device):
        queries, passages = (embed_side(side, rows_at_once=rows_at_once) for side in batch.sides)
    if queries.shape[1] != passages.shape[1]:
        raise UnsupportedModelError(
            f"Queries are embedded in {queries.shape[1]} dimensions and passages in {passages.shape[1]}."
        )
    return queries, passages


@torch.no_grad()
def embed_side(side: Side, *, rows_at_once: int) -> Tensor:
    """The embeddings of one side, without a graph, in fp32 or float64."""
    found = torch.cat([side.embedded(block) for block in side.blocks(rows_at_once)])
    return found if found.dtype == torch.float64 else found.float()


@contextmanager
def whole_digits(device: torch.device) -> Iterator[None]:
    """Passes in fp32 (float64 where the model is), outside the caller's autocast and without TF32.

    A pair's gradient is bounded by a norm from another pass than its own, so the two must agree. In bf16 they
    do not: gradients clipped to B came out up to a tenth longer where query and passage are alike.
    """
    with torch.autocast(device.type, enabled=False), whole_products():
        yield


def refuse_low_precision(name: str, parameter: Tensor) -> None:
    """Refuse a trained parameter of fewer digits than fp32.

    Raises:
        UnsupportedModelError: Names it.
    """
    if parameter.dtype not in TOLERANCE:
        raise _low_precision(f"Parameter {name}", parameter.dtype)


def _low_precision(what: str, dtype: torch.dtype) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} ({dtype}) has fewer digits than fp32: norms and gradient come from two passes, whose rounding errors "
        "would exceed the bound. Train in fp32."
    )


def refuse_other_function(first: Tensor, again: Tensor) -> None:
    """Refuse embeddings that differ between two passes over the same rows; broken rows say nothing.

    Raises:
        UnsupportedModelError: Something random is at work.
    """
    gap = (first - again.detach().to(first.dtype)).abs().amax(1)
    if bool((gap > TOLERANCE.get(again.dtype, LOW_PRECISION_TOLERANCE) * first.abs().amax(1).clamp(min=1e-3)).any()):
        raise UnsupportedModelError(
            "The same rows are embedded differently in two passes, so norms and gradients belong to two functions and "
            "no clipping bounds them. Switch off what is random (dropout) before the step."
        )


def refuse_randomness(module: nn.Module) -> None:
    """Refuse what makes two passes differ, or one row depend on others: active dropout, and BatchNorm in any mode.

    Raises:
        UnsupportedModelError: Names the layer.
    """
    for name, layer in module.named_modules():
        of = f"{name or 'the module'} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedModelError(
                f"{of} normalises with statistics of other records, so a pair's gradient is not a function of its own "
                "two records. Replace it by GroupNorm.",
                trap="T11",
            )
        rate = getattr(layer, "p", 0.0) if isinstance(layer, nn.modules.dropout._DropoutNd) else 0.0
        if isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)):
            rate = layer.dropout
        if layer.training and rate > 0:
            raise UnsupportedModelError(
                f"{of} drops at random with p={rate:g}, differently in the pass that finds the norms and in the one "
                "that finds the gradient. Put it in eval mode for the step, or set p to 0."
            )
