"""`task=encode`, `task=index`, `task=search` and `task.search=`, as the command line builds them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import no_parts

from lit_dpret.datamodules.passage_store import PassageStore, build_store
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.encoders.bulk import in_order
from lit_dpret.encoders.st_folder import save_sentence_transformer
from lit_dpret.errors import ConfigurationError
from lit_dpret.tasks import Encode, Evaluate, Index, Search
from lit_dpret.tasks.parts import Parts

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


def parts(folder: Path) -> Parts:
    return no_parts(folder, make_datamodule=Data)


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    made = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=8))
    save_sentence_transformer(tmp_path / "encoder", made, made)
    return str(tmp_path / "encoder")


def test_a_corpus_is_indexed_and_asked(encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert Encode(encoder=encoder).run(parts(run)) == {"texts": 100.0}
    assert Index(embeddings=run / "embeddings").run(parts(run)) == {"texts": 100.0}
    capsys.readouterr()
    Search(index=run / "index", query="flood house", top_k=2).run(parts(run))
    first, text, _second, _ = capsys.readouterr().out.splitlines()
    assert first.split() == ["1", "1.0000", "p59"] and text.strip() == "flood house"
    with pytest.raises(ConfigurationError, match="texts can be guessed"):
        Encode(encoder=encoder, side="query").run(parts(tmp_path / "private"))
    Encode(encoder=encoder, side="query", queries="private").run(parts(tmp_path / "private"))
    assert "PRIVATE: these are embeddings of private queries" in capsys.readouterr().out


def test_a_search_that_keeps_no_embeddings_gives_the_numbers_of_one_that_does(encoder: str, tmp_path: Path) -> None:
    streamed = Evaluate(encoder=encoder, top_k=50).run(parts(tmp_path / "a"))
    assert streamed == Evaluate(encoder=encoder, top_k=50, cache_dir=tmp_path / "cache").run(parts(tmp_path / "b"))
    ahead = Evaluate(encoder=encoder, top_k=50, device="cpu:0").run(parts(tmp_path / "c"))  # is not "cpu": overlapped
    assert ahead == streamed
    assert streamed["ndcg@10"] > 0.5


def test_a_stored_corpus_is_encoded_and_no_list(encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_store(tmp_path / "store", PASSAGES.items(), print)
    store = PassageStore(tmp_path / "store")
    made = []
    for name, passages in (("held", PASSAGES), ("stored", store)):
        monkeypatch.setattr(Data, "public_passages", lambda self, passages=passages: passages)
        scores = Evaluate(encoder=encoder, top_k=50).run(parts(tmp_path / name))
        cached = Evaluate(encoder=encoder, top_k=50, cache_dir=tmp_path / "cache" / name).run(parts(tmp_path / name))
        Encode(encoder=encoder).run(parts(tmp_path / name))
        files = [(tmp_path / name / "embeddings" / file).read_bytes() for file in ("embeddings.bin", "texts.jsonl")]
        made.append((scores, cached, files))
    assert made[0] == made[1]
    assert not isinstance(in_order(store), list) and list(in_order(store)) == in_order(PASSAGES)
