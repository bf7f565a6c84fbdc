"""Tensors and facts on disk, whole or not at all, for their owner alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from lit_dpret.errors import ResumeError
from lit_dpret.whole_file import write_whole


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file by renaming a finished one.

    Raises:
        StorageError: It cannot be written.
    """
    write_whole(path, save({name: value.detach().contiguous() for name, value in tensors.items()}), owner_only=True)


def save_json(path: Path, content: object) -> None:
    """Write JSON by renaming a finished file.

    Raises:
        StorageError: It cannot be written.
    """
    write_whole(path, json.dumps(content), owner_only=True)


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
    write_whole(path, json.dumps(known | {name: now}, indent=2).encode(), owner_only=True)
