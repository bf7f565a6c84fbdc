"""Negatives that are other rows' passages: of this batch, of other processes', of batches before."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.negatives.base import NegativeSource


class InBatchNegatives(NegativeSource):
    """The passages of the other rows of the batch.

    Args:
        gather: Take those of all processes of ``torch.distributed`` as well.
    """

    name: ClassVar[str] = "in_batch"
    couples_rows = True

    def __init__(self, *, gather: bool = False) -> None:
        self.gather = gather


class PreBatchNegatives(NegativeSource):
    """The passages of the batches before, as they were embedded then.

    A queue of embeddings costs nothing to compare with, and is stale by as many steps as it is long (Wang et
    al., SimKGC, 2203.02167, section 3.3). It is remembered between steps, so no private mode can take it.

    Args:
        batches: How many batches are remembered.

    Raises:
        ConfigurationError: ``batches`` is below 1.
    """

    name: ClassVar[str] = "pre_batch"
    couples_rows = True
    keeps_private_state = True

    def __init__(self, *, batches: int = 2) -> None:
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
            raise ConfigurationError(
                f"model.negatives.pre_batch.batches={batches} is not a whole number of at least 1."
            )
        self.batches = batches
        self._queue: deque[tuple[Tensor, Tensor]] = deque(maxlen=batches)

    def remembered(self) -> tuple[Tensor, Tensor] | None:
        """Embeddings and text groups of the batches before; None at the first."""
        if not self._queue:
            return None
        return torch.cat([e for e, _ in self._queue]), torch.cat([g for _, g in self._queue])

    def remember(self, embeddings: Tensor, groups: Tensor) -> None:
        """Add a batch and forget the oldest."""
        self._queue.append((embeddings.detach(), groups))

    def state_dict(self) -> list[dict[str, Any]]:
        """For a checkpoint."""
        return [{"embeddings": e.cpu(), "groups": g.cpu()} for e, g in self._queue]

    def load_state_dict(self, state: list[dict[str, Any]], device: torch.device) -> None:
        """What `state_dict` gave."""
        self._queue.clear()
        self._queue.extend((each["embeddings"].to(device), each["groups"].to(device)) for each in state)
