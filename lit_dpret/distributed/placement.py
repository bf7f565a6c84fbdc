"""Where in a whole parameter the part lies that this process holds.

A strategy may cut parameters up over the ranks (``DTensor``, along the first axis). Noise belongs to coordinates, not
to ranks, so the code that adds it asks here which coordinates it holds. A plain tensor is whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_dpret.errors import UnsupportedModelError


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process may hold a part of it only."""
    return hasattr(tensor, "device_mesh")


def place_of(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the part of a tensor that this process holds, and its flat offset in the whole one.

    Example:
        >>> import torch
        >>> local, start = place_of(torch.ones(3))
        >>> local.shape, start
        (torch.Size([3]), 0)

    Raises:
        UnsupportedModelError: It is cut in another way than along its first axis over one row of ranks.
    """
    if not is_sharded(tensor):
        return tensor, 0
    cut: Any = tensor
    [placement] = cut.placements if len(cut.placements) == 1 else [None]
    if placement is None or not placement.is_shard(0):
        raise UnsupportedModelError(f"A tensor is cut as {cut.placements}, and noise has no place in it.")
    rows = -(-cut.shape[0] // cut.device_mesh.size())
    first = min(rows * cut.device_mesh.get_local_rank(), cut.shape[0])
    local: Tensor = cut.to_local()
    return local, first * (cut.numel() // max(cut.shape[0], 1))


def like(whole: Tensor, local: Tensor) -> Tensor:
    """``local`` as this process's part of a tensor that is cut as ``whole`` is."""
    if not is_sharded(whole):
        return local
    from torch.distributed.tensor import DTensor  # not for runs on one process

    cut: Any = whole
    return DTensor.from_local(
        local, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )
