"""The folder of synthetic queries, read by the programs that it is meant for."""

from __future__ import annotations

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
