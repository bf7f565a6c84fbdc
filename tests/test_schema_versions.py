"""A file of another version is refused in a line that names file and version."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import Run, make_plan, rewrite_chain
from stand_ins import Regression, dp, fit
from tiny_tasks import write_beir

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.callbacks.checkpoint_files import WholeCheckpoints, newest_checkpoint
from lit_dpret.cards.card import read_card, write_card
from lit_dpret.cards.file import checksum
from lit_dpret.datamodules import SyntheticDataModule
from lit_dpret.errors import DataError, LedgerError, ResumeError, UnsupportedModelError
from lit_dpret.modules.generator_folder import load_generator
from lit_dpret.privacy.ledger.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.synthesis.shards import ShardStore
from lit_dpret.tasks.index_folder import IndexFolder

FIXTURES = Path(__file__).resolve().parent / "data" / "schema"
OTHER = r"/2', and this lit-dpret reads 'lit-dpret/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file of each kind, laid out as their readers expect them."""
    run = Run(tmp_path / "old", make_plan()).train(2)
    write_card(run.card(), run.folder)
    run.ledger.close()
    book = DatasetLedger(run.folder / "dataset_ledger.jsonl", total_eps=8.0, budget=make_plan().budget)
    book.require([make_plan().release()])
    book.begin()
    shutil.copytree(FIXTURES, tmp_path / "old", dirs_exist_ok=True)
    (tmp_path / "old" / "shards").mkdir()
    (tmp_path / "old" / "shard.jsonl").rename(tmp_path / "old" / "shards" / "000000.jsonl")
    write_beir(tmp_path / "old", {"p": "p is a letter"}, {"q": "what is p"}, {"train": [("q", "p")]})
    return tmp_path / "old"


def set_version(path: Path, version: int = 2) -> None:
    """Raise the version of a JSON file that holds one object, a card's checksum included."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["schema"] = facts["schema"].rpartition("/")[0] + f"/{version}"
    if "checksum" in facts:
        facts["checksum"] = checksum(facts)
    path.write_text(json.dumps(facts), encoding="utf-8")


def other_chain(path: Path) -> None:
    def other(record: dict[str, Any]) -> None:
        if "schema" in record:
            record["schema"] = record["schema"].rpartition("/")[0] + "/2"

    rewrite_chain(path, other)


def other_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace('"format": 1', '"format": 2')
    path.write_text(text.replace("synthetic-data/1", "synthetic-data/2"), encoding="utf-8")


def read_total(folder: Path) -> object:
    return DatasetLedger(folder / "dataset_ledger.jsonl", total_eps=None, budget=make_plan().budget).total()


# A file, what makes it one of another version, who reads it from the folder, and the error.
FILES: dict[str, tuple[Callable[[Path], None], Callable[[Path], object], type[Exception], str]] = {
    "privacy_ledger.jsonl": (
        other_chain, lambda folder: PrivacyLedger.read(folder / "privacy_ledger.jsonl"), LedgerError, OTHER,
    ),
    "dataset_ledger.jsonl": (other_chain, read_total, LedgerError, OTHER),
    "privacy_card.json": (set_version, read_card, DataError, OTHER),
    "lit_dpret_generator.json": (other_text, load_generator, UnsupportedModelError, "is of format 2"),
    "manifest.jsonl": (other_text, lambda folder: ShardStore(folder, {"seed": 0}, 1), ResumeError, OTHER),
    "generation.json": (
        set_version, lambda folder: SyntheticDataModule(folder=folder).setup("fit"), DataError, OTHER,
    ),
    "index/index.json": (set_version, lambda folder: IndexFolder(folder / "index"), DataError, OTHER),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_version_is_refused_by_its_name(name: str, folder: Path) -> None:
    change, read, error, words = FILES[name]
    change(folder / name)
    with pytest.raises(error, match=rf"{re.escape(Path(name).name)}.*{words}"):
        read(folder)


def test_a_synthetic_data_set_of_this_version_is_read(folder: Path) -> None:
    SyntheticDataModule(folder=folder).setup("fit")


def test_a_checkpoint_of_another_accountant_is_refused_and_not_passed_over(folder: Path, tmp_path: Path) -> None:
    set_version(folder / "accountant_state.json")
    state = json.loads((folder / "accountant_state.json").read_text(encoding="utf-8"))
    WholeCheckpoints().save_checkpoint(
        {"global_step": 4, "callbacks": {"PrivacyAccountant": state}}, tmp_path / "last.ckpt"
    )
    with pytest.raises(ResumeError, match=rf"last\.ckpt: the accountant's state cannot be read: .*{OTHER}"):
        newest_checkpoint(tmp_path)
    with pytest.raises(ResumeError, match=OTHER):
        PrivacyAccountant().load_state_dict(state)


def test_a_checkpoint_of_this_version_states_its_version(tmp_path: Path) -> None:
    fit(tmp_path / "run", Regression(privacy=dp(tmp_path, noise_multiplier=4.0)), steps=2)
    content = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["callbacks"]["PrivacyAccountant"]["schema"] == "lit-dpret/accountant-state/1"


def test_a_schema_that_is_no_schema_is_refused(folder: Path) -> None:
    path = folder / "privacy_card.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    for schema in (None, "lit-dpret/privacy-card", "lit-dpret/privacy-card/0", "other/privacy-card/1", 1):
        card["schema"] = schema
        path.write_text(json.dumps(card), encoding="utf-8")
        with pytest.raises(DataError, match="its schema is"):
            read_card(folder)
