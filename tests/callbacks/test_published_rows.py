"""Texts of rows that are tuples or mappings stand in no hyper-parameter and in no state that a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import own_modules
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lit_dpret import UnitDataModule
from lit_dpret.errors import ConfigurationError

TEXTS = [f"my basement number {i} was flooded again" for i in range(60)]


class Tickets(Dataset[Any]):
    """Texts with a label, as tuples or mappings."""

    def __init__(self, named: bool) -> None:
        self.named = named

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, at: int) -> Any:
        return {"text": TEXTS[at], "label": "flood"} if self.named else (TEXTS[at], "flood")


def collate(rows: list[Any]) -> dict[str, Tensor]:
    texts = [row["text"] if isinstance(row, dict) else row[0] for row in rows]
    return {"x": torch.tensor([[float(len(text)), 1.0] for text in texts])}


class Told(L.LightningModule):
    def __init__(self, example: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loss(model: Any, batch: Any) -> Tensor:
    logits = model.net(batch["x"])
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="none")


class Remembers(L.Callback):
    def __init__(self, text: str) -> None:
        self.text = text

    def state_dict(self) -> dict[str, Any]:
        return {"prompt": self.text}


def run(folder: Path, named: bool, example: Any, *callbacks: L.Callback) -> None:
    data = UnitDataModule(Tickets(named), expected_batch_size=20, physical_batch_size=16)
    private = own_modules.made(Told(example), per_row_loss=loss, collate_fn=collate)
    own_modules.fit(folder, private, data, callbacks=[*callbacks], max_steps=1)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("where", ["hyper-parameter", "within one", "state"])
def test_the_text_of_a_row_is_refused_where_it_would_be_published(where: str, named: bool, tmp_path: Path) -> None:
    text = f"Example: {TEXTS[3]} -> flood" if where == "within one" else TEXTS[3]
    callbacks = [Remembers(text)] if where == "state" else []
    with pytest.raises(ConfigurationError) as refused:
        run(tmp_path, named, "none" if callbacks else text, *callbacks)
    assert refused.value.trap == "T25" and TEXTS[3] not in str(refused.value)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_labels_and_words_of_rows_may_be_settings(tmp_path: Path) -> None:
    run(tmp_path, True, ["flood", "basement", "flooded again"], Remembers("flood"))
