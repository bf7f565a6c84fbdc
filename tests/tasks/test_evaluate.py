"""Evaluation, search and comparison: what does not concern the split is counted and named, not refused."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from page_snippets import saved_encoder
from shown_commands import snippets
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import no_parts, write_beir

from lit_dpret.cli import with_task
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.datamodules.identity import data_facts
from lit_dpret.datamodules.passage_store import PassageStore, build_store
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.bulk import in_order
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.retrieval.trec_runs import write_run
from lit_dpret.tasks import Compare, Encode, Evaluate, Index, Search
from lit_dpret.tasks.index_folder import IndexFolder
from lit_dpret.tasks.parts import Parts

HEADER = "query-id\tcorpus-id\tscore\n"
TEST = "q1\tp1\t2\nq1\tp2\t0\nq2\tp2\t1\n"


def judged_as(folder: Path, **qrels: str) -> Path:
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
    clean = measured(judged_as(tmp_path / "clean", test=TEST + "q4\tp1\t0\n"), tmp_path / "a")
    folder = judged_as(
        tmp_path / "foreign",
        train="q5\tp1\t0\nq1\tp1\t1\nq9\tp1\t1\nq5\tp9\t1\nq5\tp2\thigh\n",
        dev="no judgement\n",
        test=TEST + "q4\tp1\t0\nq4\tp7\t0\n",
    )
    capsys.readouterr()
    found = measured(folder, tmp_path / "b")
    assert found["data"] == "foreign" and len(found["data_sha256"]) == 64
    assert found["metrics"] == clean["metrics"] and found["queries"] == 3 and found["without_relevant"] == 1
    told = found["left_out"]
    for part in ("q3", "q4", "p3", "p7", "'q9'", "'p9'", "q5", "dev"):
        assert any(part in line for line in told), (part, told)
    shown = capsys.readouterr().out
    assert all(line in shown for line in told[:1])
    assert "split test" in shown and "task.whose" in shown and "no epsilon" in shown
    assert measured(folder, tmp_path / "c", whose="public")["whose"] == "public" and found["whose"] is None
    assert "no epsilon" not in capsys.readouterr().out
    assert clean["left_out"] and all("train" not in line for line in clean["left_out"])


@pytest.mark.parametrize("lines", ["q9\tp1\t1\n", "q1\tp9\t1\n", "q2\tp1\thigh\n"])
def test_what_would_change_a_number_of_the_split_is_refused(lines: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test\.tsv line 5"):
        measured(judged_as(tmp_path / "c", test=TEST + lines), tmp_path / "out")


def test_repeated_judgements_are_listed_all_at_once_and_a_setting_decides(tmp_path: Path) -> None:
    folder = judged_as(tmp_path / "c", test=TEST + "q1\tp1\t0\nq2\tp2\t1\nq2\tp2\t3\n")
    with pytest.raises(DataError, match=r"datamodule\.repeated_judgements") as refusal:
        measured(folder, tmp_path / "out")
    assert all(part in str(refusal.value) for part in ("line 5", "line 6", "line 7", "'q1'", "'q2'"))
    for choice, relevant in (("highest", 2), ("first", 2), ("last", 0)):
        measured(folder, tmp_path / choice, data={"repeated_judgements": choice})
        assert f"q1 0 p1 {relevant}\n" in (tmp_path / choice / "qrels.trec").read_text()
    with pytest.raises(ConfigurationError, match=r"datamodule\.repeated_judgements"):
        PairsDataModule(folder=folder, repeated_judgements="lowest")


def test_the_words_of_bm25_are_settings_and_stand_in_the_result(tmp_path: Path) -> None:
    folder = judged_as(tmp_path / "c", test="q1\tp1\t1\n")
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


# -- encode, index and search --------------------------------------------------------------------

WORDS = ["how", "to", "file", "a", "claim", "flood", "insurance", "cover", "my", "house"]
PASSAGES = {f"p{i}{j}": f"{one} {two}" for i, one in enumerate(WORDS) for j, two in enumerate(WORDS)}
QUERIES = {f"q{i}": f"{one} house" for i, one in enumerate(WORDS)}


class Data:
    def prepare_data(self) -> None:
        """Nothing to prepare."""

    def setup(self, stage: str) -> None:
        """Nothing to set up."""

    def public_passages(self) -> dict[str, str]:
        return PASSAGES

    def evaluation_set(self, split: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        return QUERIES, {name: {f"p{i}9": 1} for i, name in enumerate(QUERIES)}


def searched(folder: Path) -> Parts:
    return no_parts(folder, make_datamodule=Data)


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    made = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=8))
    save_sentence_transformer(tmp_path / "encoder", made, made)
    return str(tmp_path / "encoder")


def test_a_corpus_is_indexed_and_asked(encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert Encode(encoder=encoder).run(searched(run)) == {"texts": 100.0}
    assert Index(embeddings=run / "embeddings").run(searched(run)) == {"texts": 100.0}
    assert IndexFolder(run / "index").manifest.about == data_facts(Data(), PASSAGES)
    capsys.readouterr()
    Search(index=run / "index", query="flood house", top_k=2).run(searched(run))
    first, text, _second, _ = capsys.readouterr().out.splitlines()
    assert first.split() == ["1", "1.0000", "p59"] and text.strip() == "flood house"
    with pytest.raises(ConfigurationError, match="texts can be guessed"):
        Encode(encoder=encoder, side="query").run(searched(tmp_path / "private"))
    Encode(encoder=encoder, side="query", queries="private").run(searched(tmp_path / "private"))
    assert "PRIVATE: these are embeddings of private queries" in capsys.readouterr().out


def test_a_search_that_keeps_no_embeddings_gives_the_numbers_of_one_that_does(encoder: str, tmp_path: Path) -> None:
    streamed = Evaluate(encoder=encoder, top_k=50).run(searched(tmp_path / "a"))
    assert streamed == Evaluate(encoder=encoder, top_k=50, cache_dir=tmp_path / "cache").run(searched(tmp_path / "b"))
    ahead = Evaluate(encoder=encoder, top_k=50, device="cpu:0").run(searched(tmp_path / "c"))  # overlapped
    assert ahead == streamed
    assert streamed["ndcg@10"] > 0.5


def test_a_stored_corpus_is_encoded_and_no_list(encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_store(tmp_path / "store", PASSAGES.items(), print)
    store = PassageStore(tmp_path / "store")
    made = []
    for name, passages in (("held", PASSAGES), ("stored", store)):
        monkeypatch.setattr(Data, "public_passages", lambda self, passages=passages: passages)
        scores = Evaluate(encoder=encoder, top_k=50).run(searched(tmp_path / name))
        cached = Evaluate(encoder=encoder, top_k=50, cache_dir=tmp_path / "cache" / name).run(searched(tmp_path / name))
        Encode(encoder=encoder).run(searched(tmp_path / name))
        files = [(tmp_path / name / "embeddings" / file).read_bytes() for file in ("embeddings.bin", "texts.jsonl")]
        made.append((scores, cached, files))
    assert made[0] == made[1]
    assert not isinstance(in_order(store), list) and list(in_order(store)) == in_order(PASSAGES)


# -- compare -------------------------------------------------------------------------------------

QRELS = "".join(f"q{q} 0 a 1\n" for q in range(20))
WINS = {f"q{q}": {"a": 2.0, "b": 1.0} for q in range(20)}
LOSES = {f"q{q}": {"a": 0.5, "b": 1.0} for q in range(20)}


def system(folder: Path, run: dict[str, dict[str, float]], sets: tuple[str, ...] = ("",)) -> Path:
    for name in sets:
        write_run(folder / name / "run.trec", run)
        (folder / name / "qrels.trec").write_text(QRELS)
    return folder


def test_two_run_files_are_compared_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a.trec", WINS)
    write_run(tmp_path / "b.trec", LOSES)
    (tmp_path / "qrels.trec").write_text(QRELS)
    task = Compare(run_a=tmp_path / "a.trec", run_b=tmp_path / "b.trec", metrics=["mrr@10"], resamples=1000)
    assert task.run(no_parts(tmp_path / "out")) == {"a/mrr@10": 0.5}
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").glob("comparison.*")} == {0o600}
    assert found["cells"][0]["p_value"] == pytest.approx(1 / 1001) and found["cells"][0]["significant"]
    assert "+0.5000 \\[+0.5000, +0.5000\\]" in (tmp_path / "out" / "comparison.md").read_text()
    assert "MRR@10" in capsys.readouterr().out


def test_folders_are_compared_on_the_data_sets_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = system(tmp_path / "a", WINS, ("scifact", "cqadupstack/unix", "fiqa"))
    b = system(tmp_path / "b", LOSES, ("scifact", "cqadupstack/unix", "quora"))
    found = Compare(run_a=a, run_b=b, metrics=["mrr@10"], resamples=100).run(no_parts(tmp_path / "out"))
    assert found == {"cqadupstack/unix/mrr@10": 0.5, "scifact/mrr@10": 0.5}
    assert "not compared: fiqa (a only), quora (b only)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "shown"), [("log_split", "log_split"), ("mine", "log_split / mine"), (None, "log_split")]
)
def test_evaluations_are_compared_under_the_name_of_their_data(
    other: str | None, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = system(tmp_path / "a", WINS), system(tmp_path / "b", LOSES)
    (a / "evaluation.json").write_text(json.dumps({"data": "log_split", "data_sha256": "1" * 64}))
    (b / "evaluation.json").write_text(json.dumps({"data": other} if other else {}))
    found = Compare(run_a=a, run_b=b, metrics=["mrr@10"], resamples=10).run(no_parts(tmp_path / "out"))
    assert found == {f"{shown}/mrr@10": 0.5}
    told = capsys.readouterr().out
    assert shown in told and "111111111111" in told, "where the data differ, their hashes are told"
    assert f"| {shown} " in (tmp_path / "out" / "comparison.md").read_text()


@pytest.mark.parametrize(("owners", "cautioned"), [(("private", "private"), True), (("public", None), True),
                                                  (("public", "public"), False)])  # fmt: skip
def test_a_comparison_on_queries_that_are_not_public_says_that_no_epsilon_covers_it(
    owners: tuple[str | None, str | None], cautioned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = system(tmp_path / "a", WINS), system(tmp_path / "b", LOSES)
    for folder, owner in zip((a, b), owners, strict=True):
        facts = {"data": "log", "data_sha256": "1" * 64, "whose": owner}
        (folder / "evaluation.json").write_text(json.dumps(facts))
    Compare(run_a=a, run_b=b, metrics=["mrr@10"], resamples=10).run(no_parts(tmp_path / "out"))
    written = (tmp_path / "out" / "comparison.md").read_text()
    told = capsys.readouterr().out
    assert ["No epsilon" in text for text in (told, written)] == [cautioned] * 2 and "note:" not in told
    facts = json.loads((tmp_path / "out" / "comparison.json").read_text())["data"]["log"]
    assert {run["data_sha256"] for run in facts} == {"1" * 64}


def test_runs_that_were_judged_differently_are_refused(tmp_path: Path) -> None:
    a, b = system(tmp_path / "a", WINS), system(tmp_path / "b", LOSES)
    (b / "qrels.trec").write_text(QRELS.replace("q0 0 a 1", "q0 0 a 2"))
    with pytest.raises(DataError, match="differ"):
        Compare(run_a=a, run_b=b).run(no_parts(tmp_path / "out"))
    Compare(run_a=a, run_b=b, qrels=a / "qrels.trec", resamples=10).run(no_parts(tmp_path / "out"))


def test_runs_without_judgements_or_without_a_common_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        Compare(run_a=tmp_path / "nowhere", run_b=tmp_path / "nowhere").run(no_parts(tmp_path / "out"))
    write_run(tmp_path / "a.trec", WINS)
    with pytest.raises(DataError, match=r"next to them.*task\.qrels"):
        Compare(run_a=tmp_path / "a.trec", run_b=tmp_path / "a.trec").run(no_parts(tmp_path / "out"))
    a, b = system(tmp_path / "a", WINS, ("one", "two")), system(tmp_path / "b", LOSES, ("three", "four"))
    with pytest.raises(DataError, match="no data set in common"):
        Compare(run_a=a, run_b=b).run(no_parts(tmp_path / "out"))
    with pytest.raises(ConfigurationError, match="one file of judgements, but the runs cover 2 data sets"):
        Compare(run_a=a, run_b=a, qrels=a / "one" / "qrels.trec").run(no_parts(tmp_path / "out"))


def test_the_short_form_takes_two_runs_with_any_characters_in_their_paths() -> None:
    assert with_task(["compare", "a b/it's", "c", "task.seed=1"]) == [
        "task=compare", "task.run_a='a b/it\\'s'", "task.run_b='c'", "task.seed=1",
    ]  # fmt: skip
    assert with_task(["compare", "task.run_a=x"]) == ["task=compare", "task.run_a=x"]
    for wrong in (["compare", "a"], ["compare", "a", "b", "c"]):
        with pytest.raises(ConfigurationError, match="compare takes RUN_A RUN_B"):
            with_task(wrong)
