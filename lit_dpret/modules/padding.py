"""Rows of token ids as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """The rows filled up at the end, shape ``(rows, longest)``, int64.

    Example:
        >>> padded([[5, 6], [7]], 0).tolist()
        [[5, 6], [7, 0]]
    """
    width = max(len(ids) for ids in rows)
    return torch.tensor([[*ids, *[filler] * (width - len(ids))] for ids in rows], dtype=torch.long)


def placed(tensor: Tensor, places: Sequence[int], shape: tuple[int, int], filler: int) -> Tensor:
    """The rows of ``tensor`` at ``places`` of a tensor of that shape, which is otherwise full of ``filler``.

    Example:
        >>> placed(torch.tensor([[5, 6], [7, 0]]), [0, 2], (3, 3), 0).tolist()
        [[5, 6, 0], [0, 0, 0], [7, 0, 0]]
    """
    found = tensor.new_full(shape, filler)
    found[list(places), : tensor.shape[1]] = tensor
    return found
