"""Files of every version so far can be read; a newer one is refused in a line that names file and version."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import DELTA, make_plan, rewrite_chain
from stand_ins import Regression, dp, fit

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.datamodules import SyntheticDataModule
from lit_dpret.errors import DataError, LedgerError, ResumeError, UnsupportedModelError
from lit_dpret.generation.shards import ShardStore
from lit_dpret.indexing import IndexFolder
from lit_dpret.modules.generator_folder import GeneratorContract, load_generator
from lit_dpret.privacy.accounting import epsilon
from lit_dpret.privacy.card import read_card, verify_card
from lit_dpret.privacy.card_facts import plan_of
from lit_dpret.privacy.card_file import checksum
from lit_dpret.privacy.dataset_ledger import DatasetLedger
from lit_dpret.privacy.ledger import PrivacyLedger, charged_releases
from lit_dpret.privacy.run import Position, PrivateRun
from lit_dpret.tasks.checkpoints import WholeCheckpoints, newest_checkpoint

FIXTURES = Path(__file__).resolve().parent / "data" / "schema"
NEWER = r"/2', and this lit-dpret reads up to version 1. Update lit-dpret\."
NEWER_LEDGER = r"/3', and this lit-dpret reads up to version 2. Update lit-dpret\."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the fixtures, laid out as their readers expect them."""
    shutil.copytree(FIXTURES, tmp_path / "old")
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


def newer_record(record: dict[str, Any], version: int = 2) -> None:
    if "schema" in record:
        record["schema"] = record["schema"].rpartition("/")[0] + f"/{version}"


# -- version 1 is read -------------------------------------------------------------------------


def test_a_ledger_and_card_of_version_1_are_read_and_verify(folder: Path) -> None:
    records = PrivacyLedger.read(folder / "privacy_ledger.jsonl").records
    assert records[0]["schema"] == "lit-dpret/privacy-ledger/1"
    assert plan_of(records)[0] == make_plan()
    card = read_card(folder)
    cost = epsilon(charged_releases(records), delta=DELTA, neighbours="zero_out")
    assert card["claim"]["epsilon"] == pytest.approx(cost)
    assert verify_card(card, folder / "privacy_ledger.jsonl") == []


def test_a_data_sets_ledger_of_version_1_is_read(folder: Path) -> None:
    total = DatasetLedger(folder / "dataset_ledger.jsonl", total_eps=None, budget=make_plan().budget).total()
    assert (total.runs, total.running, total.total_eps) == (1, 0, 8.0)
    assert total.epsilon == pytest.approx(read_card(folder)["claim"]["epsilon"])


def test_an_accountants_state_of_version_1_and_of_the_form_before_it_is_read(folder: Path) -> None:
    state = json.loads((folder / "accountant_state.json").read_text(encoding="utf-8"))
    assert Position.from_dict(state, place="x") == Position("r", 1, 4)
    state.pop("schema")
    assert Position.from_dict(state, place="x") == Position("r", 1, 4)
    assert Position("r", 1, 4).to_dict() == {"schema": "lit-dpret/accountant-state/1", **state}


def test_a_generator_contract_of_version_1_is_read(folder: Path) -> None:
    facts = json.loads((folder / "lit_dpret_generator.json").read_text(encoding="utf-8"))
    assert GeneratorContract.from_dict(facts) == GeneratorContract()


@pytest.mark.parametrize("stated", [True, False], ids=["version 1", "the form before it"])
def test_a_generation_is_gone_on_with(stated: bool, folder: Path) -> None:
    manifest = folder / "manifest.jsonl"
    if not stated:
        first, *rest = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
        facts = json.loads(first)
        del facts["schema"]
        manifest.write_text(json.dumps(facts) + "\n" + "".join(rest), encoding="utf-8")
    store = ShardStore(folder, {"seed": 0}, 1)
    assert store.missing == [] and [record["text"] for record in store.records()] == ["what is p"]


def test_an_index_of_version_1_is_read_and_searched(folder: Path) -> None:
    index = IndexFolder(folder / "index", verify=True)
    top = index.search(torch.tensor([[0.8, 0.6]]), 2)
    assert [index.ids[place] for place in top.indices[0].tolist()] == ["p2", "p0"]
    assert [index.text(place) for place in range(4)] == ["east", "north", "north-east", "west"]


# -- what older plans did not say --------------------------------------------------------------


def as_first_written(record: dict[str, Any]) -> None:
    """Take out what the first ledgers did not hold."""
    if record["kind"] == "plan":
        record.pop("schema", None)
        for name in ("clip_groups", "max_units_per_user"):
            record["plan"].pop(name, None)


def described(**changes: Any) -> dict[str, Any]:
    plan = make_plan(**changes)
    return {
        "mode": "dp_sgd", "unit": "query", "neighbours": "zero_out", "law": plan.law.to_dict(), "planned_steps": 3,
        "plan": plan.to_dict(), "rows_per_unit": "one", "secure_rng": False,
    }  # fmt: skip


def resumed(path: Path, **changes: Any) -> PrivateRun:
    return PrivateRun.open(
        path,
        resume=True,
        secret=bytes(32),
        secure_rng=False,
        described=described(**changes),
        data_fingerprint=lambda key: "same data",
    )


def test_a_ledger_without_the_later_fields_is_read_with_their_defaults_and_resumes(folder: Path) -> None:
    path = folder / "privacy_ledger.jsonl"
    rewrite_chain(path, as_first_written)
    plan, _ = plan_of(PrivacyLedger.read(path).records)
    assert plan is not None and (plan.clip_groups, plan.max_units_per_user) == ("flat", None)
    run = resumed(path)
    assert run.ledger.records[-1]["schema"] == "lit-dpret/privacy-ledger/2"
    assert run.attempt == 1, "its attempt 0 had other noise, so none of its steps may be repeated"
    run.ledger.close()
    with pytest.raises(ResumeError, match="clip_groups: 'flat' before, 'per_layer' now"):
        resumed(path, clip_groups="per_layer")


def test_a_plan_keeps_the_fingerprint_that_it_had_before_it_had_more_fields() -> None:
    # Of the canonical JSON without clip_groups and max_units_per_user, as the first version computed it.
    assert make_plan().fingerprint() == "efe53254369ddf4b59a1101cffa44e043232768b313094d1d90caccef4f947ba"
    assert make_plan(clip_groups="per_layer").fingerprint() != make_plan().fingerprint()
    assert make_plan(max_units_per_user=3).fingerprint() != make_plan().fingerprint()


# -- a newer version is refused ----------------------------------------------------------------


def test_a_newer_ledger_is_refused(folder: Path) -> None:
    path = folder / "privacy_ledger.jsonl"
    rewrite_chain(path, partial(newer_record, version=3))
    with pytest.raises(LedgerError, match=rf"privacy_ledger\.jsonl, line 1: its schema is .*{NEWER_LEDGER}"):
        PrivacyLedger.read(path)
    with pytest.raises(LedgerError, match=NEWER_LEDGER):
        resumed(path)


def test_a_newer_data_sets_ledger_is_refused(folder: Path) -> None:
    path = folder / "dataset_ledger.jsonl"
    rewrite_chain(path, newer_record)
    with pytest.raises(LedgerError, match=rf"dataset_ledger\.jsonl, line 1: its schema is .*{NEWER}"):
        DatasetLedger(path, total_eps=None, budget=make_plan().budget).total()


def test_a_newer_card_is_refused(folder: Path) -> None:
    set_version(folder / "privacy_card.json")
    with pytest.raises(DataError, match=rf"privacy_card\.json cannot be used as a privacy card: .*{NEWER}"):
        read_card(folder)


def test_a_newer_generator_is_refused(folder: Path) -> None:
    path = folder / "lit_dpret_generator.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"format": 1', '"format": 2'), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"old/lit_dpret_generator\.json is of format 2.*Update lit-dpret"):
        load_generator(folder)


def test_a_newer_generation_is_refused(folder: Path) -> None:
    path = folder / "manifest.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("synthetic-data/1", "synthetic-data/2"), encoding="utf-8")
    with pytest.raises(ResumeError, match=rf"manifest\.jsonl cannot be gone on with: .*{NEWER}"):
        ShardStore(folder, {"seed": 0}, 1)


def test_a_newer_synthetic_data_set_is_refused(folder: Path) -> None:
    set_version(folder / "generation.json")
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "what is p"}\n', encoding="utf-8")
    (folder / "corpus.jsonl").write_text('{"_id": "p", "text": "p is a letter"}\n', encoding="utf-8")
    (folder / "qrels").mkdir()
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\tp\t1\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"generation\.json cannot be read: .*{NEWER}"):
        SyntheticDataModule(folder=folder).setup("fit")
    set_version(folder / "generation.json", version=1)
    SyntheticDataModule(folder=folder).setup("fit")


def test_a_newer_index_is_refused(folder: Path) -> None:
    set_version(folder / "index" / "index.json")
    with pytest.raises(DataError, match=rf"index\.json cannot be read: .*{NEWER}"):
        IndexFolder(folder / "index")


def test_a_checkpoint_of_a_newer_accountant_is_refused_and_not_passed_over(folder: Path, tmp_path: Path) -> None:
    set_version(folder / "accountant_state.json")
    state = json.loads((folder / "accountant_state.json").read_text(encoding="utf-8"))
    WholeCheckpoints().save_checkpoint(
        {"global_step": 4, "callbacks": {"PrivacyAccountant": state}}, tmp_path / "last.ckpt"
    )
    with pytest.raises(ResumeError, match=rf"last\.ckpt: the accountant's state cannot be read: .*{NEWER}"):
        newest_checkpoint(tmp_path)
    with pytest.raises(ResumeError, match=NEWER):
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
