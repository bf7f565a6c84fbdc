"""XLA (for TPUs) evaluates lazily: when to evaluate, and how to read results.

Operations are recorded, and those recorded since the last *cut* are compiled as one graph and run. Reading a value
cuts, and a graph with another size or constant is compiled again, for seconds to minutes. So the private step reads no
value, has fixed shapes, and cuts after each physical batch, after the noise and after the update.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_lazy(device: torch.device) -> bool:
    """Return whether tensors on this device are lazy."""
    return device.type == "xla"


def sync_device(device: torch.device) -> None:
    """End a graph: start computing everything pending on an XLA device, without waiting."""
    if is_lazy(device):
        _torch_xla().sync()


def read(tensors: Sequence[Tensor]) -> list[Any]:
    """Return one-element tensors as plain numbers, in one transfer.

    On XLA, read after `sync_device`: other pending results would otherwise be computed twice.
    """
    if not tensors:
        return []
    if is_lazy(tensors[0].device):
        return [tensor.item() for tensor in fetch(tensors)]
    return list(torch.stack([tensor.detach().reshape(()) for tensor in tensors]).tolist())


def use_full_precision(device: torch.device) -> None:
    """Make XLA multiply float32 matrices in float32; a TPU uses bfloat16, too imprecise for norms."""
    if is_lazy(device):
        backends = importlib.import_module("torch_xla.backends")
        if backends.get_mat_mul_precision() != "highest":
            backends.set_mat_mul_precision("highest")


def fetch(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy XLA tensors to the host, in one transfer."""
    _torch_xla()
    return list(importlib.import_module("_XLAC")._xla_get_cpu_tensors([tensor.detach() for tensor in tensors]))


def seed(device: torch.device, number: int) -> None:
    """Seed the generator for an XLA device's dropout masks; ``torch.manual_seed`` does not."""
    if is_lazy(device):
        _torch_xla().manual_seed(number % 2**31, device)


def _torch_xla() -> Any:
    return importlib.import_module("torch_xla")
