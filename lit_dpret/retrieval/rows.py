"""Embeddings in memory or in a file, read in chunks and by row, and scores of pairs of them.

Search reads passages in order, a chunk at a time: once for the matrix products, and once more for the
few rows that may be among the best. So a file is never in memory as a whole.

A score is the float64 dot product of two embeddings, rounded to float32. Matrix products, faiss and ScaNN add the same
numbers up in other orders and so disagree in the last bits; for a ranking those bits are its ties. Candidates from
anywhere are therefore scored again here, pair by pair, always in the same order.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.topk import MISSING

Storage = Literal["float32", "bfloat16"]
STORAGES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rows(Protocol):
    """Embeddings, one row each."""

    def __len__(self) -> int: ...

    @property
    def dim(self) -> int:
        """The width of a row."""
        ...

    def chunk(self, start: int, stop: int) -> Tensor:
        """Return rows from ``start`` up to ``stop``, in the stored dtype."""
        ...

    def sample(self, places: Tensor) -> Tensor:
        """Return a few thousand rows, by index, in the stored dtype."""
        ...


class TensorRows:
    """The rows of a tensor."""

    def __init__(self, embeddings: Tensor) -> None:
        self.embeddings = embeddings.detach()

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def dim(self) -> int:
        return int(self.embeddings.shape[1])

    def chunk(self, start: int, stop: int) -> Tensor:
        return self.embeddings[start:stop]

    def sample(self, places: Tensor) -> Tensor:
        return self.embeddings[places.to(self.embeddings.device)]


class FileRows:
    """The rows of a file that contains only rows, in C order.

    Guarantees:
        - Of the file no more is in memory than the chunk that was asked for. It is read and not mapped: pages of
          a mapped file count as the process's own until the kernel takes them back.

    Args:
        path: The file.
        dim: The width of a row.
        storage: ``float32`` or ``bfloat16``, in the byte order of the machine.

    Raises:
        ConfigurationError: There is no such storage.
        DataError: The file cannot be read, or its length is not a whole number of rows.
    """

    def __init__(self, path: str | Path, *, dim: int, storage: Storage = "float32") -> None:
        if storage not in STORAGES:
            raise ConfigurationError(f"storage={storage!r} is not one of {', '.join(STORAGES)}.")
        self.path, self._dim, self._dtype = Path(path), dim, STORAGES[storage]
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise DataError(f"The embeddings {path} cannot be read: {error.strerror}.") from error
        self._width = torch.empty(0, dtype=self._dtype).element_size() * dim
        if dim < 1 or size % self._width:
            raise DataError(f"{path} has {size} bytes, which is no whole number of {storage} rows of {dim}.")
        self._length: int = size // self._width

    def __len__(self) -> int:
        return self._length

    @property
    def dim(self) -> int:
        return self._dim

    def chunk(self, start: int, stop: int) -> Tensor:
        stop = max(start, min(stop, self._length))
        read = np.fromfile(self.path, np.uint8, count=(stop - start) * self._width, offset=start * self._width)
        if len(read) != (stop - start) * self._width:
            raise DataError(f"{self.path} became shorter while it was searched.")
        return torch.from_numpy(read).view(self._dtype).view(-1, self._dim)

    def sample(self, places: Tensor) -> Tensor:
        with self.path.open("rb", buffering=0) as file:
            rows = [os.pread(file.fileno(), self._width, place * self._width) for place in places.tolist()]
        return torch.frombuffer(bytearray(b"".join(rows)), dtype=self._dtype).view(-1, self._dim)


def as_rows(embeddings: Tensor | NDArray[Any] | Rows) -> Rows:
    """Wrap a tensor or an array as `Rows`; return rows as they are."""
    if isinstance(embeddings, np.ndarray):
        embeddings = torch.as_tensor(embeddings)
    return TensorRows(embeddings) if isinstance(embeddings, Tensor) else embeddings


_CHUNK = 16_384  # passages that are read at a time
_FEW_PAIRS = 2**14  # threads begin later than one has scored so many
_PLACE = 2**32 - 1
_DEVICE_BLOCK = 256 * 2**20  # bytes that keep an accelerator busy


def canonical_scores(queries: Tensor, passages: Rows, candidates: Tensor, *, cosine: bool) -> Tensor:
    """Return the scores of candidate passages, each a function of only its two embeddings.

    ``queries`` are float64, ``(queries, dim)``, normalised already under ``cosine``. ``candidates`` are indices of
    passages, long on the CPU, ``(queries, width)``, with `MISSING` as filler.

    Returns:
        float32 on the CPU, shaped as ``candidates``; -inf for fillers.
    """
    if isinstance(passages, TensorRows) and passages.embeddings.device.type != "cpu":
        scores = _on_device(queries, passages.embeddings, candidates, cosine)
    else:
        scores = _on_cpu(queries.cpu(), passages, candidates.numpy(), cosine)
    return scores.masked_fill_(candidates == MISSING, float("-inf"))


def _on_cpu(queries: Tensor, passages: Rows, candidates: NDArray[np.int64], cosine: bool) -> Tensor:
    """Score all pairs in the order of their passages, so that each passage is fetched only once."""
    width = max(1, candidates.shape[1])
    flat = candidates.reshape(-1)
    scores = torch.empty(len(flat), dtype=torch.float32)
    keys = (flat << 32) | np.arange(len(flat))  # passage above, place among the candidates below
    keys.sort()
    starts = range(0, len(passages), _CHUNK)
    edges = np.searchsorted(keys, np.append(starts, len(passages)) << 32)

    def score(part: slice) -> None:
        first, last = edges[part.start], edges[part.start + 1]
        if first == last:
            return
        start, pairs = starts[part.start], keys[first:last]
        wanted, places = pairs >> 32, torch.from_numpy(pairs & _PLACE)
        opens = np.flatnonzero(np.diff(wanted, prepend=-1))  # where another passage begins
        chunk = passages.chunk(start, min(start + _CHUNK, len(passages)))
        found = chunk[torch.from_numpy(wanted[opens] - start)].double()
        found = F.normalize(found, dim=-1) if cosine else found
        grid = torch.sparse_csr_tensor(
            torch.from_numpy(np.append(opens, len(pairs))),
            places // width,
            torch.zeros(len(pairs), dtype=torch.float64),
            (len(found), len(queries)),
            check_invariants=False,
        )
        scores[places] = torch.sparse.sampled_addmm(grid, found, queries.T).values().float()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        if edges[-1] - edges[0] > _FEW_PAIRS:  # fillers stand before them
            rows_in_parallel(score, len(starts), 1)
        else:
            for number in range(len(starts)):
                score(slice(number, number + 1))
    return scores.view(candidates.shape)


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


def rows_in_parallel(work: Callable[[slice], None], rows: int, step: int) -> None:
    """Call ``work`` on slices of at most ``step`` rows, on as many threads as torch may use.

    While it runs, torch uses one thread for each operation, in all of the process.
    """
    slices = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    threads = min(torch.get_num_threads(), len(slices))
    if threads <= 1:
        for part in slices:
            work(part)
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for done in [pool.submit(work, part) for part in slices]:
                done.result()
    finally:
        torch.set_num_threads(before)
