"""Fingerprints by which an interrupted run knows that it repeats a step exactly.

Re-executing a step with the same noise on a different sum would let anyone subtract the two
results and read the difference without noise. A step may therefore be repeated under its old noise
key only if the model and optimizer before it, and the clipped sum in it, are bit for bit what they
were. The state before a step is a function of released updates and may be hashed openly; the
clipped sum is private and gets a keyed tag instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from lit_dpret.privacy.noise import KeyedStream


def _bytes(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    for name, tensor in tensors:
        yield f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode()
        flat = tensor.detach().cpu().to_dense().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data if flat.numel() else b""


def state_hash(module: nn.Module, optimizer: torch.optim.Optimizer, *, summed: tuple[int, int] = (1, 1)) -> str:
    """SHA-256 of every parameter, buffer and optimizer tensor, and of what decides how a sum is rounded.

    What else ``get_extra_state`` returns is left out: where it changes a step, the tag of the sum is another.

    Args:
        module: Whose parameters and buffers count.
        optimizer: Whose state counts.
        summed: How many units are summed at once at most, and on how many ranks.
    """
    digest = hashlib.sha256("{} units, {} ranks".format(*summed).encode())
    state_dict = sorted(module.state_dict().items())
    tensors: list[tuple[str, Tensor]] = [(name, value) for name, value in state_dict if isinstance(value, Tensor)]
    for group, content in enumerate(optimizer.state_dict()["state"].items()):
        index, state = content
        for key in sorted(state):
            value = state[key]
            tensors.append((f"optimizer.{group}.{index}.{key}", torch.as_tensor(value)))
    for chunk in _bytes(tensors):
        digest.update(chunk)
    return digest.hexdigest()


def update_hash(gradients: dict[str, Tensor]) -> str:
    """SHA-256 of a noised update; the update is released, so this may be read by anyone."""
    digest = hashlib.sha256()
    for chunk in _bytes(sorted(gradients.items())):
        digest.update(chunk)
    return digest.hexdigest()


def sum_tag(stream: KeyedStream, sums: dict[str, Tensor]) -> str:
    """A keyed tag of the clipped sum; without the secret it says nothing about the sum."""
    return stream.tag("clipped-sum", *_bytes(sorted(sums.items())))


def sample_tag(stream: KeyedStream, sums: dict[str, Tensor], *, of_each: int = 8) -> str:
    """A keyed tag of some values of every clipped sum: cheap, and of two different sums almost never the same."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for _, total in sorted(sums.items()):
        flat = total.detach().reshape(-1)
        kinds.setdefault((total.device, total.dtype), []).append(flat[:: max(1, -(-flat.numel() // of_each))])
    return stream.tag("sample-of-sum", *_bytes([(str(n), torch.cat(found)) for n, found in enumerate(kinds.values())]))
