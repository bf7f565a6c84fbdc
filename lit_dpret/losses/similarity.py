"""Similarity of query and passage, one number per pair.

Every similarity takes the embeddings of all queries and all passages at once and returns the
whole table of scores, shape ``(queries, passages)``; larger means more similar. Each has one name,
which the command line, saved models and losses all use.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import require_choice


def dot(query_embeddings: Tensor, passage_embeddings: Tensor) -> Tensor:
    """Return the inner product of every query with every passage, ``(queries, passages)``.

    Example:
        >>> dot(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([[11.,  2.]])
    """
    return query_embeddings @ passage_embeddings.transpose(-2, -1)


def cosine(query_embeddings: Tensor, passage_embeddings: Tensor) -> Tensor:
    """Return the cosine of every query and every passage; a zero embedding scores 0.

    Example:
        >>> cosine(torch.tensor([[0.0, 5.0], [0.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
        tensor([[1.],
                [0.]])
    """
    return dot(F.normalize(query_embeddings, dim=-1), F.normalize(passage_embeddings, dim=-1))


#: Maps ``(queries, dim)`` and ``(passages, dim)`` to scores ``(queries, passages)``; larger means more similar.
Similarity = Callable[[Tensor, Tensor], Tensor]
SIMILARITIES: dict[str, Similarity] = {"dot": dot, "cosine": cosine}


def get_similarity(name: str) -> Similarity:
    """Return the similarity of that name."""
    require_choice("similarity", name, SIMILARITIES)
    return SIMILARITIES[name]


def checked_temperature(temperature: float) -> float:
    """Return ``temperature`` as a float; refuse it unless it is positive and finite."""
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0):
        raise ConfigurationError(
            f"temperature={temperature} (model.temperature or model.loss.temperature) is not a positive, finite "
            "number. It divides the scores; a `scale` of another library is 1 / temperature."
        )
    return float(temperature)


def checked_mask(mask: Tensor, rows: int, columns: int, device: torch.device) -> Tensor:
    """Return ``mask`` on ``device``; refuse it unless it is one boolean for each row and column."""
    if mask.shape != (rows, columns) or mask.dtype != torch.bool:
        raise ConfigurationError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be torch.bool of shape {(rows, columns)}."
        )
    return mask.to(device)
