"""The pinned versions are ones that pyproject.toml allows, and cover what it asks for."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PINNED = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), flags=re.MULTILINE))


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_constraints", ROOT / "scripts" / "write_constraints.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITER = script()


def test_what_is_asked_for_is_pinned_within_its_range() -> None:
    asked = WRITER.requirements(WRITER.EXTRAS)
    assert [one for one in asked if not one.specifier.contains(PINNED[canonicalize_name(one.name)])] == []


def test_the_lines_of_the_file_are_pins() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").removeprefix(WRITER.HEAD).splitlines()
    assert len(lines) == len(PINNED) > 100 and lines == sorted(lines)
