"""Checksums of tensors, which reveal writes that PyTorch does not count."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from lit_dpret.distributed.xla import cut, fetch, is_lazy

#: Elements of a larger tensor that are summed at a time.
_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Of each tensor a number that changes with any single value and with almost any order of the values.

    A tensor without memory of its own counts as 0.
    """
    found = list(tensors)
    if lazy := [tensor for tensor in found if is_lazy(tensor.device)]:
        cut(lazy[0].device)
        fetched = iter(fetch(lazy))
        found = [next(fetched) if is_lazy(tensor.device) else tensor for tensor in found]
    sums = [checksum(tensor).cpu() if has_memory(tensor) else torch.tensor(0) for tensor in found]
    return torch.stack(sums).tolist() if sums else []


def has_memory(tensor: Tensor) -> bool:
    """Whether the values lie in one piece of memory of their own."""
    return tensor.layout == torch.strided and not tensor.is_meta and not is_lazy(tensor.device)


def bits_of(tensor: Tensor) -> Tensor:
    """The values as integers, flat, so that a NaN equals itself."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])


def checksum(tensor: Tensor) -> Tensor:
    """A number, modulo 2^64, that changes with any single value and with almost any order of the values."""
    bits = bits_of(tensor)
    if len(bits) * bits.element_size() % 8 == 0 and bits.storage_offset() * bits.element_size() % 8 == 0:
        bits = bits.view(torch.int64)  # fewer to multiply
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(bits, _CHUNK):
        weights = _weights(tensor.device)[: len(part)]
        # On a CPU in one pass; elsewhere there is none for integers.
        product = torch.dot(part.long(), weights) if part.device.type == "cpu" else (part * weights).sum()
        total = total * 31 + product
    return total


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Fixed odd numbers, from a generator of their own: the model's random streams stay as they are."""
    drawn = torch.randint(-(1 << 62), 1 << 62, (_CHUNK,), generator=torch.Generator().manual_seed(0))
    return (drawn * 2 + 1).to(device)
