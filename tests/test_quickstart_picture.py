"""The picture on the front page is drawn from the numbers that are committed beside it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_quickstart", ROOT / "scripts" / "draw_quickstart.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.costly
def test_the_picture_is_the_one_that_the_script_draws_and_the_front_page_shows_it(script: ModuleType) -> None:
    facts = json.loads(script.FACTS.read_text(encoding="utf-8"))
    assert script.PICTURE.read_text(encoding="utf-8") == script.draw(facts), "python scripts/draw_quickstart.py"
    assert script.PICTURE.stat().st_size < 150_000
    assert "docs/assets/quickstart.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
