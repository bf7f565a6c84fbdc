"""What a score is: the float64 dot product of two embeddings, rounded to float32.

Matrix products, faiss and ScaNN add the same numbers up in other orders and so disagree in the last
bits; for a ranking those bits are its ties. Candidates from anywhere are therefore scored again here,
pair by pair, always in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.retrieval.rows import Rows, TensorRows
from lit_dpret.retrieval.threads import rows_in_parallel
from lit_dpret.retrieval.topk import MISSING

_CHUNK = 65_536  # passages that are read at a time
_PLACE = 2**32 - 1
_CPU_BLOCK = 2**20  # bytes that a cache holds
_DEVICE_BLOCK = 256 * 2**20  # bytes that keep an accelerator busy
_SMALLEST_NORM = 1e-12


def canonical_scores(queries: Tensor, passages: Rows, candidates: Tensor, *, cosine: bool) -> Tensor:
    """The scores of candidate passages, each a function of its two embeddings alone.

    Args:
        queries: float64, shape ``(queries, dim)``; normalised already under ``cosine``.
        passages: All passages.
        candidates: Indices of passages, long on the CPU, shape ``(queries, width)``; `MISSING` as filler.
        cosine: Whether a passage is divided by its length.

    Returns:
        float32 on the CPU, shaped as ``candidates``; -inf for fillers.
    """
    if isinstance(passages, TensorRows) and passages.embeddings.device.type != "cpu":
        scores = _on_device(queries, passages.embeddings, candidates, cosine)
    else:
        scores = _on_cpu(queries.cpu().numpy(), passages, candidates.numpy(), cosine)
    return scores.masked_fill_(candidates == MISSING, float("-inf"))


def _on_cpu(queries: NDArray[np.float64], passages: Rows, candidates: NDArray[np.int64], cosine: bool) -> Tensor:
    """All pairs in the order of their passages: each passage is fetched from memory, or from a file, but once."""
    width = max(1, candidates.shape[1])
    flat = candidates.reshape(-1)
    scores = np.empty(flat.shape, dtype=np.float32)
    keys = (flat << 32) | np.arange(len(flat))  # passage above, place among the candidates below
    keys.sort()
    bounds = range(0, len(passages) + _CHUNK, _CHUNK)
    edges = np.searchsorted(keys, np.array(bounds) << 32)
    block = max(1, _CPU_BLOCK // (16 * passages.dim))
    for start, first, last in zip(bounds, edges, edges[1:], strict=False):
        if first == last:
            continue
        chunk = passages.chunk(start, min(start + _CHUNK, len(passages)))
        array = chunk.view(torch.uint16).numpy() if chunk.dtype == torch.bfloat16 else chunk.numpy()
        pairs = keys[first:last]

        def score(part: slice, array: Any = array, pairs: Any = pairs, start: int = start) -> None:
            for left in range(part.start, part.stop, block):
                some = pairs[left : min(left + block, part.stop)]
                places = some & _PLACE
                found = _as_float64(array[(some >> 32) - start])
                if cosine:
                    lengths = np.sqrt(np.einsum("pd,pd->p", found, found))
                    found /= np.maximum(lengths, _SMALLEST_NORM)[:, None]
                with np.errstate(over="ignore"):  # beyond float32 a score is infinite
                    scores[places] = np.einsum("pd,pd->p", found, queries[places // width])

        rows_in_parallel(score, len(pairs), max(block, 2**16))
    return torch.from_numpy(scores).view(candidates.shape)


def _as_float64(array: NDArray[Any]) -> NDArray[np.float64]:
    if array.dtype == np.uint16:  # bfloat16, which NumPy does not know: the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _on_device(queries: Tensor, passages: Tensor, candidates: Tensor, cosine: bool) -> Tensor:
    width = candidates.shape[1]
    queries = queries.to(passages.device)
    pairs = max(1, _DEVICE_BLOCK // (16 * queries.shape[1]))
    rows, columns = max(1, pairs // max(1, width)), min(width, pairs)
    scores = torch.empty(candidates.shape, dtype=torch.float32)
    for row in range(0, len(queries), rows):
        for column in range(0, width, columns):
            block = slice(row, row + rows), slice(column, column + columns)
            wanted = candidates[block].clamp(min=0).to(passages.device)
            found = passages[wanted].double()
            found = F.normalize(found, dim=-1) if cosine else found
            scores[block] = (found * queries[row : row + rows, None, :]).sum(dim=-1).float().cpu()
    return scores
