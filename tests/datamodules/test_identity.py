"""Which data a result is about: by a name without a path, and by a hash of what was measured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from tiny_tasks import parts, retriever, write_log

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.identity import content_sha256, data_facts
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.report.table import RowResult, from_json, write_csv, write_json
from lit_dpret.tasks import Compare, Encode, Evaluate


def test_the_hash_is_that_of_the_entries_in_any_order_and_of_nothing_else() -> None:
    texts = {"a": "one", "b": "two"}
    same = content_sha256(texts, {"q": {"a": 1, "b": 0}})
    assert same == content_sha256(dict(reversed(texts.items())), {"q": {"b": 0, "a": 1}})
    others: list[tuple[Any, ...]] = [
        ({"a": "one"}, {"q": {"a": 1, "b": 0}}), ({"a": "two", "b": "one"}, {"q": {"a": 1, "b": 0}}),
        (texts, {"q": {"a": 1, "b": 1}}), ({"q": {"a": 1, "b": 0}}, texts), (texts,), ({**texts, "c": ""}, {}),
    ]  # fmt: skip
    assert len({same, *(content_sha256(*other) for other in others)}) == 1 + len(others)


def test_a_data_set_is_named_without_its_place_before_and_after_it_is_read(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "somewhere" / "my log")
    data = PairsDataModule(folder=folder)
    assert data_facts(data) == {"data": "my log"} == data_facts(folder)
    data.setup("fit")
    named = data_facts(data, data.public_passages())
    assert named["data"] == "my log" and len(named["data_sha256"]) == 64
    assert "somewhere" not in json.dumps(named)


def evaluated(folder: Path, name: str) -> Path:
    made = parts(folder, run_dir=folder / name, make_datamodule=partial(PairsDataModule, folder=folder / "log"))
    Evaluate(encoder="bm25", split="test").run(made)
    return folder / name


def test_an_evaluation_and_a_comparison_name_the_same_data_and_a_comparison_says_where_they_differ(
    tmp_path: Path, capsys: Any
) -> None:
    write_log(tmp_path / "log")
    first, second = evaluated(tmp_path, "a"), evaluated(tmp_path, "b")
    data = PairsDataModule(folder=tmp_path / "log")
    data.setup("test")
    facts = json.loads((first / "evaluation.json").read_text(encoding="utf-8"))
    about = data_facts(data, data.public_passages(), *data.evaluation_set("test"))
    assert {name: facts[name] for name in about} == about
    Compare(run_a=first, run_b=second, resamples=10).run(parts(tmp_path, run_dir=tmp_path / "c"))
    told = json.loads((tmp_path / "c" / "comparison.json").read_text(encoding="utf-8"))
    assert [{name: run[name] for name in about} for run in told["data"]["log"]] == [about, about]
    assert "note:" not in capsys.readouterr().out
    facts["data_sha256"] = "0" * 64
    (second / "evaluation.json").write_text(json.dumps(facts), encoding="utf-8")
    Compare(run_a=first, run_b=second, resamples=10).run(parts(tmp_path, run_dir=tmp_path / "d"))
    assert "000000000000" in capsys.readouterr().out


def test_the_rows_of_a_pipeline_name_their_data(tmp_path: Path) -> None:
    rows, about = [RowResult(system="BM25")], {"data": "log", "data_sha256": "ab"}
    write_json(rows, tmp_path / "r.json", about)
    write_csv(rows, tmp_path / "r.csv", about)
    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert found[0].items() >= about.items() and from_json(found) == rows
    header, line = (tmp_path / "r.csv").read_text(encoding="utf-8").splitlines()
    assert header.endswith("data,data_sha256") and line.endswith("log,ab")


def test_embeddings_name_the_data_of_their_texts(tmp_path: Path) -> None:
    retriever(privacy=NoPrivacy()).save_model(tmp_path / "encoder")
    log = write_log(tmp_path / "log")
    made = parts(tmp_path, make_datamodule=partial(PairsDataModule, folder=log))
    Encode(encoder=str(tmp_path / "encoder")).run(made)
    data = PairsDataModule(folder=log)
    data.setup("test")
    manifest = json.loads((tmp_path / "run" / "embeddings" / "index.json").read_text(encoding="utf-8"))
    assert manifest["about"] == data_facts(data, data.public_passages())
