"""Synthetic queries of each silo's own generator: made, checked, paid for once, and trained on for nothing more."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import generator, tokenizer
from tiny_silos import PRIVATE, SIZE, declare_public, maker
from tiny_silos import federation as federation_of

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.amendments import AttackResult, add_evidence
from lit_dpret.cards.audits import ALARM, BOUND
from lit_dpret.cards.file import read_card
from lit_dpret.datamodules import SiloDataModule
from lit_dpret.datamodules.silo_folder import Silo, SiloQuery, silo_folders, write_silos
from lit_dpret.errors import BudgetExceededError, ConfigurationError, DataError, PrivateDataError, ResumeError
from lit_dpret.federated.data import planted_silos, planted_words
from lit_dpret.federated.fitting import RoundAccountant, fit_epochs
from lit_dpret.federated.negatives import FedPool
from lit_dpret.federated.settings import PddAs2, Stage1, Stage2
from lit_dpret.federated.silo import SiloClient
from lit_dpret.federated.silo_ledger import SiloLedger, silo_budget
from lit_dpret.federated.synthetic import (
    GeneratorTerms,
    public_sentences,
    read_synthetic,
    train_generator,
    write_synthetic,
)
from lit_dpret.federated.transport import InProcessFederation
from lit_dpret.federated.trust import trust_table
from lit_dpret.privacy.ledger.dataset_file import DatasetFile
from lit_dpret.privacy.ledger.run_ledger import START_EVENT, PrivacyLedger
from lit_dpret.privacy.modes import NoPrivacy

SMALL = replace(SIZE, clients=2)
ANSWERED = replace(PRIVATE, stage2=replace(PRIVATE.stage2, response="synthetic", request="none"))
#: Everything is made of synthetic queries, so what a budget refuses for people's queries is allowed.
TRAINED = replace(
    PRIVATE,
    train_on="synthetic",
    stage1=Stage1(warmup_rounds=1, rounds=1, batch_size=6, bm25_n=2, static_n=2, top_k=8, lr=3e-3),
    stage2=Stage2(epochs=1, batch_size=6, n=3, top_k=6, lr=3e-3, request="exact", response="synthetic"),
)
EPS = 5.0  # of the generator, of the 20 of the silo


def federation(root: Path, settings: PddAs2, **more: Any) -> InProcessFederation:
    return federation_of(root, settings, size=SMALL, **more)


def client0(root: Path, settings: PddAs2, *, state: str = "state") -> SiloClient:
    """One client alone: choosing noise for all of them takes time."""
    return SiloClient(silo(root), root / state / "client0", settings, maker(SMALL), secret_file=root / "secret")


def make_generator(*, privacy: Any) -> Any:
    return generator(privacy=privacy, tokenizer=tokenizer(planted_words(SMALL)))


def trained(root: Path, name: str = "client0", eps: float = EPS) -> Path:
    """The run of a silo's generator, charged to the silo's own ledger."""
    terms = GeneratorTerms(eps=eps, batch_size=8)
    folder, state = silo_folders(root / "silos")[name], root / "state" / name
    return train_generator(folder, state, PRIVATE, make_generator, terms, secret_file=root / "secret")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Silos whose generators were trained under their own ledgers, and wrote queries for their public sentences."""
    root = tmp_path_factory.mktemp("made")
    write_silos(root / "silos", planted_silos(SMALL), facts={})
    declare_public(root)
    for name, folder in silo_folders(root / "silos").items():
        run = trained(root, name=name)
        write_synthetic(folder, run, queries_per_passage=2, min_new_tokens=3, max_new_tokens=4)
    return root


@pytest.fixture
def world(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def silo(root: Path) -> Path:
    return root / "silos" / "clients" / "client0"


def ledger_of(root: Path, **changes: Any) -> SiloLedger:
    privacy = replace(PRIVATE.privacy, **changes)
    budget = silo_budget(
        float(privacy.eps or 0), privacy.delta, unit=privacy.unit, neighbours=privacy.neighbours, units=None
    )
    return SiloLedger(root / "state" / "client0" / "private", budget, accountant="rdp", secret_file=root / "secret")


def read(root: Path, **changes: Any) -> Any:
    ledger = ledger_of(root, **changes)
    return read_synthetic(silo(root), ledger, near=[root / "state" / "client0"])


# -- the whole path ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_verified_set_is_charged_once_to_its_silos_ledger(world: Path) -> None:
    found = read(world)
    assert 0 < len(found.texts) <= 24 and "epsilon" in found.claim and found.releases
    assert not set(found.texts) & set(json.loads(line)["text"] for line in (silo(world) / "queries.jsonl").open())
    assert 0.5 * EPS < ledger_of(world).epsilon() <= EPS


@pytest.mark.costly
def test_generator_and_rounds_are_one_budget(world: Path) -> None:
    before = ledger_of(world).epsilon()
    one_round = replace(PRIVATE.stage1, warmup_rounds=0)
    client = client0(world, replace(ANSWERED, stage1=one_round))
    without = replace(PRIVATE, stage1=one_round, stage2=replace(PRIVATE.stage2, request="none"))
    alone = client0(world, without, state="without")
    assert client.account.noise is not None and alone.account.noise is not None
    # What the generator cost is not there to be spent again.
    assert client.account.noise.training > alone.account.noise.training
    weights = client.train_shared(client.model[0], 0)
    client.personalise(weights, FedPool(torch.randn(9, 16)), 0)
    spent = client.epsilon()
    assert spent is not None and before < spent and 18.0 < spent <= 20.0
    assert client.ledger is not None
    charged = DatasetFile.read(client.ledger.path).book.entries
    assert len(charged) == 3  # the generator, the round, the personal encoder


@pytest.mark.costly
def test_answers_are_embeddings_of_synthetic_queries_by_the_sentence_encoder(world: Path) -> None:
    client = client0(world, ANSWERED)
    start, dim = client.model
    block = client.serve(start, torch.empty(0, dim), refresh=0)
    assert client.synthetic is not None
    wanted = client._global_module(start).encode_passages(client.synthetic.texts).half()
    for row in block.embeddings:
        assert any(torch.equal(row, one) for one in wanted)


@pytest.mark.slow
def test_training_both_stages_on_synthetic_queries_spends_nothing_more(world: Path) -> None:
    run = federation(world, TRAINED)
    before = {name: one.epsilon() for name, one in run.clients.items()}
    result = run.run()
    assert result.epsilon == before and all(0 < float(value or 0) <= EPS for value in before.values())
    moved = max(float((value - run.start[name]).abs().max()) for name, value in run.train_shared().items())
    assert moved > 1e-3 and set(result.systems) == {"bm25", "stage1", "stage2"} and not result.faults
    assert "the silo's DP generator wrote" in trust_table(TRAINED)


@pytest.mark.slow
def test_training_on_synthetic_queries_is_a_function_of_no_query_of_the_silos_own(world: Path, tmp_path: Path) -> None:
    """Other people's questions, the same synthetic ones: the same update and the same request, bit by bit."""
    first = client0(world, TRAINED)
    update, rows = first.train_shared(first.model[0], 0), first.request(first.model[0], 0)
    folder = silo(world)
    lines = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**line, "text": "filler0 filler1 filler2"}) + "\n" for line in lines)
    (folder / "queries.jsonl").write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["queries.jsonl"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for path in (world / "state" / "client0").glob("stage1-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    second = client0(world, TRAINED)
    again = second.train_shared(second.model[0], 0)
    assert all(torch.equal(update[name], again[name]) for name in update)
    assert torch.equal(rows, second.request(second.model[0], 0))
    assert set(second.queries.values()) <= set(read(world).texts)


def test_a_generator_that_the_ledger_does_not_cover_is_refused_before_any_noise(world: Path) -> None:
    state = world / "state" / "client0"
    shutil.rmtree(state / "generator")  # what it cost stays in the ledger
    with pytest.raises(BudgetExceededError):
        trained(world, eps=19.9)
    with pytest.raises(ConfigurationError, match=r"federated\.privacy\.eps=20"):
        trained(world, eps=21.0)
    assert ledger_of(world).epsilon() <= EPS


@pytest.mark.costly
@pytest.mark.parametrize("replay", ["auto", "never"])
def test_a_generator_that_was_broken_off_is_paid_for_once_or_within_the_budget(
    replay: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is gone, as after a kill before it was written; ``never`` is a GPU."""
    state, spent = world / "state" / "client0", ledger_of(world).epsilon()
    assert trained(world) == state / "generator" / "attempt-0", "a finished one is not trained again"
    with pytest.raises(ResumeError, match=r"task\.eps=5"):
        trained(world, eps=2.0)
    shutil.rmtree(state / "generator" / "attempt-0" / "model")
    init = RoundAccountant.__init__
    monkeypatch.setattr(RoundAccountant, "__init__", lambda self, **more: init(self, **more, replay=replay))
    again = trained(world)
    read_card(again / "model")
    total = ledger_of(world).epsilon()
    if replay == "auto":
        assert again.name == "attempt-0" and total == spent
    else:
        assert again.name == "attempt-1" and spent < total <= float(PRIVATE.privacy.eps or 0)


# -- what is refused --------------------------------------------------------------------------


def no_privacy(root: Path) -> None:
    run = root / "state" / "client0" / "public_generator"
    data = SiloDataModule(folder=silo(root), expected_batch_size=8)
    fit_epochs(make_generator(privacy=NoPrivacy()), data, run, callbacks=[PrivacyCard(run_dir=run)])
    shutil.rmtree(silo(root) / "synthetic")
    write_synthetic(silo(root), run, min_new_tokens=3, max_new_tokens=4)


def edited_query(root: Path) -> None:
    path = silo(root) / "synthetic" / "queries.jsonl"
    path.write_text(path.read_text().replace("_id", "_id", 1) + '{"_id": "x", "text": "filler0"}\n')


def edited_card(root: Path) -> None:
    path = silo(root) / "synthetic" / "privacy_card.json"
    card = json.loads(path.read_text())
    card["claim"]["epsilon"] = 0.5
    path.write_text(json.dumps(card))


def contradicted(root: Path) -> None:
    """What an audit of the generator writes when it found more than the claim allows."""
    found = AttackResult(
        attack="one-run audit", n=300, metric=BOUND, estimate=90.0, eps_lower=90.0, delta=1e-5, confidence=ALARM,
        ceiling=50.0,
    )  # fmt: skip
    run = root / "state" / "client0" / "generator" / "attempt-0"
    for folder in (run, run / "model"):
        add_evidence(folder, [found])


def of_another_silo(root: Path) -> None:
    shutil.rmtree(silo(root) / "synthetic")
    shutil.copytree(silo(root).with_name("client1") / "synthetic", silo(root) / "synthetic")
    shutil.copytree(root / "state" / "client1" / "generator", root / "state" / "client0" / "another")


def ledger_thrown_away(root: Path) -> None:
    (root / "state" / "client0" / "private" / "silo_ledger.query.jsonl").unlink()


def generator_thrown_away(root: Path) -> None:
    shutil.rmtree(root / "state")
    (root / "state" / "client0").mkdir(parents=True)


def sentences_private_again(root: Path) -> None:
    path = silo(root) / "public_sids.txt"
    path.write_text("\n".join(path.read_text().split()[:3]))


def test_an_id_with_a_blank_declares_itself_public_and_no_other(tmp_path: Path) -> None:
    texts = {"web 12-s0": "said to be public", "12-s0": "a private note"}
    of = {"web 12-s0": "web 12", "12-s0": "12"}
    asked = [SiloQuery(f"q{split}", "a question", ("12-s0",), split) for split in ("train", "dev", "test")]
    one = Silo(name="one", passages={"web 12": "", "12": ""}, sentences=texts, passage_of=of, queries=asked)
    folder = silo_folders(write_silos(tmp_path / "silos", [one], facts={}))["one"]
    (folder / "public_sids.txt").write_text("web 12-s0\n", encoding="utf-8")
    assert public_sentences(folder) == {"web 12-s0": "said to be public"}
    (folder / "public_sids.txt").write_text("web 12-s0\nweb\n", encoding="utf-8")
    with pytest.raises(DataError, match="'web'"):
        public_sentences(folder)


def no_set(root: Path) -> None:
    shutil.rmtree(silo(root) / "synthetic")


@pytest.mark.parametrize(("damage", "message"), [
    (no_privacy, "differential privacy"),
    (edited_query, "checks failed"),
    (edited_card, "checks failed"),
    (contradicted, "AUDIT"),
    (of_another_silo, r"silo_ledger\.query\.jsonl"),
    (ledger_thrown_away, r"silo_ledger\.query\.jsonl"),
    (generator_thrown_away, "checks failed"),
    (sentences_private_again, r"9 sentences .*public_sids\.txt"),
    (no_set, "task=federated_generators"),
])  # fmt: skip
def test_a_card_that_does_not_cover_what_would_be_sent_is_refused(
    world: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(world)
    with pytest.raises((PrivateDataError, DataError), match=message):
        read(world)


def test_a_run_that_is_charged_with_less_than_it_released_is_refused(world: Path) -> None:
    run = world / "state" / "client0" / "generator" / "attempt-0"
    records = PrivacyLedger.read(run / "privacy_ledger.jsonl").records
    ledger = ledger_of(world)
    assert ledger.require_charged(records, "it")
    intent = next(record for record in records if record["kind"] == "intent")
    start = {"kind": "event", "name": START_EVENT, "start": {"releases": []}}
    for wrong, why in (
        ([*records, {**intent, "step": 99}], "older copy or was truncated"),
        ([{**record, "hash": "0"} for record in records], "older copy or was truncated"),
        ([*records, start], "another private run"),
        ([], r"silo_ledger\.query\.jsonl"),
    ):
        with pytest.raises(PrivateDataError, match=why):
            ledger.require_charged(wrong, "it")


@pytest.mark.costly
def test_a_set_under_another_guarantee_is_refused(world: Path) -> None:
    for change in ({"unit": "pair"}, {"neighbours": "replace_one"}):
        ((name, value),) = change.items()
        with pytest.raises(PrivateDataError, match=rf"federated\.privacy\.{name}={value}"):
            read(world, **change)
    ledger = ledger_of(world)
    ledger.budget = replace(ledger.budget, duplicates="merge")
    with pytest.raises(PrivateDataError, match=r"datamodule\.duplicates=merge"):
        read_synthetic(silo(world), ledger, near=[world / "state" / "client0"])


@pytest.mark.costly
def test_a_silo_reads_no_set_that_was_not_verified_with_a_budget_and_without(world: Path) -> None:
    plain = replace(TRAINED, privacy=replace(TRAINED.privacy, eps=None))
    path = silo(world) / "synthetic" / "queries.jsonl"
    whole = path.read_bytes()
    edited_query(world)
    for settings in (ANSWERED, TRAINED, plain):
        with pytest.raises(PrivateDataError, match="checks failed"):
            client0(world, settings)
        (world / "state" / "client0" / "run.json").unlink(missing_ok=True)
    path.write_bytes(whole)
    client = client0(world, plain)
    assert client.synthetic is not None and not client.synthetic.releases and client.epsilon() is None
