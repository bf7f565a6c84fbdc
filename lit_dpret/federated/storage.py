"""Tensors and facts on disk, whole or not at all, for their owner alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from lit_dpret.errors import ResumeError, StorageError


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file by renaming a finished one.

    Raises:
        StorageError: It cannot be written.
    """
    _write(path, save({name: value.detach().contiguous() for name, value in tensors.items()}))


def save_facts(facts: Mapping[str, object], path: Path) -> None:
    """Write a JSON file by renaming a finished one.

    Raises:
        StorageError: It cannot be written.
    """
    _write(path, json.dumps(facts, indent=1).encode())


def keep_facts(path: Path, name: str, facts: Mapping[str, object]) -> None:
    """Remember under ``name`` what a state folder was made with; refuse to go on with it with anything else.

    Raises:
        ResumeError: It was made with other facts; the message names the first that differs.
        StorageError: It cannot be written.
    """
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    now = json.loads(json.dumps(facts))
    if name in known:
        odd = [key for key in now.keys() | known[name].keys() if now.get(key) != known[name].get(key)]
        if odd:
            key = min(odd)
            raise ResumeError(
                f"{path.parent} was begun with {name}.{key}={known[name].get(key)!r}, and now it is {now.get(key)!r}: "
                "rounds of two different runs would be mixed. Restore the setting, or choose another folder."
            )
        return
    _write(path, json.dumps(known | {name: now}, indent=2).encode())


def _write(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
