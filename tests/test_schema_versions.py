"""A file of another version is refused in a line that names file and version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import Run, make_plan, rewrite_chain
from stand_ins import Regression, dp, fit

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
    return tmp_path / "old"


def set_version(path: Path, version: int = 2) -> None:
    """Raise the version of a JSON file that holds one object, a card's checksum included."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["schema"] = facts["schema"].rpartition("/")[0] + f"/{version}"
    if "checksum" in facts:
        facts["checksum"] = checksum(facts)
    path.write_text(json.dumps(facts), encoding="utf-8")


def other_record(record: dict[str, Any]) -> None:
    if "schema" in record:
        record["schema"] = record["schema"].rpartition("/")[0] + "/2"


def test_another_version_of_a_ledger_is_refused(folder: Path) -> None:
    path = folder / "privacy_ledger.jsonl"
    rewrite_chain(path, other_record)
    with pytest.raises(LedgerError, match=rf"privacy_ledger\.jsonl, line 1: its schema is .*{OTHER}"):
        PrivacyLedger.read(path)


def test_another_version_of_a_ledger_of_a_data_set_is_refused(folder: Path) -> None:
    path = folder / "dataset_ledger.jsonl"
    rewrite_chain(path, other_record)
    with pytest.raises(LedgerError, match=rf"dataset_ledger\.jsonl, line 1: its schema is .*{OTHER}"):
        DatasetLedger(path, total_eps=None, budget=make_plan().budget).total()


def test_another_version_of_a_card_is_refused(folder: Path) -> None:
    set_version(folder / "privacy_card.json")
    with pytest.raises(DataError, match=rf"privacy_card\.json cannot be used as a privacy card: .*{OTHER}"):
        read_card(folder)


def test_another_version_of_a_generator_is_refused(folder: Path) -> None:
    path = folder / "lit_dpret_generator.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"format": 1', '"format": 2'), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"old/lit_dpret_generator\.json is of format 2"):
        load_generator(folder)


def test_another_version_of_a_generation_is_refused(folder: Path) -> None:
    path = folder / "manifest.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("synthetic-data/1", "synthetic-data/2"), encoding="utf-8")
    with pytest.raises(ResumeError, match=rf"manifest\.jsonl cannot be gone on with: .*{OTHER}"):
        ShardStore(folder, {"seed": 0}, 1)


def test_another_version_of_a_synthetic_data_set_is_refused(folder: Path) -> None:
    set_version(folder / "generation.json")
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "what is p"}\n', encoding="utf-8")
    (folder / "corpus.jsonl").write_text('{"_id": "p", "text": "p is a letter"}\n', encoding="utf-8")
    (folder / "qrels").mkdir()
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\tp\t1\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"generation\.json cannot be read: .*{OTHER}"):
        SyntheticDataModule(folder=folder).setup("fit")
    set_version(folder / "generation.json", version=1)
    SyntheticDataModule(folder=folder).setup("fit")


def test_another_version_of_an_index_is_refused(folder: Path) -> None:
    set_version(folder / "index" / "index.json")
    with pytest.raises(DataError, match=rf"index\.json cannot be read: .*{OTHER}"):
        IndexFolder(folder / "index")


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
