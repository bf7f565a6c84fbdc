"""Identify the data of a result: a name without its path, and a hash of the evaluated data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PLACES = ("folder", "pairs", "queries", "file", "path", "root")


def data_facts(data: Any, *measured: Mapping[str, Any]) -> dict[str, str]:
    """Return the data facts for every result file: ``data`` and, for evaluated data, ``data_sha256``.

    Anyone with the data can compute the hash, and anyone who guesses them can check the guess: a file that is shared
    may contain only a hash of public parts. ``measured`` is the data read, by id: texts, or judgements of a query.
    """
    return {"data": data_name(data), **({"data_sha256": content_sha256(*measured)} if measured else {})}


def data_name(data: Any) -> str:
    """Name a data set without its path: BEIR's name, or the last part of its folder or file."""
    if isinstance(data, str | Path):
        return Path(data).resolve().name
    if (public := getattr(data, "set", None)) is not None:
        return str(public.name)
    place = next(filter(None, (getattr(data, name, None) for name in _PLACES)), None)
    # Checked last, since it reads the data: a plan for a stated number of units has none to read.
    place = place or getattr(getattr(data, "collection", None), "source", type(data).__name__)
    return Path(str(place)).name


def content_sha256(*parts: Mapping[str, Any]) -> str:
    """Return a hash of mappings, independent of the order of entries, without holding them in memory."""
    found = hashlib.sha256()
    for part in parts:
        total = 0
        for name, value in part.items():
            entry = json.dumps([name, value], sort_keys=True, ensure_ascii=True, default=str)
            total += int.from_bytes(hashlib.sha256(entry.encode()).digest(), "big")
        found.update(f"{len(part)} {total % 2**256:064x}\n".encode())
    return found.hexdigest()
