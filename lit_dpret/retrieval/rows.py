"""Embeddings in memory or in a file, read in chunks and row by row.

Search reads passages twice: in order, a chunk at a time, and then the few rows that may be among the
best. A file serves both without ever being in memory as a whole.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError

Storage = Literal["float32", "bfloat16"]
STORAGES: dict[str, tuple[torch.dtype, Any]] = {
    "float32": (torch.float32, np.float32),
    "bfloat16": (torch.bfloat16, np.uint16),  # NumPy knows no bfloat16; its bits are the upper half of a float32
}

_RELEASE_AFTER = 64 * 2**20  # bytes of a mapped file that are touched before its pages are let go


class Rows(Protocol):
    """Embeddings, one row each."""

    def __len__(self) -> int: ...

    @property
    def dim(self) -> int:
        """The width of a row."""
        ...

    def chunk(self, start: int, stop: int) -> Tensor:
        """Rows from ``start`` up to ``stop``, as they are stored."""
        ...

    def take(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        """The rows at ``places``, float64, on the CPU."""
        ...


class TensorRows:
    """The rows of a tensor.

    Args:
        embeddings: Shape ``(rows, dim)``, on any device.
    """

    def __init__(self, embeddings: Tensor) -> None:
        self.embeddings = embeddings.detach()
        half = self.embeddings.dtype == torch.bfloat16
        self._bits = self.embeddings.contiguous().view(torch.uint16) if half else self.embeddings

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def dim(self) -> int:
        return int(self.embeddings.shape[1])

    def chunk(self, start: int, stop: int) -> Tensor:
        return self.embeddings[start:stop]

    def take(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        return _as_float64(np.take(self._bits.cpu().numpy(), places, axis=0, mode="clip"))


class FileRows:
    """The rows of a file that holds nothing but them, in C order.

    Guarantees:
        - Of the file no more is held in memory than a chunk and some 64 MiB of its pages, however long it is.

    Args:
        path: The file.
        dim: The width of a row.
        storage: ``float32`` or ``bfloat16``, in the byte order of the machine.

    Raises:
        DataError: The file cannot be read, or its length is not a whole number of rows.
    """

    def __init__(self, path: str | Path, *, dim: int, storage: Storage = "float32") -> None:
        if storage not in STORAGES:
            raise ConfigurationError(f"storage={storage!r} is not one of {', '.join(STORAGES)}.")
        self.path, self._dim = Path(path), dim
        self._dtype, kind = STORAGES[storage]
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115  (kept open; closed with the object)
            size = self.path.stat().st_size
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except OSError as error:
            raise DataError(f"The embeddings {path} cannot be read: {error.strerror}.") from error
        width = np.dtype(kind).itemsize * dim
        if dim < 1 or size % width:
            raise DataError(f"{path} has {size} bytes, which is no whole number of {storage} rows of {dim}.")
        self._width, self._touched = width, 0
        self._length: int = size // width
        self._array = np.frombuffer(b"" if self._map is None else self._map, dtype=kind).reshape(-1, dim)

    def __len__(self) -> int:
        return self._length

    @property
    def dim(self) -> int:
        return self._dim

    def chunk(self, start: int, stop: int) -> Tensor:
        """Read, not mapped: what was read is freed with the tensor."""
        stop = min(stop, self._length)
        with open(self.path, "rb") as file:
            file.seek(start * self._width)
            read = np.fromfile(file, dtype=self._array.dtype, count=(stop - start) * self._dim)
        return torch.from_numpy(read).view(self._dtype).view(-1, self._dim)

    def take(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        found = _as_float64(np.take(self._array, places, axis=0, mode="clip"))
        self._touched += len(places) * max(self._width, mmap.PAGESIZE)
        if self._touched > _RELEASE_AFTER and self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._touched = 0
            self._map.madvise(mmap.MADV_DONTNEED)  # they stay in the page cache
        return found


def as_rows(embeddings: Tensor | Rows) -> Rows:
    """A tensor as `Rows`; rows as they are."""
    return TensorRows(embeddings) if isinstance(embeddings, Tensor) else embeddings


def _as_float64(array: NDArray[Any]) -> NDArray[np.float64]:
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
