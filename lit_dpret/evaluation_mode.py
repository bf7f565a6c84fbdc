"""Set evaluation or training mode, and go back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module, *, train: bool = False) -> Iterator[None]:
    """Set evaluation mode, or training mode with ``train``, and go back to the mode that each submodule had."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(train)
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
