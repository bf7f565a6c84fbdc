"""Tensors and facts on disk, whole or not at all, for their owner alone."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from lit_dpret.errors import ResumeError, StorageError
from lit_dpret.files import write_whole
from lit_dpret.privacy.ledger.chain import sync_folder


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


def keep_once(path: Path, fact: str) -> str:
    """Keep a fact under a path for good, unless one is kept there already; the one that is kept.

    Guarantees:
        - Of several processes at once one keeps its own, and all of them get the same.
        - It is on the disk before this returns.

    Raises:
        StorageError: It cannot be written.
    """
    if path.is_file():
        return path.read_text(encoding="utf-8")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_whole(draft, fact, owner_only=True)
    try:
        os.link(draft, path)
        sync_folder(path.parent)
    except FileExistsError:
        pass
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        draft.unlink(missing_ok=True)
    return path.read_text(encoding="utf-8")


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
