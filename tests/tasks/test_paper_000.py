"""`task=paper_000` from a private log to its tables, with generators and retrievers that train in a blink."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_generator import generator
from tiny_models import tiny_bert, tiny_tokenizer
from tiny_tasks import parts, retriever

from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.generation.shrink import shrink_generator
from lit_dpret.st_folder import save_sentence_transformer
from lit_dpret.tasks import CanaryStudy, Paper000, Pipeline, PretrainingOverlap, Similarity, ZeroShot
from lit_dpret.tasks.paper_000.grid import Grid

CANARIES = Path(__file__).parents[2] / "docs" / "reproduction" / "canaries"
STEPS = 2


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Public weights: a generator without a privacy card."""
    generator().save_model(tmp_path / "public")
    return tmp_path / "public"


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    saved = TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))
    save_sentence_transformer(tmp_path / "encoder", saved, saved)
    return str(tmp_path / "encoder")


def paper(public: Path, **changes: Any) -> Paper000:
    make = partial(generator, seed=0, config=None, pretrained=str(public))
    pipeline: dict[str, Any] = {
        "generator": make, "retriever": retriever, "generator_steps": STEPS,
        "generator_batch": 8, "generator_physical_batch": 8, "generator_max_grad_norm": 0.1, "retriever_steps": STEPS,
        "retriever_batch": 16, "retriever_max_grad_norm": 0.5, "min_free_mb": 1, "max_passages": 20,
        "round_trip_filter": None,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "pipeline": partial(Pipeline, **pipeline),
        "shrink": partial(shrink_generator, teacher=str(public), layers=1, feed_forward=16, epochs=1, batch=8),
        "similarity": partial(Similarity, measures=["bleu", "mauve"], features=["query"], ceiling=False, seeds=2),
        "zero_shot": partial(ZeroShot, sets=["scifact"], min_free_mb=1, top_k=10),
        "overlap": partial(PretrainingOverlap, corpus=None, max_texts=10, subsets=2, ngram=2),
        "canaries": partial(CanaryStudy),
        "grid": Grid(lr=[0.01], max_grad_norm=[0.1, 1.0], batch=[8], epochs=[0.3], split="test", max_passages=4),
        "sizes": {"public": str(public), "mini": "shrunk"}, "beside": {"public": "T5-Base", "mini": "T5-Small"},
        "main": "public", "eps": [8.0, None], "others_at": [8.0], "originals_are_public": True,
        "canaries_from": CANARIES, "shrink_passages": 12, "min_free_mb": 1,
    }  # fmt: skip
    return Paper000(**settings | changes)


def table(run: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((run / "report" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def test_retrieval(tmp_path, public):
    told = paper(public, only=["retrieval", "examples"]).run(parts(tmp_path))
    print(told)
    print((tmp_path / "run" / "report" / "paper_000.md").read_text())
    import subprocess

    print(subprocess.run(["find", str(tmp_path / "run"), "-maxdepth", "2"], capture_output=True, text=True).stdout)
    assert 0
