"""Two logs that differ in one unit, from the file to the loss: no row that is in both may notice.

The logs have no ids, so that line numbers shift, and are read, mined for and trained on by what a run uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from negative_cases import NOISE, PASSAGES, QUERIES, dual
from pair_stand_ins import batch_of

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.negatives import (
    BM25Negatives,
    DynamicNegatives,
    NegativeSource,
    RandomNegatives,
    StaticNegatives,
    TrainTexts,
)
from lit_dpret.privacy.modes import DPSGD, PublicPassages

FROZEN = {"towers": "separate", "passage_tower": "frozen"}
#: User i has line i and line i + 4; two people ask the same, once with the same answer and once with another.
LOG = [
    {"query": QUERIES[f"q{i}"], "passage_id": f"p{2 * i}", "passage": PASSAGES[f"p{2 * i}"], "user_id": f"u{i % 4}"}
    for i in range(8)
]
LOG += [
    {"query": QUERIES["q1"], "passage_id": name, "passage": PASSAGES[name], "user_id": "u9"} for name in ("p2", "p11")
]

SOURCES: dict[str, Callable[[], NegativeSource]] = {
    "random": lambda: RandomNegatives(per_query=3),
    "bm25": lambda: BM25Negatives(per_query=2, depth=5),
    "bm25 with margins": lambda: BM25Negatives(per_query=3, depth=5, relative_margin=0.2, range_min=1),
    "static": lambda: StaticNegatives(per_query=2, depth=5),
    "dynamic": lambda: DynamicNegatives(per_query=2, depth=5),
}


def losses(folder: Path, log: list[dict[str, Any]], mode: type, unit: str, source: str) -> dict[Any, list[Any]]:
    """By query, passage and user: the passages that the row is told from, and its loss, all rows in one batch."""
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in log), encoding="utf-8")
    corpus = [{"_id": name, "text": text} for name, text in PASSAGES.items()]
    (folder / "corpus.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in corpus), encoding="utf-8")
    data = PairsDataModule(pairs=folder / "log.jsonl", corpus=folder / "corpus.jsonl", expected_batch_size=2)
    data.use_unit(unit)
    data.setup("fit")
    torch.manual_seed(0)
    frozen = {"passage_gradient": "none"} if source == "dynamic" and mode is PublicPassages else {}
    privacy = mode(max_grad_norm=1.0, unit=unit, **NOISE, **frozen)
    module = dual(privacy, negatives=[SOURCES[source]()], **(FROZEN if source == "dynamic" else {})).double()
    module.learn_public_passages(data.public_passages())
    module.learn_negatives(TrainTexts.of(data))
    units = data.train_units()
    rows = [row for number in range(len(units)) for row in units.rows(number)]
    batch = batch_of(module.collate_rows(rows))
    module.before_batch(batch)
    found: dict[Any, list[Any]] = {}
    with torch.no_grad():
        told = zip(rows, batch.rows["own_at"].tolist(), module.per_row_loss(batch.rows).tolist(), strict=True)
        for row, places, loss in told:
            found.setdefault((row.query, row.passage_id), []).append((places, round(loss, 9)))
    return found


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("unit", ["query", "pair", "user"])
@pytest.mark.parametrize("mode", [PublicPassages, DPSGD])
def test_rows_that_are_in_both_logs_have_the_same_loss(mode: type, unit: str, source: str, tmp_path: Path) -> None:
    whole = losses(tmp_path / "whole", LOG, mode, unit, source)
    for left_out in ("u1", "u0"):
        kept = [r for i, r in enumerate(LOG) if (r["user_id"] != left_out if unit == "user" else i != int(left_out[1]))]
        changed = [{**r, "query": "best best best"} if r not in kept else r for r in LOG]
        for name, neighbour in (("removed", kept), ("replaced", changed)):
            other = losses(tmp_path / f"{left_out} {name}", neighbour, mode, unit, source)
            for record in kept:
                row = (record["query"], record["passage_id"])
                assert set(map(str, other[row])) <= set(map(str, whole[row])), (name, record)
