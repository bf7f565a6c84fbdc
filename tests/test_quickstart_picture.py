"""The picture on the front page is drawn from the numbers that are committed beside it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_quickstart", ROOT / "scripts" / "draw_quickstart.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_picture_is_the_one_that_the_script_draws_and_the_front_page_shows_it(script: ModuleType) -> None:
    facts = json.loads(script.FACTS.read_text(encoding="utf-8"))
    assert script.PICTURE.read_text(encoding="utf-8") == script.draw(facts), "python scripts/draw_quickstart.py"
    assert script.PICTURE.stat().st_size < 150_000
    assert "docs/assets/quickstart.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_holds_every_row_its_number_and_the_claim_with_its_delta_unit_and_neighbours(script: ModuleType) -> None:
    facts = json.loads(script.FACTS.read_text(encoding="utf-8"))
    claim = facts["claim"]
    drawn = " ".join(ElementTree.fromstring(script.draw(facts)).itertext())
    for row in facts["rows"]:
        assert row["system"] in drawn and f"{row['nDCG@10']['mean']:.3f}" in drawn
    for word in (f"{claim['epsilon'] + 0.0005:.3f}", f"{claim['delta']:.3g}", claim["unit"], claim["neighbours"]):
        assert word in drawn


def test_the_numbers_are_those_of_a_run(script: ModuleType, tmp_path: Path) -> None:
    row = {"system": "BM25", "privacy": "no private data", "note": "", "data": "log", "data_sha256": "ab"}
    row["metrics"] = {name: {"mean": 0.5, "low": 0.4, "high": 0.6} for name in script.METRICS}  # type: ignore[assignment]
    (tmp_path / "results.json").write_text(json.dumps([row]), encoding="utf-8")
    claim = {"epsilon": 2.9994, "delta": 1e-5, "unit": "query", "neighbours": "zero_out", "protected": ["its text"]}
    trained = {"claim": {"statement": "Training made 2 steps. Batches were drawn so: …"}}
    card = {"claim": claim, "not_covered": ["a", "b"], "created": "2026-01-01"}
    counts = {"counts": {"queries": 30, "passages": 20}}
    for place, content in (("generator", trained), ("synthetic/data", card)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "privacy_card.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "synthetic" / "data" / "generation.json").write_text(json.dumps(counts), encoding="utf-8")
    facts = script.taken_from(tmp_path)
    assert facts["training"][0] == "Training made 2 steps." and facts["not_covered"] == 2
    drawn = script.draw(facts)
    for word in ("ε = 3.000", "0.500", "30 queries for 20 public passages"):
        assert word in drawn
