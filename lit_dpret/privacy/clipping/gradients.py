"""From a recorded call, and the gradient that arrived at it, to what its parameters contribute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dpret.privacy.clipping.contributions import Contribution, Dense, Lookup, Outer
from lit_dpret.privacy.clipping.convolution import Convolution, Geometry
from lit_dpret.privacy.clipping.recorder import Use
from lit_dpret.privacy.clipping.rules import CONVOLUTIONS

#: How a folded batch axis of rows * k runs: all k of the first row first, or one of each row first.
Layout = Literal["row_by_row", "turn_by_turn"]


def fold(tensor: Tensor, rows: int, layout: Layout) -> Tensor:
    """(rows * k, ...) as (rows, k, ...)."""
    if layout == "row_by_row":
        return tensor.reshape(rows, -1, *tensor.shape[1:])
    return tensor.reshape(-1, rows, *tensor.shape[1:]).transpose(0, 1)


def contributions_of(
    use: Use, g: Tensor, rows: int, layout: Layout, dtype: torch.dtype, *, audited: bool = False
) -> Iterator[tuple[str, Contribution]]:
    """What one call adds to the gradients of its parameters, by their own names in the module.

    Args:
        use: The call.
        g: Gradient of the summed loss at its output; for a scale, at its batch-expanded weight.
        rows: Rows in the batch; the first axis of ``g`` is a multiple of it.
        layout: How that axis runs.
        dtype: fp32, or float64 where the parameters are.
        audited: Whether to tell what is summed up here by its size as well.
    """
    module, trained = use.site.module, use.aliases

    def dense(terms: Tensor, summed: Callable[[Tensor], Tensor]) -> Dense:
        value = summed(terms)
        if not audited:
            return Dense(value)
        return Dense(value, summed(terms.abs()), max(1, terms.numel() // max(1, value.numel())))

    if use.function is not None:
        own = {local: module.get_parameter(local) for local in use.site.parameters}
        for local, gradient in use.function.gradients(g, use.output, own).items():
            yield local, dense(fold(gradient, rows, layout), lambda terms: terms.sum(1, dtype=dtype))
        return
    if use.site.kind in ("linear", "transposed_linear"):
        folded = fold(g, rows, layout).reshape(rows, -1, g.shape[-1])
        if "weight" in trained:
            x = _saved(use)
            inputs = fold(x, rows, layout).reshape(rows, -1, x.shape[-1])
            yield "weight", Outer(inputs, folded) if use.site.kind == "linear" else Outer(folded, inputs)
        if "bias" in trained:
            yield "bias", dense(folded, lambda terms: terms.sum(1, dtype=dtype))
    elif isinstance(module, CONVOLUTIONS):
        g = fold(g, rows, layout).flatten(3).movedim(2, -1).reshape(rows, -1, g.shape[1])
        if "weight" in trained:
            yield "weight", Convolution(fold(_saved(use), rows, layout), g, Geometry.of(module))
        if "bias" in trained:
            yield "bias", dense(g, lambda terms: terms.sum(1, dtype=dtype))
    elif isinstance(module, nn.GroupNorm):
        g = g.to(dtype)
        if "weight" in trained:
            normal = F.group_norm(_saved(use).to(dtype), module.num_groups, None, None, module.eps)
            yield "weight", dense(normal.mul_(g), lambda terms: _by_channel(terms, rows, layout))
        if "bias" in trained:
            yield "bias", dense(g, lambda terms: _by_channel(terms, rows, layout))
    elif use.site.kind == "embedding" and isinstance(module, nn.Embedding):
        ids = _saved(use)
        if module.padding_idx is not None:
            g = g.masked_fill((ids == module.padding_idx)[..., None], 0)
        folded = fold(g, rows, layout).reshape(rows, -1, g.shape[-1])
        yield "weight", Lookup(fold(ids, rows, layout).reshape(rows, -1), folded)
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        shape = tuple(module.normalized_shape)
        g = g.to(dtype)

        def by_place(terms: Tensor) -> Tensor:
            return fold(terms, rows, layout).reshape(rows, -1, *shape).sum(1)

        if "weight" in trained:
            x = _saved(use)
            if isinstance(module, nn.LayerNorm):
                normal = F.layer_norm(x.to(dtype), shape, None, None, module.eps)
            else:
                eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
                normal = F.rms_norm(x.to(dtype), shape, None, eps)
            yield "weight", dense(normal.mul_(g), by_place)
        if "bias" in trained:
            yield "bias", dense(g, by_place)
    elif use.site.kind == "scale":
        folded = fold(g, rows, layout).reshape(rows, -1, g.shape[-1])
        yield "weight", dense(folded, lambda terms: terms.sum(1, dtype=dtype))
    else:
        buckets, entries = _saved(use), len(trained["weight"])
        scores = fold(g, rows, layout)
        yield "weight", dense(scores, lambda terms: _bucketed(terms.sum(1, dtype=dtype), buckets, entries))


def _saved(use: Use) -> Tensor:
    if use.saved is None:
        raise RuntimeError(f"No input was recorded for {use.site.name}.")  # a rule and its recorder disagree
    return use.saved


def _by_channel(tensor: Tensor, rows: int, layout: Layout) -> Tensor:
    """(rows * k, channels, *space) summed to (rows, channels)."""
    return fold(tensor, rows, layout).reshape(rows, -1, tensor.shape[1], tensor[0, 0].numel()).sum((1, 3))


def _bucketed(g: Tensor, buckets: Tensor, entries: int) -> Tensor:
    """Sum (rows, heads, queries, keys) over the places of each bucket: (rows, entries, heads)."""
    rows, heads = g.shape[:2]
    flat = g.reshape(rows * heads, -1)
    total = torch.zeros(rows * heads, entries, dtype=g.dtype, device=g.device)
    places, each = buckets.flatten(), torch.arange(entries, device=g.device)
    step = max(1, (1 << 20) // entries)
    for start in range(0, len(places), step):  # a product with indicators: faster than scattering, same sums
        hot = (places[start : start + step, None] == each).to(g.dtype)
        total.addmm_(flat[:, start : start + step], hot)
    return total.view(rows, heads, entries).transpose(1, 2)
