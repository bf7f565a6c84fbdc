"""What a search refuses before it starts."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.rows import Rows

Similarity = Literal["dot", "cosine"]


def require_positive(**numbers: int) -> None:
    """Refuse a number below 1 by its name."""
    for name, value in numbers.items():
        if value < 1:
            raise ConfigurationError(f"{name}={value} must be at least 1.")


def check_shapes(
    queries: Tensor,
    passages: Rows | None,
    count: int,
    similarity: str,
    tie_rank: Tensor | None,
    exclude: Tensor | None,
) -> None:
    """Refuse embeddings, ranks and exclusions that do not belong together."""
    if similarity not in get_args(Similarity):
        raise ConfigurationError(f"similarity={similarity!r} is not one of {', '.join(get_args(Similarity))}.")
    if queries.ndim != 2 or (passages is not None and queries.shape[1] != passages.dim):
        shape = None if passages is None else (len(passages), passages.dim)
        raise ConfigurationError(
            f"Embeddings of shapes {tuple(queries.shape)} and {shape} are not (queries, dim) and (passages, dim) of "
            "one model."
        )
    for name, value, length in (("tie_rank", tie_rank, count), ("exclude", exclude, len(queries))):
        if value is not None and value.shape != (length,):
            raise ConfigurationError(f"{name} has shape {tuple(value.shape)}, not {(length,)}.")


def refuse_broken(embeddings: Tensor, side: str) -> None:
    """Refuse embeddings that are not finite."""
    broken = int((~embeddings.isfinite()).any(dim=1).sum()) if not bool(embeddings.isfinite().all()) else 0
    if broken:
        raise DataError(f"{broken} of {len(embeddings)} {side} embeddings hold a NaN or infinity.")
