"""Classify queries by intent under differential privacy: a network and a loss of one's own, the rest from lit-dpret.

    python train.py --eps 3 --folder runs/intents

The log is a file of pairs in which the intent stands where a passage would.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.modules import OptimizerSpec, PrivateModule
from lit_dpret.privacy.modes import DPSGD, PrivacyMode

INTENTS = ["claim", "cancel", "price", "coverage"]
BUCKETS = 512


class IntentClassifier(PrivateModule):
    """Hashed words into a small network. The loss of a row depends on that row alone, which is all that is asked."""

    def __init__(self, *, privacy: PrivacyMode, lr: float = 0.01) -> None:
        super().__init__(privacy=privacy, optimizer=OptimizerSpec(lr=lr))
        self.net = nn.Sequential(nn.Linear(BUCKETS, 64), nn.Tanh(), nn.Linear(64, len(INTENTS)))

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        words = torch.zeros(len(rows), BUCKETS)
        for line, row in enumerate(rows):
            for word in row.query.lower().split():
                words[line, zlib.crc32(word.encode()) % BUCKETS] += 1
        return {"words": words, "intent": torch.tensor([INTENTS.index(row.passage) for row in rows])}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(rows["words"]), rows["intent"], reduction="none")


def write_log(path: Path, count: int = 600, seed: int = 0) -> None:
    """A log to try it on: each intent has words of its own."""
    words = {
        "claim": ["report", "accident", "damage", "claim"],
        "cancel": ["cancel", "leave", "stop", "refund"],
        "price": ["price", "cost", "cheap", "discount"],
        "coverage": ["cover", "include", "insured", "policy"],
    }
    coins = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            intent = coins.choice(INTENTS)
            query = f"how to {coins.choice(words[intent])} {coins.choice(words[intent])} my plan {coins.randrange(99)}"
            file.write(json.dumps({"query": query, "passage": intent, "passage_id": intent}) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--eps", type=float, default=3.0)
    options.add_argument("--folder", type=Path, default=Path("runs/intents"))
    options.add_argument("--steps", type=int, default=60)
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    log = given.folder / "log.jsonl"
    write_log(log)

    L.seed_everything(0)
    module = IntentClassifier(privacy=DPSGD(eps=given.eps, max_grad_norm=1.0))
    data = PairsDataModule(pairs=log, expected_batch_size=64, physical_batch_size=64, passages_are_public=True)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=given.steps,
        max_epochs=-1,
        default_root_dir=given.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PrivacyAccountant(), PrivacyCard()],
    )
    trainer.fit(module, datamodule=data)

    card = json.loads((given.folder / "privacy_card.json").read_text(encoding="utf-8"))
    held_out = given.folder / "held_out.jsonl"
    write_log(held_out, count=200, seed=1)  # other people's queries: an accuracy on the log itself would be a release
    rows = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    right = accuracy(module, rows)
    print(f"epsilon {card['claim']['epsilon']:.3f} at delta {card['claim']['delta']:.1e}, accuracy {right:.2f}")


def accuracy(module: IntentClassifier, rows: list[dict[str, str]]) -> float:
    """The share of rows whose intent the module names."""

    class Plain:
        def __init__(self, row: dict[str, str]) -> None:
            self.query, self.passage = row["query"], row["passage"]

    batch = module.collate_rows([Plain(row) for row in rows])
    with torch.no_grad():
        return float((module.net(batch["words"]).argmax(1) == batch["intent"]).float().mean())


if __name__ == "__main__":
    main()
