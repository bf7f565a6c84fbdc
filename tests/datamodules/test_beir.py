from __future__ import annotations

import json
import sys
import types
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from lit_dpret.datamodules import BeirDataModule
from lit_dpret.datamodules.beir_sets import BEIR_SETS, beir_set
from lit_dpret.errors import ConfigurationError, DataError


def write_set(folder: Path, *, splits: tuple[str, ...] = ("test",), passages: int = 4) -> Path:
    """A collection in BEIR's layout whose query i of a split is answered by passage i."""
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": f"d{i}", "title": "", "text": f"passage number {i}" if i else ""} for i in range(passages)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    queries = [{"_id": f"{split}{i}", "text": f"number {i}"} for split in splits for i in range(1, passages)]
    queries.append({"_id": "unjudged", "text": "a query of no split"})
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    for split in splits:
        lines = [f"{split}{i}\td{i}\t1\n" for i in range(1, passages)]
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


def evaluated(data: BeirDataModule, split: str | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return data.evaluation_set(split)


def test_the_registry_knows_the_protocol_of_every_set() -> None:
    public = [name for name in BEIR_SETS if "/" not in name]
    assert {name for name in public if BEIR_SETS[name].split != "test"} == {"msmarco"}
    assert {name for name in public if BEIR_SETS[name].drops_self_matches} == {"arguana", "quora"}
    assert sum(BEIR_SETS[name].queries for name in BEIR_SETS["cqadupstack"].members) == 13_145  # as BEIR's paper counts
    touche = beir_set("touche")
    assert touche.departures(passages=382_545, queries=49, judgements=2_214) == []
    assert touche.departures(passages=382_545, queries=49, judgements=2_962) == ["2,962 judgements instead of 2,214"]


def test_a_name_finds_its_folder_and_its_split(tmp_path: Path) -> None:
    write_set(tmp_path / "msmarco", splits=("train", "dev", "test"))
    data = BeirDataModule(name="MSMARCO", root=tmp_path)
    queries, qrels = evaluated(data)
    assert list(qrels) == ["dev1", "dev2", "dev3"] == list(queries)
    assert data.evaluation_split == "dev" and not data.drops_self_matches
    assert [row.query_id for row in data.pair_rows("train")] == ["train1", "train2", "train3"]
    named = BeirDataModule(name="scifact", root=write_set(tmp_path / "my copy"))
    assert list(evaluated(named)[1]) == ["test1", "test2", "test3"]


def test_only_the_evaluated_split_is_read_where_that_is_asked_for(tmp_path: Path) -> None:
    write_set(tmp_path / "fiqa", splits=("train", "test"))
    (tmp_path / "fiqa" / "qrels" / "train.tsv").write_text("broken")
    data = BeirDataModule(name="fiqa", root=tmp_path, only_evaluation=True)
    assert list(evaluated(data)[1]) == ["test1", "test2", "test3"]
    with pytest.raises(DataError, match=r"train\.tsv"):
        BeirDataModule(name="fiqa", root=tmp_path).setup()


def test_a_sample_and_a_wrong_split_are_told(tmp_path: Path) -> None:
    write_set(tmp_path / "msmarco", splits=("dev", "test"))
    data = BeirDataModule(name="msmarco", root=tmp_path)
    with pytest.warns(
        UserWarning, match=r"msmarco: .*; 3 queries instead of 6,980; .*43 TREC.* Scores are not comparable"
    ):
        data.evaluation_set()
    with pytest.warns(UserWarning, match="split test, where BEIR evaluates dev"):
        data.evaluation_set("test")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "trec-news"}, "datamodule.name='trec-news' is not a public BEIR set: msmarco"),
        ({"name": "cqadupstack", "root": "x"}, "the mean of 12 sets: choose one of them, as"),
        ({"name": "scifact"}, "datamodule.root=None and datamodule.download=false"),
        ({"name": "scifact", "root": "x", "download": True}, "and not both"),
    ],
)
def test_a_name_or_a_place_that_is_none_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BeirDataModule(**settings)


def test_a_set_that_is_not_there_is_refused_and_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ir_datasets", None)  # importing it would raise
    with pytest.raises(DataError, match="holds no scifact"):
        BeirDataModule(name="scifact", root=tmp_path).prepare_data()
    write_set(tmp_path / "msmarco", splits=("test",))
    with pytest.raises(DataError, match="no qrels of dev, the split that BEIR evaluates"):
        BeirDataModule(name="msmarco", root=tmp_path).setup()
    with pytest.raises(ConfigurationError, match=r"pip install .lit-dpret\[beir\]"):
        BeirDataModule(name="scifact", download=True).setup()


def test_download_takes_the_evaluated_split_of_ir_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    doc, query = namedtuple("doc", "doc_id text title"), namedtuple("query", "query_id text")
    judged = namedtuple("judged", "query_id doc_id relevance iteration")
    asked, grades = list[str](), [judged("q1", "d1", 2, "0")]

    def load(name: str) -> Any:
        asked.append(name)
        return types.SimpleNamespace(
            docs_iter=lambda: iter([doc("d1", "body", "title"), doc("d2", "", "")]),
            queries_iter=lambda: iter([query("q1", "what?"), query("q2", "unjudged")]),
            qrels_iter=lambda: iter(grades),
        )

    monkeypatch.setitem(sys.modules, "ir_datasets", types.SimpleNamespace(load=load))
    data = BeirDataModule(name="touche", download=True)
    data.prepare_data()
    assert evaluated(data) == ({"q1": "what?"}, {"q1": {"d1": 2}})
    assert data.public_passages() == {"d1": "title body", "d2": ""}
    assert set(asked) == {"beir/webis-touche2020/v2"}
    grades.append(judged("q1", "d1", 1, "0"))
    with pytest.raises(DataError, match=r"datamodule\.repeated_judgements"):
        BeirDataModule(name="touche", download=True).setup("test")
    kept = BeirDataModule(name="touche", download=True, repeated_judgements="last")
    kept.setup("test")
    assert evaluated(kept)[1] == {"q1": {"d1": 1}}
