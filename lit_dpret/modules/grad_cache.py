"""Large batches in little memory: embeddings a few rows at a time, their gradient exactly that of all rows at once.

A contrastive loss needs the embeddings of all rows together, but not what the encoder remembered on the way
to them. GradCache (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
2101.06983) embeds in chunks without a graph, takes the gradient of the loss with respect to the
embeddings, and runs every chunk once more, with the same dropout, to carry that gradient into the weights.
Seen from autograd that is a checkpoint around each chunk, and PyTorch's own keeps the states of the random
generators of CPU and accelerator, and of autocast; so there is no second copy of the training step here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_dpret.privacy.sampling import rows_in_turn, take_rows


def embed_in_chunks(embed: Callable[[Any], Tensor], features: Any, *, count: int, rows_at_once: int) -> Tensor:
    """The embeddings of some rows, of which a backward pass remembers ``rows_at_once`` at a time.

    Guarantees:
        - Values and gradients are those of embedding the chunks one after the other in one graph: dropout
          masks of the second pass are those of the first.
        - The random state after a backward pass is the one that was there before it.

    Args:
        embed: Given the features of some rows; returns ``(rows, dim)``. It must not write any state.
        features: Tensors, or nested dicts of them, whose first axis is the rows.
        count: How many rows there are.
        rows_at_once: Rows of a chunk.

    Returns:
        Shape ``(count, dim)``.
    """
    if not torch.is_grad_enabled():
        return torch.cat([embed(take_rows(features, part)) for part in rows_in_turn(count, rows_at_once)])
    chunks: list[Tensor] = [
        checkpoint(embed, take_rows(features, part), use_reentrant=False)  # type: ignore[no-untyped-call]
        for part in rows_in_turn(count, rows_at_once)
    ]
    return torch.cat(chunks)
