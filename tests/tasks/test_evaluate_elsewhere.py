"""MTEB and BEIR, by the snippets of the page, find the numbers that `task=evaluate` finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_snippets import saved_encoder
from shown_commands import snippets
from tiny_tasks import no_parts

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.tasks import Evaluate


def test_mteb_and_beir_find_the_number_that_is_found_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mteb")
    pytest.importorskip("beir")
    monkeypatch.chdir(tmp_path)
    saved_encoder(tmp_path)
    theirs: dict[str, float] = {"__name__": "shown"}  # type: ignore[dict-item]
    for _, text in snippets("docs/howto/tools.md"):
        exec(text, theirs)
    parts = no_parts(tmp_path / "evaluation", make_datamodule=lambda: PairsDataModule(folder="collection"))
    ours = Evaluate(encoder="runs/encoder/model", metrics=["ndcg@10"]).run(parts)
    (value,) = (found for name, found in ours.items() if name.lower().startswith("ndcg"))
    assert value > 0.05
    assert theirs["ndcg_of_mteb"] == pytest.approx(value, abs=1e-5)  # they round
    assert theirs["ndcg_of_beir"] == pytest.approx(value, abs=1e-5)
