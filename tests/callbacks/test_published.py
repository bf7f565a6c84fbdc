"""Private rows stand in no hyper-parameter, no state of a checkpoint, and no text that is published with a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import own_modules
import pandas as pd
import pytest
import stand_ins
import torch
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from stand_ins import Numbers, Regression, dp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lit_dpret import PairsDataModule, UnitDataModule
from lit_dpret.callbacks import PrivacyCard
from lit_dpret.callbacks.own_code import holds_data
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.modes import NoPrivacy

TEXTS = [f"my basement number {i} was flooded again" for i in range(60)]


@dataclass
class Ticket:
    text: str
    label: str


#: What a row may be.
KINDS: dict[str, Any] = {
    "a tuple": lambda text: (text, "flood"),
    "a mapping": lambda text: {"text": text, "label": "flood"},
    "nested": lambda text: {"ticket": [{"text": text}], "label": "flood"},
    "an object": lambda text: Ticket(text, "flood"),
    "of a table": lambda text: pd.Series({"text": text, "label": "flood"}),
}


class Tickets(Dataset[Any]):
    def __init__(self, kind: str = "a tuple") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, at: int) -> Any:
        return KINDS[self.kind](TEXTS[at])


def collate(rows: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.tensor([[float(len(str(row))), 1.0] for row in rows])}


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
    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"prompt": self.held}


def run(folder: Path, data: Any, example: Any, *callbacks: L.Callback) -> None:
    if isinstance(data, str):
        data = UnitDataModule(Tickets(data), expected_batch_size=20, physical_batch_size=16)
    private = own_modules.made(Told(example), per_row_loss=loss, collate_fn=collate)
    own_modules.fit(folder, private, data, callbacks=[*callbacks], max_steps=1)


#: What may hold a text.
HOLDERS: dict[str, Any] = {
    "itself": lambda text: text,
    "within a text": lambda text: f"Example: {text} -> flood",
    "a key": lambda text: {text: 0},
    "an object": lambda text: SimpleNamespace(rows=[Ticket(text, "flood")]),
}


@pytest.mark.parametrize(
    ("where", "kind", "holder"),
    [
        *product(["hyper-parameter", "state"], ["a tuple"], HOLDERS),
        *product(["state"], [kind for kind in KINDS if kind != "a tuple"], ["itself"]),
    ],
)
def test_the_text_of_a_row_is_refused_where_it_would_be_published(
    where: str, kind: str, holder: str, tmp_path: Path
) -> None:
    if (where, holder) == ("hyper-parameter", "an object"):  # a module leaves objects out
        run(tmp_path, kind, HOLDERS[holder](TEXTS[3]))
        assert TEXTS[3].encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.ckpt"))
        return
    held = HOLDERS[holder](TEXTS[3])
    callbacks = [Remembers(held)] if where == "state" else []
    with pytest.raises(ConfigurationError) as refused:
        run(tmp_path, kind, "none" if callbacks else held, *callbacks)
    assert refused.value.trap == "T25" and TEXTS[3] not in str(refused.value)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_labels_and_words_of_rows_may_be_settings(tmp_path: Path) -> None:
    given = {"labels": ["flood", "basement"], "basement": 1, "text": Ticket("flooded again", "flood")}
    run(tmp_path, "a mapping", given, Remembers({"flood": 3}))


class Depth(Enum):
    SHALLOW = 3


SETTINGS = [
    range(3), OmegaConf.create({"widths": [8, 16], "name": "a net"}), np.dtype("float32"), torch.float32, 1e-3,
    "cosine", np.float32(0.5), list[int], Depth.SHALLOW, Path("runs/mine"), deque([1, 2]), torch.Size([2, 3]),
    {"a", "b"}, None, partial(torch.optim.SGD, lr=0.1), Ticket("a prompt", "flood"), {"flood": 0}, math.sqrt,
]  # fmt: skip


def test_settings_of_all_kinds_may_be_kept(tmp_path: Path) -> None:
    assert not any(map(holds_data, SETTINGS))
    run(tmp_path, "a tuple", {"given": SETTINGS[0]}, Remembers({str(n): each for n, each in enumerate(SETTINGS)}))


def table() -> Any:
    return pd.DataFrame({"text": TEXTS})


@pytest.mark.parametrize(
    "held", [table, lambda: SimpleNamespace(of=table()), Tickets, lambda: table()["text"].iloc.__getitem__]
)
def test_a_table_or_data_set_is_no_state(held: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        run(tmp_path, "a tuple", "none", Remembers(held()))
    assert refused.value.trap == "T25"


class OwnModule(UnitDataModule):
    """Knows its data itself."""

    def __init__(self, size: int = 20, *, named: bool = False) -> None:
        super().__init__(Tickets(), expected_batch_size=size, physical_batch_size=16)
        if named:
            self.save_hyperparameters("size")
        else:
            self.save_hyperparameters()


class OwnPairs(PairsDataModule):
    def __init__(self, path: Path, batch: int = 8) -> None:
        super().__init__(pairs=path, expected_batch_size=batch)
        self.save_hyperparameters("batch")


class Given(UnitDataModule):
    def __init__(self, dataset: Any) -> None:
        self.save_hyperparameters()
        super().__init__(dataset, expected_batch_size=20, physical_batch_size=16)


def test_a_datamodule_stores_what_its_constructor_was_given_and_no_data(tmp_path: Path) -> None:
    assert dict(OwnModule(named=True).hparams) == {"size": 20} and dict(OwnPairs(tmp_path).hparams) == {"batch": 8}
    data = OwnModule()
    assert dict(data.hparams) == {"size": 20, "named": False}
    run(tmp_path / "own", data, "none")
    with pytest.raises(ConfigurationError, match="dataset") as refused:
        run(tmp_path / "given", Given(Tickets()), "none")
    assert refused.value.trap == "T25"


# -- queries in texts that are published with a run -------------------------------------------------

QUERY = "Does Medicare pay for my new teeth?"


class Log(Numbers):
    """Numbers beside the queries of a log."""

    def __init__(self, query: str = QUERY) -> None:
        super().__init__()
        self.collection = SimpleNamespace(queries={"q1": "flood insurance", "q2": query}, qrels={})


class Spoken(Regression):
    def __init__(self, kept: dict[str, Any], told: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.told = told
        self.save_hyperparameters({"about": kept})

    def assumptions(self) -> list[str]:
        return [self.told] if self.told else []


def noted(folder: Path, text: str, data: Any) -> None:
    begin(folder, data, extra=[PrivacyCard(tuning_note=text)])


def in_folder(folder: Path, text: str, data: Any) -> None:
    begin(folder.parent / text.replace(" ", "-"), data)


def logged(folder: Path, text: str, data: Any) -> None:
    begin(folder, data, logger=[CSVLogger(folder, name=text.replace(" ", "_"))])


def kept(folder: Path, text: str, data: Any) -> None:
    begin(folder, data, module=Spoken({"example": [text]}, privacy=dp(folder.parent)))


def assumed(folder: Path, text: str, data: Any) -> None:
    begin(folder, data, module=Spoken({}, text, privacy=dp(folder.parent)))


def begin(folder: Path, data: Any, *, module: Any = None, extra: Any = (), **settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stand_ins.fit(folder, module or Regression(privacy=dp(folder.parent)), data, steps=1, extra=[*extra], **settings)


WAYS: dict[str, tuple[Callable[[Path, str, Any], None], str]] = {
    "tuning_note": (noted, "tuning_note"),
    "folder": (in_folder, "folder"),
    "logger": (logged, "logger"),
    "hyper-parameter": (kept, "about"),
    "assumption": (assumed, "assumptions"),
}


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("tuning_note", "does medicare pay for my new teeth"), ("tuning_note", "Flood insurance!"),
        *((way, "chosen on Does Medicare pay, for my new TEETH") for way in WAYS),
    ],
)  # fmt: skip
def test_a_query_of_the_run_in_a_published_text_is_refused_before_the_run(way: str, words: str, tmp_path: Path) -> None:
    act, knob = WAYS[way]
    with pytest.raises(ConfigurationError, match=knob) as refused:
        act(tmp_path / "here", words, Log())
    assert refused.value.trap == "T25"
    assert not list(tmp_path.rglob("privacy_ledger.jsonl")) and QUERY not in str(refused.value)


@pytest.mark.parametrize(("way", "words"), [*((way, "a study of flood insurance") for way in WAYS),
                                            ("folder", "flood insurance")])  # fmt: skip
def test_other_texts_and_words_that_a_short_query_shares_with_a_name_are_published(
    way: str, words: str, tmp_path: Path
) -> None:
    WAYS[way][0](tmp_path / "here", words, Log())
    assert list(tmp_path.rglob("privacy_ledger.jsonl"))


def test_without_a_guarantee_nothing_is_looked_for(tmp_path: Path) -> None:
    begin(tmp_path / "here", Log(), module=Regression(privacy=NoPrivacy()), extra=[PrivacyCard(tuning_note=QUERY)])
