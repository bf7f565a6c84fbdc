"""A loss against a large table, a few rows at a time.

The table of logits, rows x pool, is the largest thing in a step by far: 2,048 queries against 27,413
passages are 56 million numbers, several times over. Where a row's loss depends on that row's
embedding alone, each part of the table can be made, turned into losses and their gradient, and
forgotten, so that it is computed once and never kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RowsLoss = Callable[[slice, Tensor], Tensor]


def row_by_row(loss: RowsLoss, embeddings: Tensor, *, rows_at_once: int) -> Tensor:
    """The losses of all rows, differentiable once with respect to ``embeddings``.

    Guarantees:
        - Losses and gradients are those of ``loss`` on all rows at once.
        - Row i of the gradient is the gradient of row i's loss. A ``loss`` that couples rows is
          therefore not for this function: its gradient would be wrong.

    Args:
        loss: Given a slice of rows and their embeddings, ``(part, dim)``; returns ``(part,)``.
        embeddings: Shape ``(rows, dim)``.
        rows_at_once: How many rows ``loss`` is given; at least one.

    Returns:
        Shape ``(rows,)``.
    """
    losses: Tensor = _RowByRow.apply(embeddings, loss, max(1, rows_at_once))  # type: ignore[no-untyped-call]
    return losses


def marked(places: Tensor, width: int) -> Tensor:
    """Booleans ``(rows, width)``: True at each row's ``places``; -1 marks nothing.

    Example:
        >>> marked(torch.tensor([[2, -1], [-1, -1]]), 3)
        tensor([[False, False,  True],
                [False, False, False]])
    """
    marks = torch.zeros(len(places), width + 1, dtype=torch.bool, device=places.device)
    marks.scatter_(1, torch.where(places < 0, width, places), True)
    return marks[:, :width]


class _RowByRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, loss: RowsLoss, rows_at_once: int) -> Tensor:
        wanted = bool(ctx.needs_input_grad[0])
        losses, grads = [], []
        for start in range(0, len(embeddings), rows_at_once):
            part = slice(start, start + rows_at_once)
            with torch.set_grad_enabled(wanted):
                leaf = embeddings[part].detach().requires_grad_(wanted)
                found = loss(part, leaf)
            losses.append(found.detach())
            if wanted:
                grads.append(torch.autograd.grad(found, leaf, torch.ones_like(found))[0])
        if grads:
            ctx.save_for_backward(torch.cat(grads))
        return torch.cat(losses)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (saved,) = ctx.saved_tensors
        return grad.to(saved.dtype).unsqueeze(1) * saved, None, None
