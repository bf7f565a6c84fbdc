from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def harbour() -> Path:
    """A small BEIR folder of invented text; read only."""
    return TESTS / "data" / "harbour"


@pytest.fixture
def harbour_copy(harbour: Path, tmp_path: Path) -> Path:
    """The same, to spoil."""
    return Path(shutil.copytree(harbour, tmp_path / "harbour"))


@pytest.fixture
def pair_log() -> Path:
    return TESTS / "data" / "pairs.tsv"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a file: text as it is, a list of records as JSONL."""

    def write(name: str, content: str | bytes | list[dict[str, Any]]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(record) + "\n" for record in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
