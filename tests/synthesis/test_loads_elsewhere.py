"""The folder of synthetic queries, read by the programs that it is meant for."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tiny_generator import PASSAGES, lines


def test_datasets_reads_all_four_configurations(whole: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="reads the folder with Hugging Face datasets")
    assert set(datasets.get_dataset_config_names(str(whole))) == {"default", "corpus", "queries", "pairs"}
    read = {
        name: datasets.load_dataset(str(whole), name, cache_dir=str(tmp_path))
        for name in ("default", "corpus", "queries", "pairs")
    }
    queries, corpus = lines(whole / "queries.jsonl"), lines(whole / "corpus.jsonl")
    assert [(r["_id"], r["text"]) for r in read["queries"]["queries"]] == [(q["_id"], q["text"]) for q in queries]
    assert {r["_id"]: r["text"] for r in read["corpus"]["corpus"]} == {c["_id"]: c["text"] for c in corpus}
    judged = [(r["query-id"], r["corpus-id"], r["score"]) for r in read["default"]["train"]]
    assert judged == [(q["_id"], q["metadata"]["passage_id"], 1) for q in queries]
    assert read["pairs"]["train"].column_names == ["query", "positive"]
    assert read["pairs"]["train"][0] == {"query": queries[0]["text"], "positive": PASSAGES[judged[0][1]]}


def test_beir_reads_the_folder(whole: Path) -> None:
    loader = pytest.importorskip("beir.datasets.data_loader", reason="reads the folder with BEIR")
    corpus, queries, qrels = loader.GenericDataLoader(str(whole)).load(split="train")
    assert {name: one["text"] for name, one in corpus.items()} == PASSAGES
    assert queries == {q["_id"]: q["text"] for q in lines(whole / "queries.jsonl")}
    assert qrels == {q["_id"]: {q["metadata"]["passage_id"]: 1} for q in lines(whole / "queries.jsonl")}


@pytest.mark.slow
def test_the_trainer_of_sentence_transformers_takes_the_pairs(whole: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="trains on the folder with sentence-transformers")
    datasets = pytest.importorskip("datasets", reason="reads the folder with Hugging Face datasets")
    pytest.importorskip("accelerate", reason="the trainer of sentence-transformers needs accelerate")
    from tiny_models import tiny_bert, tiny_tokenizer

    from lit_dpret.encoders import Contract, TextEncoder
    from lit_dpret.encoders.st_folder import save_sentence_transformer

    encoder = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=12, passage_max_length=12))
    save_sentence_transformer(tmp_path / "model", encoder)
    model = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pairs = datasets.load_dataset(str(whole), "pairs", split="train", cache_dir=str(tmp_path / "cache"))
    arguments = library.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4, report_to="none", use_cpu=True
    )
    losses = importlib.import_module("sentence_transformers.losses")
    loss = losses.MultipleNegativesRankingLoss(model)
    library.SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss).train()
    assert any(not bool((value == before[name]).all()) for name, value in model.state_dict().items())
