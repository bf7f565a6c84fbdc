"""The scale sheet is what its script makes of the models' shapes and the measured rates."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def sheet() -> Any:
    spec = importlib.util.spec_from_file_location("scale_sheet", ROOT / "scripts" / "scale_sheet.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["scale_sheet"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes() -> None:
    assert (ROOT / "docs" / "scale.md").read_text(encoding="utf-8") == sheet().page()


def test_predictions_are_marked_as_predictions() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings and all(any(w in h for w in ("counted", "predicted", "measured")) for h in headings)
    assert "Nothing on it was measured" in page and "assumed" in page
