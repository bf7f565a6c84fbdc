"""Embeddings in memory or in a file, read in chunks and by row; a file is never in memory as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dpret.errors import ConfigurationError, DataError

Storage = Literal["float32", "bfloat16"]
STORAGES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TensorRows:
    """The rows of a tensor, ``dim`` wide; `chunk` gives consecutive rows, `take` a few thousand by index, as stored.

    Kept from one search to the next, they save it from measuring all lengths again. Memory that a tensor shares with
    NumPy must not be changed in the meantime.
    """

    def __init__(self, embeddings: Tensor) -> None:
        self.embeddings = embeddings.detach()
        self._longest: tuple[float, int] | None = None

    @property
    def longest(self) -> float | None:
        """The length of the longest row, once a search has found it; then all rows are finite."""
        if self._longest is None or self._longest[1] != self.embeddings._version:
            return None
        return self._longest[0]

    def keep_longest(self, longest: float) -> None:
        """Keep the length until the tensor is changed."""
        if not self.embeddings.is_inference():  # PyTorch does not count changes of inference tensors
            self._longest = longest, self.embeddings._version

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def dim(self) -> int:
        return int(self.embeddings.shape[1])

    def chunk(self, start: int, stop: int) -> Tensor:
        return self.embeddings[start:stop]

    def take(self, places: Tensor) -> Tensor:
        return self.embeddings.index_select(0, places.to(self.embeddings.device))


class FileRows:
    """The rows of a file that contains only rows, in C order: float32 or bfloat16 of the machine's byte order.

    At most the requested chunk is in memory. The file is read rather than mapped: pages of a mapped file count as
    memory of the process until the kernel reclaims them.
    """

    longest: float | None = None  # the file may change

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
            raise DataError(f"{path} has {size} bytes, which is not a whole number of {storage} rows of {dim}.")
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

    def take(self, places: Tensor) -> Tensor:
        with self.path.open("rb", buffering=0) as file:
            rows = [os.pread(file.fileno(), self._width, place * self._width) for place in places.tolist()]
        if any(len(row) != self._width for row in rows):
            raise DataError(f"{self.path} became shorter while it was searched.")
        return torch.frombuffer(bytearray(b"".join(rows)), dtype=self._dtype).view(-1, self._dim)


Rows: TypeAlias = TensorRows | FileRows


def as_rows(embeddings: Tensor | NDArray[Any] | Rows) -> Rows:
    """Wrap a tensor or an array as `Rows`; return rows as they are."""
    if isinstance(embeddings, np.ndarray):
        embeddings = torch.as_tensor(embeddings)
    return TensorRows(embeddings) if isinstance(embeddings, Tensor) else embeddings
