"""A retriever of one's own, without privacy, over lit-dpret's DataModule, search and measures.

    python train.py --folder runs/retriever

Everything here is public. With `SyntheticDataModule(folder=...)` in place of `PairsDataModule` it trains on a released
synthetic set.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_dpret.datamodules import PairsDataModule
from lit_dpret.retrieval.metrics import gains_of_ids, ideal_gains, ndcg
from lit_dpret.retrieval.search import search
from lit_dpret.retrieval.statistics import bootstrap_interval, paired_randomisation_test

BUCKETS = 2048


def words_of(texts: list[str]) -> Tensor:
    """Hashed word counts, ``(texts, BUCKETS)``."""
    found = torch.zeros(len(texts), BUCKETS)
    for line, text in enumerate(texts):
        for word in text.lower().replace("?", " ").replace(".", " ").split():
            found[line, zlib.crc32(word.encode()) % BUCKETS] += 1
    return found


class Retriever(L.LightningModule):
    """One linear layer for both sides, trained with in-batch negatives: a module that knows nothing of lit-dpret."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(BUCKETS, 64, bias=False)

    def forward(self, texts: list[str]) -> Tensor:
        return nn.functional.normalize(self.layer(words_of(texts)), dim=1)

    def training_step(self, batch: list[tuple[str, str]], _: int) -> Tensor:
        queries, passages = zip(*batch, strict=True)
        scores = self(list(queries)) @ self(list(passages)).T / 0.05
        return nn.functional.cross_entropy(scores, torch.arange(len(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def write_pairs(path: Path, count: int = 400) -> None:
    """Questions about numbered clauses, in other words than the clauses have."""
    said = {
        "flood": "water",
        "fire": "burning",
        "theft": "stolen",
        "hail": "ice",
        "travel": "abroad",
        "dental": "teeth",
    }
    coins = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for clause in range(count):
            topic = coins.choice(list(said))
            record = {
                "query": f"am I covered for {said[topic]} in section {clause}?",
                "passage": f"Section {clause} pays {topic} damage.",
                "split": "test" if clause % 5 == 0 else "train",
            }
            file.write(json.dumps(record) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path("runs/retriever"))
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    write_pairs(given.folder / "pairs.jsonl")

    data = PairsDataModule(pairs=given.folder / "pairs.jsonl", passages_are_public=True)
    data.prepare_data()
    data.setup("fit")
    rows = [(row.query, row.passage) for row in data.pair_rows("train")]

    L.seed_everything(0)
    untrained, trained = Retriever(), Retriever()
    untrained.load_state_dict(trained.state_dict())
    trainer = L.Trainer(accelerator="cpu", max_epochs=5, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(trained, DataLoader(rows, batch_size=32, shuffle=True, collate_fn=list))

    before, after = judge(untrained, data), judge(trained, data)
    found, test = bootstrap_interval(after), paired_randomisation_test(after, before)
    print(
        f"nDCG@10 {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}], {test.difference:+.3f}, p = {test.p_value:.4f}"
    )


def judge(model: Retriever, data: PairsDataModule) -> list[float]:
    """nDCG@10 of every test query by exact search, with the values of trec_eval."""
    queries, qrels = data.evaluation_set("test")
    passages = dict(data.collection.passages)
    with torch.no_grad():
        hits = search(model(list(queries.values())), model(list(passages.values())), k=10)
    ids = list(passages)
    ranked = [[ids[place] for place in line] for line in hits.indices.tolist()]
    gains = gains_of_ids(ranked, list(queries), qrels)
    return ndcg(gains, ideal_gains(list(queries), qrels), 10).tolist()


if __name__ == "__main__":
    main()
