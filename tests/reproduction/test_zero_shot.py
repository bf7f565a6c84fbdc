from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_generator import write_parent_card
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import no_parts, write_beir

from lit_dpret.datamodules.beir import BEIR_SETS
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import DataError, ResumeError
from reproduction import ZeroShot

WORDS = ["harbour", "lantern", "orchard", "saddle", "thunder", "velvet", "walnut", "zephyr"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not comparable.*")
        yield


def write_set(folder: Path, *, found: int, split: str = "test") -> None:
    """Four queries, of which BM25 answers the first ``found`` with the right passage, and no other with any."""
    corpus = {f"d{i}": f"{word} common" for i, word in enumerate(WORDS)}
    queries = {f"q{i}": WORDS[i] if i < found else "nothing" for i in range(4)}
    write_beir(folder, corpus, queries, {split: [(f"q{i}", f"d{i}") for i in range(4)]})


def zero_shot(root: Path, sets: list[str], **more: Any) -> ZeroShot:
    return ZeroShot(root=root, sets=sets, encoder="bm25", metrics=["ndcg@10", "success@1"], top_k=10, **more)


def test_every_set_that_is_there_is_measured_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_set(tmp_path / "beir" / "scifact", found=3)
    write_set(tmp_path / "beir" / "msmarco", found=1, split="dev")
    found = zero_shot(tmp_path / "beir", ["scifact", "msmarco", "covid"]).run(no_parts(tmp_path / "run"))
    assert found == {"scifact": 0.75, "msmarco": 0.25}
    table = json.loads((tmp_path / "run" / "zero_shot.json").read_text())
    assert table["missing"] == ["trec-covid"] and table["mean_of"] == "mean of 2 of 3"
    assert table["mean"]["success@1"]["mean"] == 0.5
    assert "missing: trec-covid" in capsys.readouterr().out
    assert "4 queries instead of 300" in (tmp_path / "run" / "zero_shot.md").read_text()
    assert len((tmp_path / "run" / "zero_shot.csv").read_text().splitlines()) == 5


def test_the_page_names_the_promise_of_a_card_where_it_is_that_of_the_encoder(tmp_path: Path) -> None:
    write_set(tmp_path / "scifact", found=3)
    tower = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    encoder = tmp_path / "encoder"
    save_sentence_transformer(encoder, tower, tower)

    def promise(run: str) -> str:
        task = ZeroShot(root=tmp_path, sets=["scifact"], encoder=str(encoder), metrics=["ndcg@10"], top_k=10)
        task.run(no_parts(tmp_path / run))
        return str(json.loads((tmp_path / run / "zero_shot.json").read_text(encoding="utf-8"))["privacy"])

    assert "not known" in promise("bare")
    write_parent_card(encoder)
    (encoder / "README.md").write_text("as an export writes it", encoding="utf-8")
    assert promise("carded").startswith("epsilon = ")
    weights = next(encoder.rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    with pytest.raises(DataError, match="safetensors"):
        promise("other")
    assert not (tmp_path / "other").exists(), "before anything is measured"


def test_cqadupstack_is_the_mean_of_its_forums_and_counts_as_one_set(tmp_path: Path) -> None:
    forums = BEIR_SETS["cqadupstack"].members
    for place, forum in enumerate(forums):
        write_set(tmp_path / forum, found=4 if place < 3 else 0)
    write_set(tmp_path / "scifact", found=4)
    found = zero_shot(tmp_path, ["cqadup", "scifact"]).run(no_parts(tmp_path / "run"))
    assert found == {"cqadupstack": pytest.approx(0.25), "scifact": 1.0}
    table = json.loads((tmp_path / "run" / "zero_shot.json").read_text())
    assert table["mean"]["ndcg@10"]["mean"] == pytest.approx((0.25 + 1.0) / 2)
    assert table["sets"][0]["queries"] == 48


def test_a_run_that_was_stopped_goes_on_with_the_sets_that_are_left(tmp_path: Path) -> None:
    write_set(tmp_path / "beir" / "fiqa", found=2)
    write_set(tmp_path / "beir" / "scifact", found=4)
    (tmp_path / "beir" / "scifact" / "queries.jsonl").write_text("broken\n")
    with pytest.raises(DataError, match="malformed JSON"):
        zero_shot(tmp_path / "beir", ["fiqa", "scifact"]).run(no_parts(tmp_path / "run"))
    written = (tmp_path / "run" / "fiqa" / "run.trec").stat().st_mtime_ns
    for name in ("scifact", "fiqa"):  # fiqa is not read again, so it may be broken now
        (tmp_path / "beir" / name / "queries.jsonl").unlink()
    (tmp_path / "beir" / "fiqa" / "queries.jsonl").write_text("broken\n")
    write_set(tmp_path / "whole", found=4)
    (tmp_path / "whole" / "queries.jsonl").rename(tmp_path / "beir" / "scifact" / "queries.jsonl")
    found = zero_shot(tmp_path / "beir", ["fiqa", "scifact"]).run(no_parts(tmp_path / "run", resume=True))
    assert found == {"fiqa": 0.5, "scifact": 1.0}
    assert (tmp_path / "run" / "fiqa" / "run.trec").stat().st_mtime_ns == written
    with pytest.raises(ResumeError, match="other settings"):
        zero_shot(tmp_path / "beir", ["scifact"]).run(no_parts(tmp_path / "run", resume=True))
    with pytest.raises(ResumeError, match="resume=true"):
        zero_shot(tmp_path / "beir", ["fiqa", "scifact"]).run(no_parts(tmp_path / "run"))


def test_a_query_of_arguana_does_not_find_itself_and_one_of_scifact_may(tmp_path: Path) -> None:
    for name in ("arguana", "scifact"):
        write_set(tmp_path / name, found=4)
        (tmp_path / name / "queries.jsonl").write_text(json.dumps({"_id": "d0", "text": "harbour common"}) + "\n")
        (tmp_path / name / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nd0\td1\t1\n")
    zero_shot(tmp_path, ["arguana", "scifact"]).run(no_parts(tmp_path / "run"))
    first = {name: (tmp_path / "run" / name / "run.trec").read_text().split()[2] for name in ("arguana", "scifact")}
    assert first["scifact"] == "d0" != first["arguana"]


def test_a_collection_that_is_no_set_of_beir_is_measured_beside_them_and_said_to_be_none(tmp_path: Path) -> None:
    write_set(tmp_path / "scifact", found=4)
    write_set(tmp_path / "mine", found=2)
    told = zero_shot(tmp_path, ["scifact"], also=["mine", "absent"]).run(no_parts(tmp_path / "run"))
    assert set(told) == {"scifact", "mine"} and told["mine"] < told["scifact"]
    facts = json.loads((tmp_path / "run" / "zero_shot.json").read_text())
    notes = {one["name"]: one["note"] for one in facts["sets"]}
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "run").glob("zero_shot.*")}
    assert modes == {0o600}, "nobody said that it is public"
    assert notes["mine"] and facts["missing"] == ["absent"]
    with pytest.raises(DataError, match="holds none of the sets"):
        zero_shot(tmp_path, ["fiqa", "nq"]).run(no_parts(tmp_path / "none"))
    with pytest.raises(DataError, match=r"task\.root"):
        zero_shot(tmp_path / "gone", ["fiqa"])
