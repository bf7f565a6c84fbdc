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
