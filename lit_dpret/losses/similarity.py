"""How alike a query and a passage are, as one number per pair.

Every similarity takes the embeddings of all queries and all passages at once and returns the
whole table of scores, shape ``(queries, passages)``; larger means more alike. They are looked up
by name, so that the name on the command line, in a saved model and in a loss is the same word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dpret.errors import ConfigurationError


class Similarity(Protocol):
    """``(queries, dim)`` and ``(passages, dim)`` to scores of shape ``(queries, passages)``."""

    def __call__(self, query_embeddings: Tensor, passage_embeddings: Tensor) -> Tensor: ...


def dot(query_embeddings: Tensor, passage_embeddings: Tensor) -> Tensor:
    """The inner product of every query with every passage.

    Example:
        >>> import torch
        >>> dot(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([[11.,  2.]])

    Args:
        query_embeddings: Shape ``(queries, dim)``.
        passage_embeddings: Shape ``(passages, dim)``.

    Returns:
        Scores of shape ``(queries, passages)``.
    """
    return query_embeddings @ passage_embeddings.transpose(-2, -1)


def cosine(query_embeddings: Tensor, passage_embeddings: Tensor) -> Tensor:
    """The cosine of the angle between every query and every passage, in [-1, 1] up to rounding.

    A zero embedding has no angle; its scores are 0, not NaN.

    Example:
        >>> import torch
        >>> cosine(torch.tensor([[0.0, 5.0], [0.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
        tensor([[1.],
                [0.]])

    Args:
        query_embeddings: Shape ``(queries, dim)``.
        passage_embeddings: Shape ``(passages, dim)``.

    Returns:
        Scores of shape ``(queries, passages)``.
    """
    return dot(F.normalize(query_embeddings, dim=-1), F.normalize(passage_embeddings, dim=-1))


SIMILARITIES: Mapping[str, Similarity] = MappingProxyType({"dot": dot, "cosine": cosine})


def get_similarity(name: str) -> Similarity:
    """The similarity called ``name``.

    Raises:
        ConfigurationError: There is none of that name; the message lists those there are.
    """
    try:
        return SIMILARITIES[name]
    except KeyError:
        raise ConfigurationError(f"similarity={name!r} is not one of {', '.join(SIMILARITIES)}.") from None


def checked_temperature(temperature: float) -> float:
    """``temperature`` as a float, refused unless it is positive and finite."""
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0):
        raise ConfigurationError(
            f"loss.temperature={temperature} is not a positive, finite number. It divides the scores; "
            "a `scale` of another library is 1 / temperature."
        )
    return float(temperature)


def checked_mask(mask: Tensor, rows: int, columns: int, device: torch.device) -> Tensor:
    """``mask`` on ``device``, refused unless it is one boolean for each row and column."""
    if mask.shape != (rows, columns) or mask.dtype != torch.bool:
        raise ConfigurationError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be torch.bool of shape {(rows, columns)}."
        )
    return mask.to(device)
