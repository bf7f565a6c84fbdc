from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Collection:
    """A BEIR-style folder, its test split only."""

    passage_ids: list[str]
    passages: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: dict[str, dict[str, int]]


def _read(folder: Path) -> Collection:
    def rows(name: str) -> list[dict[str, str]]:
        with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    qrels: dict[str, dict[str, int]] = {}
    for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, passage, grade = line.split("\t")
        qrels.setdefault(query, {})[passage] = int(grade)
    corpus, queries = rows("corpus"), [row for row in rows("queries") if row["_id"] in qrels]
    return Collection(
        [row["_id"] for row in corpus],
        [f"{row['title']} {row['text']}".strip() for row in corpus],
        [row["_id"] for row in queries],
        [row["text"] for row in queries],
        qrels,
    )


@pytest.fixture(scope="session")
def collection() -> Callable[[str], Collection]:
    """Reads a collection by name, or skips the test that asks for it."""
    root = Path(os.environ.get("LIT_DPRET_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))

    def read(name: str) -> Collection:
        if not (root / name / "corpus.jsonl.gz").exists():
            pytest.skip(f"the collection {name} is not in {root}; set LIT_DPRET_DATA to the folder that holds it")
        return _read(root / name)

    return read
