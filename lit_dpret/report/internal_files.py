"""The two files of a report on private data: JSON for programs, Markdown for people, and what the console tells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dpret.files import write_whole


@dataclass(frozen=True)
class Written:
    """The files, and the lines that are told on the console."""

    files: tuple[Path, ...]
    lines: tuple[str, ...]


def write_report(facts: Mapping[str, Any], lines: Sequence[str], stem: Path, *, owner_only: bool) -> Written:
    """Write ``STEM.json`` and ``STEM.md``, each whole or not at all.

    Raises:
        StorageError: A file cannot be written.
    """
    texts = {".json": json.dumps(facts, indent=2, allow_nan=False), ".md": "\n".join(lines)}
    files = tuple(
        write_whole(stem.with_name(f"{stem.name}{ending}"), f"{text}\n", owner_only=owner_only)
        for ending, text in texts.items()
    )
    return Written(files, (*lines, "", *(f"written: {path}" for path in files)))
