"""A collection that others made is measured: what does not concern the split is counted and named, not refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_tasks import no_parts, write_beir

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.tasks import Evaluate

HEADER = "query-id\tcorpus-id\tscore\n"
TEST = "q1\tp1\t2\nq1\tp2\t0\nq2\tp2\t1\n"


def collection(folder: Path, **qrels: str) -> Path:
    """Two passages and five queries, judged as said."""
    texts = {"p1": "flood insurance", "p2": "life policy", "p3": ""}
    asked = {"q1": "flood", "q2": "life", "q3": "policy", "q4": "house", "q5": "insurance"}
    write_beir(folder, texts, asked, {})
    for split, lines in qrels.items():
        (folder / "qrels" / f"{split}.tsv").write_text(HEADER + lines)
    return folder


def measured(folder: Path, out: Path, *, data: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    parts = no_parts(out, make_datamodule=lambda: PairsDataModule(folder=folder, **(data or {})))
    Evaluate(encoder="bm25", metrics=["mrr@1"], **settings).run(parts)
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return found


def test_another_split_is_named_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = measured(collection(tmp_path / "clean", test=TEST + "q4\tp1\t0\n"), tmp_path / "a")
    folder = collection(
        tmp_path / "foreign",
        train="q5\tp1\t0\nq1\tp1\t1\nq9\tp1\t1\nq5\tp9\t1\nq5\tp2\thigh\n",
        dev="no judgement\n",
        test=TEST + "q4\tp1\t0\nq4\tp7\t0\n",
    )
    capsys.readouterr()
    found = measured(folder, tmp_path / "b")
    assert found["metrics"] == clean["metrics"] and found["queries"] == 3 and found["without_relevant"] == 1
    told = found["left_out"]
    for part in ("q3", "q4", "p3", "p7", "'q9'", "'p9'", "q5", "dev"):
        assert any(part in line for line in told), (part, told)
    shown = capsys.readouterr().out
    assert all(line in shown for line in told[:1])
    assert "split test" in shown and "task.whose" in shown and "no epsilon" in shown
    measured(folder, tmp_path / "c", whose="public")
    assert "no epsilon" not in capsys.readouterr().out
    assert clean["left_out"] and all("train" not in line for line in clean["left_out"])


@pytest.mark.parametrize("lines", ["q9\tp1\t1\n", "q1\tp9\t1\n", "q2\tp1\thigh\n"])
def test_what_would_change_a_number_of_the_split_is_refused(lines: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test\.tsv line 5"):
        measured(collection(tmp_path / "c", test=TEST + lines), tmp_path / "out")


def test_repeated_judgements_are_listed_all_at_once_and_a_setting_decides(tmp_path: Path) -> None:
    folder = collection(tmp_path / "c", test=TEST + "q1\tp1\t0\nq2\tp2\t1\nq2\tp2\t3\n")
    with pytest.raises(DataError, match=r"datamodule\.repeated_judgements") as refusal:
        measured(folder, tmp_path / "out")
    assert all(part in str(refusal.value) for part in ("line 5", "line 6", "line 7", "'q1'", "'q2'"))
    for choice, relevant in (("highest", 2), ("first", 2), ("last", 0)):
        measured(folder, tmp_path / choice, data={"repeated_judgements": choice})
        assert f"q1 0 p1 {relevant}\n" in (tmp_path / choice / "qrels.trec").read_text()
    with pytest.raises(ConfigurationError, match=r"datamodule\.repeated_judgements"):
        PairsDataModule(folder=folder, repeated_judgements="lowest")


def test_training_refuses_what_an_evaluation_only_counts(tmp_path: Path) -> None:
    folder = collection(tmp_path / "c", train="q1\tp1\t1\nq5\tp1\t0\n", test="q2\tp2\t1\n")
    with pytest.raises(DataError):
        PairsDataModule(folder=folder).setup("fit")


def test_the_words_of_bm25_are_settings_and_stand_in_the_result(tmp_path: Path) -> None:
    folder = collection(tmp_path / "c", test="q1\tp1\t1\n")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("flood ", "floods "))
    plain = measured(folder, tmp_path / "a")
    other = measured(folder, tmp_path / "b", bm25={"k1": 1.2, "stemmer": None})
    assert plain["fingerprints"] == []
    assert plain["bm25"] == {"k1": 0.9, "b": 0.4, "stemmer": "english", "stopwords": "en"}
    assert other["bm25"] == {"k1": 1.2, "b": 0.4, "stemmer": None, "stopwords": "en"}
    assert [found["metrics"]["mrr@1"]["mean"] for found in (plain, other)] == [1.0, 0.0], "no word is the query's"
    with pytest.raises(ConfigurationError, match=r"task\.bm25\.k2"):
        Evaluate(encoder="bm25", bm25={"k2": 1.0})


def test_an_evaluation_says_whose_its_queries_are_as_declared(tmp_path: Path) -> None:
    folder = collection(tmp_path / "data", test=TEST)
    data = {"drop_queries_without_passage": True}
    assert measured(folder, tmp_path / "a", data=data)["whose"] is None
    assert measured(folder, tmp_path / "b", data=data, whose="public")["whose"] == "public"
