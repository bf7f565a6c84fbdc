"""A list of passages, as something that can be recognised."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def passages_hash(passages: Mapping[str, str]) -> str:
    """SHA-256 of ids and texts, whatever order they come in; lengths keep neighbours apart.

    Example:
        >>> passages_hash({"1": "ab", "2": "c"}) == passages_hash({"2": "c", "1": "ab"})
        True
    """
    digest = hashlib.sha256()
    for name in sorted(passages):
        for part in (name, passages[name]):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
    return digest.hexdigest()
