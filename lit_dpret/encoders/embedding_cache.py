"""Embeddings kept on disk, found again by what they were made from.

An entry's name is a hash of the weights, the contract, the vocabulary and the texts: train the
encoder a step, change a prefix or a text, and it is another entry. Nothing is ever stale, and
nothing has to be declared.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_dpret.errors import StorageError


def content_hash(facts: object, weights: Mapping[str, Tensor], texts: Iterable[str] = ()) -> str:
    """SHA-256 over plain JSON facts, every weight's name, type, shape and bytes, and texts in order."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


def load_or_make(path: Path, shape: Sequence[int], make: Callable[[], Tensor]) -> Tensor:
    """The tensor stored at ``path``, or what ``make`` returns, stored there.

    Guarantees:
        - The file appears whole or not at all.
        - A file that cannot be read, or holds another shape, is replaced.

    Raises:
        StorageError: The file cannot be written.
    """
    if path.is_file():
        try:
            stored: Tensor = load_file(path)["embeddings"]
            if stored.shape == tuple(shape):
                return stored
        except (OSError, KeyError, SafetensorError):
            pass  # replaced below
    made = make()
    _write_whole(path, made)
    return made


def _write_whole(path: Path, embeddings: Tensor) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            os.close(descriptor)
            save_file({"embeddings": embeddings.contiguous()}, name)
            with open(name, "rb") as file:
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, SafetensorError) as error:
        raise StorageError(f"The cache entry {path} cannot be written: {error}") from error
