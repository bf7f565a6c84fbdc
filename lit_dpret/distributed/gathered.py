"""Rows of all processes, with a gradient that finds its way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_rows(own: Tensor) -> Tensor:
    """The rows of all processes of ``torch.distributed``, this one's own among them, in the order of ranks.

    Guarantees:
        - Processes may have different numbers of rows.
        - The gradient of a process's rows is the sum of what all processes' losses send to them. So where every
          process takes the loss of its own rows, the sum of the parameters' gradients over processes is that of
          one process with all rows.
        - Where nothing is distributed it returns ``own``.

    Args:
        own: Shape ``(rows, ...)``, the rest equal in all processes.

    Returns:
        Shape ``(rows of all, ...)``.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return own
    sizes = [torch.zeros(1, dtype=torch.long, device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=own.device))
    counts = [int(size) for size in sizes]
    found: Tensor = _AllRows.apply(own, counts)  # type: ignore[no-untyped-call]
    return found


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        longest = max(counts)
        padded = own.new_zeros(longest, *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        start = sum(ctx.counts[: dist.get_rank()])
        return total[start : start + ctx.counts[dist.get_rank()]], None
