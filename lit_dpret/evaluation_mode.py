"""Set evaluation or training mode, and restore the previous one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module, *, train: bool = False) -> Iterator[None]:
    """Set evaluation mode, or training mode with ``train``, and restore the mode of each submodule."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(train)
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
