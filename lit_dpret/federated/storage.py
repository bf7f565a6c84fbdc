"""Tensors on disk, whole or not at all, for their owner alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from lit_dpret.errors import StorageError


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file by renaming a finished one.

    Raises:
        StorageError: It cannot be written.
    """
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = save({name: value.detach().contiguous() for name, value in tensors.items()})
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
