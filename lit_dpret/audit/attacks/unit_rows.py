"""Rows of length one: cosines of embeddings are then inner products."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unit_rows(vectors: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Every row over its Euclidean norm, shape ``(rows, dim)``; a row of zeros stays one."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))
