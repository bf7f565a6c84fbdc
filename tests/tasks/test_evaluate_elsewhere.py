"""MTEB and BEIR, by the snippets of the page, find the numbers that `task=evaluate` finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_snippets import saved_encoder
from shown_commands import snippets

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.tasks import Evaluate
from lit_dpret.tasks.parts import Parts


def no_part(*_: object, **__: object) -> None:
    raise AssertionError("an evaluation builds nothing but the data")


def test_mteb_and_beir_find_the_number_that_is_found_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mteb")
    pytest.importorskip("beir")
    monkeypatch.chdir(tmp_path)
    saved_encoder(tmp_path)
    theirs: dict[str, float] = {"__name__": "shown"}  # type: ignore[dict-item]
    for _, text in snippets("docs/howto/tools.md"):
        exec(text, theirs)
    parts = Parts(
        run_dir=tmp_path / "evaluation", make_privacy=no_part, make_module=no_part, make_trainer=no_part,
        make_datamodule=lambda: PairsDataModule(folder="collection"),
    )  # fmt: skip
    ours = Evaluate(encoder="runs/encoder/model", metrics=["ndcg@10"]).run(parts)
    (value,) = (found for name, found in ours.items() if name.lower().startswith("ndcg"))
    assert value > 0.05
    assert theirs["ndcg_of_mteb"] == pytest.approx(value, abs=1e-5)  # they round
    assert theirs["ndcg_of_beir"] == pytest.approx(value, abs=1e-5)
