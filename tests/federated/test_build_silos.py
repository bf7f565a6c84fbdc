"""`task=build_silos` on small sources, and on the real ones where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules.silo_folder import read_silo, silo_folders
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.tasks import BuildSilos
from lit_dpret.tasks.parts import Parts


def build(run: Path, **settings: Any) -> Path:
    nothing: Any = None
    BuildSilos(**settings).run(Parts(run, nothing, nothing, nothing, nothing))
    return run / "silos"


def test_planted_silos_are_written_and_their_sizes_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = build(tmp_path, source="planted", planted={"clients": 2, "entities": 5})
    assert list(silo_folders(out)) == ["client0", "client1"] and "| client0 |        5 |" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="nothing is overwritten"):
        build(tmp_path, source="planted")


def test_silos_that_are_there_are_not_built_again_on_resume_and_another_source_is_refused(tmp_path: Path) -> None:
    nothing: Any = None
    out = build(tmp_path, source="planted", planted={"clients": 2, "entities": 5})
    made = (out / "manifest.json").stat().st_mtime_ns
    again = Parts(tmp_path, nothing, nothing, nothing, nothing, resume=True)
    assert BuildSilos(source="planted").run(again) == {"clients": 2.0}
    assert (out / "manifest.json").stat().st_mtime_ns == made
    with pytest.raises(ResumeError, match="was built of planted, not insuranceqa"):
        BuildSilos(source="insuranceqa").run(again)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "yahoo"}, "task.source='yahoo' is not one of"),
        ({"source": "newsqa"}, "needs task.newsqa"),
        ({"source": "newsqa", "newsqa": "x.json"}, "needs task.cnn_urls"),
        ({"source": "medquad"}, "needs task.folder"),
        ({"source": "planted", "planted": {"clints": 3}}, "clints"),
        ({"source": "planted", "planted": {"told": 2, "questions": 3}}, "questions=3, told=2"),
    ],
)
def test_a_source_that_cannot_be_built_is_refused_before_anything_is_read(settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BuildSilos(**settings)


def test_squad_comes_from_its_json_too(tmp_path: Path) -> None:
    paragraphs = [
        {"context": f"It began in {i}. It ended in {i + 50}.",
         "qas": [{"id": f"q{i}", "question": "When?", "answers": [{"answer_start": 12, "text": str(i)}]}]}
        for i in range(10, 40)
    ]  # fmt: skip
    (tmp_path / "dev-v1.1.json").write_text(json.dumps({"data": [{"title": "Old War", "paragraphs": paragraphs}]}))
    out = build(tmp_path / "run", source="squad", folder=tmp_path / "dev-v1.1.json", clients=1, min_train=5, min_test=1)
    silo = read_silo(silo_folders(out)["Old-War"])
    assert all(silo.sentences[sid].startswith("It began") for query in silo.queries for sid in query.positives)
