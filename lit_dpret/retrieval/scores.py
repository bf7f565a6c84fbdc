"""Exact scores of candidate passages, pair by pair, always in the same order.

A score is the float64 dot product of two embeddings, rounded to float32. Matrix products, faiss and ScaNN sum the same
numbers in other orders and so differ in the last bits; in a ranking those bits decide the order of ties. So candidates
from any source are scored again here.
"""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.retrieval.rows import Rows, TensorRows
from lit_dpret.retrieval.topk import MISSING
from lit_dpret.threads import in_threads

_CHUNK = 16_384  # passages that are read at a time
_FEW_PAIRS = 2**12  # below this, one thread finishes before others start
_AT_A_TIME = 2**20  # float64 numbers of passages that fit into a processor's cache
_PLACE = 2**32 - 1  # mask of the lower half of a key
_DEVICE_BLOCK = 256 * 2**20  # bytes that keep an accelerator busy


def canonical_scores(queries: Tensor, passages: Rows, candidates: Tensor, *, cosine: bool) -> Tensor:
    """Return the scores of candidate passages, each a function of only its two embeddings.

    ``queries`` are float64, ``(queries, dim)``, already normalised under ``cosine``. ``candidates`` are indices of
    passages, long on the CPU, ``(queries, width)``, padded with `MISSING`.

    Returns:
        float32 on the CPU, shaped as ``candidates``; -inf for fillers.
    """
    if isinstance(passages, TensorRows) and passages.embeddings.device.type != "cpu":
        scores = _on_device(queries, passages.embeddings, candidates, cosine)
    elif candidates.numel() * passages.dim <= _AT_A_TIME:
        scores = _query_by_query(queries.cpu(), passages, candidates, cosine)
    else:
        scores = _on_cpu(queries.cpu(), passages, candidates.numpy(), cosine)
    fillers = candidates.numpy() == MISSING
    return scores.masked_fill_(torch.from_numpy(fillers), float("-inf")) if fillers.any() else scores


def _on_cpu(queries: Tensor, passages: Rows, candidates: NDArray[np.int64], cosine: bool) -> Tensor:
    """Score all pairs in the order of their passages, so that each passage is fetched only once."""
    width = max(1, candidates.shape[1])
    flat = candidates.reshape(-1)
    scores = torch.empty(len(flat), dtype=torch.float32)
    keys = (flat << 32) | np.arange(len(flat))  # upper half: passage; lower half: position among the candidates
    keys.sort()
    starts = range(0, len(passages), _CHUNK)
    edges = np.searchsorted(keys, np.append(starts, len(passages)) << 32)
    if isinstance(passages, TensorRows):  # no passages in between to read, so shares are even and fit into a cache
        share = max(512, 1024 * len(keys) // len(passages))
        edges = np.append(np.arange(edges[0], len(keys), share), len(keys))

    def score(number: int) -> None:
        first, last = edges[number], edges[number + 1]
        if first == last:
            return
        pairs = keys[first:last]
        wanted, places = pairs >> 32, torch.from_numpy(pairs & _PLACE)
        opens = np.flatnonzero(np.diff(wanted, prepend=-1))  # where the next passage begins
        rows = torch.from_numpy(wanted[opens])
        if isinstance(passages, TensorRows):
            found = passages.take(rows).double()
        else:
            start = starts[number]
            found = passages.chunk(start, min(start + _CHUNK, len(passages)))[rows - start].double()
        found = F.normalize(found, dim=-1) if cosine else found
        scores[places] = _products(torch.from_numpy(np.append(opens, len(pairs))), places // width, found, queries)

    if edges[-1] - edges[0] > _FEW_PAIRS:  # fillers come before them
        in_threads(score, range(len(edges) - 1))
    else:
        for number in range(len(edges) - 1):
            score(number)
    return scores.view(candidates.shape)


def _query_by_query(queries: Tensor, passages: Rows, candidates: Tensor, cosine: bool) -> Tensor:
    """Score few pairs; the passage of each pair is fetched separately."""
    wanted = torch.from_numpy(np.maximum(candidates.numpy(), 0).reshape(-1))
    found = passages.take(wanted).double()
    found = F.normalize(found, dim=-1) if cosine else found
    opens = np.arange(0, len(found) + 1, max(1, candidates.shape[1]))
    of = np.arange(len(found))
    return _products(torch.from_numpy(opens), torch.from_numpy(of), queries, found).view(candidates.shape)


def _products(opens: Tensor, of: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return float64 products as float32; those of row i of ``left`` are with rows ``of[opens[i]:opens[i + 1]]``."""
    _hear_of_beta()
    zeros = torch.zeros(len(of), dtype=torch.float64)
    grid = torch.sparse_csr_tensor(opens, of, zeros, (len(left), len(right)), check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(grid, left, right.T).values()
    return products.float()


@cache
def _hear_of_beta() -> None:
    """Trigger PyTorch's once-per-process warning that its sparse matrices are in beta, and suppress it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        torch.eye(1).to_sparse_csr()


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
