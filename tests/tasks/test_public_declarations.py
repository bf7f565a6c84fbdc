"""Queries that a model was privately trained on are not public because somebody says so, whichever task is told it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from card_chain import Chain, make_chain, run
from frozen_heads import frozen
from pair_stand_ins import data_module
from stand_ins import fit
from tiny_silos import SIZE
from tiny_tasks import no_parts, retriever, trainer, write_beir

from lit_dpret.callbacks import PrivacyAccountant, RetrievalEvaluation
from lit_dpret.callbacks.refusals import refuse_protected_queries
from lit_dpret.cards.card import card_sha256, inherit_card, read_card, subject_of, write_card
from lit_dpret.cards.file import card_of_data
from lit_dpret.cards.tuning import tuning_facts
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.datamodules.silo import SiloDataModule
from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.errors import ConfigurationError, PrivateDataError, ResumeError
from lit_dpret.federated.data import planted_silos
from lit_dpret.modules import FrozenDualEncoder
from lit_dpret.privacy.modes import DPSGD, SyntheticData
from lit_dpret.privacy.noise import default_secret_file
from lit_dpret.tasks import Encode, Evaluate, FederatedAttacks, HardNegatives, Inversion
from lit_dpret.tasks.index import Index
from lit_dpret.tasks.index_folder import index_folder
from lit_dpret.tasks.uncovered import refuse_training_data

BATCHES: dict[str, Any] = {"sampling": "poisson", "expected_batch_size": 4, "physical_batch_size": 16}


def pairs(root: Path) -> PairsDataModule:
    return PairsDataModule(folder=root / "data", **BATCHES)


def a_silo(root: Path) -> Path:
    return silo_folders(root / "silos")["client0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs under DP on a log and on a silo, whose ledgers were keyed by the user's own secret."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        data_module(root / "data")
        write_silos(root / "silos", planted_silos(SIZE), facts={})
        for name, data in (("log", pairs(root)), ("silo", SiloDataModule(folder=a_silo(root), **BATCHES))):
            privacy = DPSGD(eps=8.0, delta=1e-2, max_grad_norm=0.1, noise_multiplier=4.0)
            module = FrozenDualEncoder(
                optimizer=frozen().optimizer_spec, encoder=frozen().encoder, privacy=privacy
            )  # fmt: skip
            fit(root / "runs" / name / "run", module, data, steps=1)
        (root / "runs" / "other").mkdir()
        yield root


@pytest.fixture(autouse=True)
def own_secret(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(trained / "state"))


TASKS: dict[str, Callable[[Path, str], Any]] = {
    "evaluate": lambda _, encoder: Evaluate(encoder=encoder, whose="public", split="train"),
    "encode": lambda _, encoder: Encode(encoder=encoder, side="query", queries="public", split="train"),
    "inversion": lambda _, encoder: Inversion(encoder=encoder, whose="public", split="train"),
    "hard_negatives": lambda root, encoder: HardNegatives(silo=a_silo(root), encoder=encoder, whose="public"),
    "federated_attacks": lambda root, encoder: FederatedAttacks(
        silos=root / "silos", encoder=encoder, whose="public", candidates=2
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_model_s_own_private_training_data_are_refused_as_public(name: str, trained: Path, tmp_path: Path) -> None:
    of = "silo" if name in ("hard_negatives", "federated_attacks") else "log"
    parts = no_parts(tmp_path / "out", make_datamodule=lambda: pairs(trained))
    made = TASKS[name](trained, str(trained / "runs" / of / "run"))
    if name == "inversion":  # which loads its encoder first
        with pytest.raises(ConfigurationError, match=r"task\.whose=public"):
            made._read(parts)
        return
    with pytest.raises(ConfigurationError, match=r"task\.(whose|queries)=public"):
        made.run(parts)


def test_another_encoder_measures_the_same_queries_as_declared(trained: Path, tmp_path: Path) -> None:
    parts = no_parts(tmp_path / "out", make_datamodule=lambda: pairs(trained))
    Evaluate(encoder="bm25", whose="public", split="train").run(parts)
    assert (tmp_path / "out" / "evaluation.json").is_file()


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return make_chain(tmp_path_factory.mktemp("chain"))


@pytest.fixture
def owned(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """A copy of the chain, whose private run was keyed by the user's own secret."""
    made = Chain(Path(shutil.copytree(chain.root, tmp_path / "chain")))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    place = default_secret_file().expanduser()
    place.parent.mkdir(parents=True)
    shutil.copy(made.root / "secret", place)
    return made


def log_of(chain: Chain) -> PairsDataModule:
    return PairsDataModule(folder=chain.root / "log", sampling="poisson", expected_batch_size=8)


def evaluating(split: str, data: Any = None) -> RetrievalEvaluation:
    return RetrievalEvaluation(data="public", datamodule=data, split=split, metrics=["success@1"], top_k=1)


@pytest.mark.costly
def test_training_on_a_released_set_evaluates_on_no_queries_of_the_log_behind_it(owned: Chain, tmp_path: Path) -> None:
    made = SyntheticDataModule(folder=owned.synthetic, expected_batch_size=8)
    judged = (owned.root / "log/qrels/train.tsv").read_text(encoding="utf-8")
    (owned.root / "log/qrels/dev.tsv").write_text(judged.replace("\nq", "\nagain"), encoding="utf-8")
    with (owned.root / "log/queries.jsonl").open("r+", encoding="utf-8") as file:
        asked = [line for line in file if f"\n{json.loads(line)['_id']}\t" in judged]
        file.write("".join(line.replace('"q', '"again', 1) for line in asked))
    behind = SyntheticDataModule(folder=owned.synthetic, evaluation=log_of(owned))
    for split, other in (("train", log_of(owned)), ("dev", log_of(owned)), ("dev", behind)):
        with pytest.raises(ConfigurationError, match=r"callbacks\.evaluation\.data=public") as found:
            fit(tmp_path / "run", retriever(privacy=SyntheticData()), made, extra=[evaluating(split, other)])
        assert found.value.trap == "T25" and not (tmp_path / "run" / "privacy_ledger.jsonl").exists()
    fit(
        tmp_path / "test",
        retriever(privacy=SyntheticData()),
        made,
        steps=1,
        extra=[evaluating("test", log_of(owned))],
    )


def test_a_run_that_starts_from_another_evaluates_on_no_train_queries_of_that_one(owned: Chain, tmp_path: Path) -> None:
    module, other = retriever(privacy=DPSGD(eps=8.0, delta=1e-2)), data_module(tmp_path / "other")
    for split, start in (("train", None), ("test", owned.generator), ("train", owned.generator)):
        counting = PrivacyAccountant(run_dir=tmp_path / "run", init_from=start)
        runner = trainer(max_steps=1, callbacks=[counting, evaluating(split, log_of(owned))], logger=False)
        if (split, start) != ("train", owned.generator):
            refuse_protected_queries(runner, module, other)
            continue
        with pytest.raises(ConfigurationError, match=r"callbacks\.evaluation\.data=public"):
            refuse_protected_queries(runner, module, other)


@pytest.mark.parametrize("made", ["synthetic", "encoder"])
def test_what_was_made_from_a_private_run_knows_its_training_data(made: str, owned: Chain) -> None:
    """The run lies beside it, as in the documented pipeline; the ledger is found by the card's name of it."""
    log = log_of(owned)
    log.prepare_data()
    log.setup("test")
    with pytest.raises(ConfigurationError, match=r"task\.whose=public"):
        refuse_training_data(log, getattr(owned, made), knob="task.whose")


# -- embeddings of synthetic queries: two claims go in, and one card has to cover both ----------


def read(data: Any, stage: str) -> Any:
    data.prepare_data()
    data.setup(stage)
    return data


def encode(chain: Chain, encoder: Path, out: Path, data: Any = None, split: str = "train") -> Path:
    data = data or SyntheticDataModule(folder=chain.synthetic, expected_batch_size=8)
    task = Encode(side="query", queries="public", split=split, encoder=str(encoder))
    task.run(SimpleNamespace(run_dir=out, read_data=partial(read, data)))  # type: ignore[arg-type]
    return out / "embeddings"


def claim(folder: Path) -> list[Any]:
    found = read_card(folder)["claim"]
    return [found[name] for name in ("epsilon", "delta", "unit", "neighbours")]


def without_card(chain: Chain, root: Path) -> Path:
    """The towers of an encoder that nothing private went into, as far as anybody can tell."""
    made = shutil.copytree(chain.encoder / "model", root / "public")
    for path in [*made.glob("privacy_*"), *made.glob("lit_dpret_trained_in.json")]:
        path.unlink()
    return made


@pytest.mark.parametrize("reader", ["synthetic", "pairs"])
def test_a_public_encoder_hands_on_the_claim_of_the_queries(chain: Chain, tmp_path: Path, reader: str) -> None:
    data = PairsDataModule(folder=chain.synthetic, expected_batch_size=8) if reader == "pairs" else None
    made = encode(chain, without_card(chain, tmp_path), tmp_path / "run", data)
    assert claim(made) == claim(chain.synthetic)
    assert read_card(made)["parents"][0]["sha256"] == card_sha256(chain.synthetic)
    assert json.loads((made / "index.json").read_text())["card"] == card_sha256(made)
    assert claim(index_folder(made, tmp_path / "index").folder) == claim(chain.synthetic)


def test_embeddings_and_an_index_of_them_say_what_was_declared_of_their_settings(chain: Chain, tmp_path: Path) -> None:
    data = SyntheticDataModule(folder=chain.synthetic, expected_batch_size=8)
    parts = SimpleNamespace(run_dir=tmp_path, read_data=partial(read, data))
    task = Encode(
        side="query", queries="public", split="train", encoder=str(chain.encoder / "model"), tuning_data="none"
    )
    task.run(parts)  # type: ignore[arg-type]
    index_folder(tmp_path / "embeddings", tmp_path / "index", tuning_data="none")
    index_folder(tmp_path / "embeddings", tmp_path / "unsaid")
    words = tuning_facts({"data": "none"})["text"]
    assert read_card(tmp_path / "embeddings")["tuning"]["text"].startswith(words)
    assert read_card(tmp_path / "index")["tuning"]["text"].startswith(words)
    assert not read_card(tmp_path / "unsaid")["tuning"]["text"].startswith(words)
    with pytest.raises(ResumeError, match="tuning_data"):  # the card that lies there says otherwise
        encode(chain, chain.encoder / "model", tmp_path)
    with pytest.raises(ConfigurationError, match=r"task\.tuning_data"):
        Index(embeddings=tmp_path, tuning_data="nobody")


def test_a_card_names_the_declaration_that_embedded_queries_are_public(chain: Chain, tmp_path: Path) -> None:
    data = PairsDataModule(
        folder=write_beir(tmp_path / "public", {"p": "an answer"}, {"q": "a question"}, {"test": [("q", "p")]}),
        expected_batch_size=8,
    )
    made = encode(chain, chain.encoder / "model", tmp_path / "run", data, split="test")
    assert any("task.queries=public" in one["text"] for one in read_card(made)["assumptions"])


def test_real_queries_of_an_evaluation_do_not_get_the_card_of_the_synthetic_set(chain: Chain, tmp_path: Path) -> None:
    queries, passages = {f"q{i}": f"a real question {i}" for i in range(3)}, {f"r{i}": f"answer {i}" for i in range(3)}
    judged = {split: [(f"q{i}", f"r{i}")] for i, split in enumerate(("train", "dev", "test"))}
    write_beir(tmp_path / "real", passages, queries, judged)
    real = PairsDataModule(folder=tmp_path / "real")
    data = SyntheticDataModule(folder=chain.synthetic, expected_batch_size=8, evaluation=real)
    made = encode(chain, without_card(chain, tmp_path), tmp_path / "run", data, split="test")
    assert "a real question 2" in (made / "texts.jsonl").read_text(encoding="utf-8"), "they are what was encoded"
    assert not (made / "privacy_card.json").exists()


def test_an_encoder_trained_on_the_queries_has_their_claim_already(chain: Chain, tmp_path: Path) -> None:
    made = encode(chain, chain.encoder / "model", tmp_path / "run")
    assert claim(made) == claim(chain.synthetic)
    assert card_sha256(chain.synthetic) in {parent["sha256"] for parent in read_card(made)["parents"]}


def test_an_export_of_such_an_encoder_has_it_as_well(chain: Chain, tmp_path: Path) -> None:
    place, source = tmp_path / "export", chain.encoder / "model"
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("privacy_*"))
    weights = [path for path in place.rglob("*") if path.is_file()]
    write_card(inherit_card(source, subject_of("weights", "export", weights, root=place), description="export"), place)
    made = encode(chain, place, tmp_path / "run")
    assert claim(made) == claim(chain.synthetic)
    assert card_sha256(chain.synthetic) in {parent["sha256"] for parent in read_card(made)["parents"]}


def test_an_encoder_that_lost_its_card_is_no_public_one(chain: Chain, tmp_path: Path) -> None:
    made = shutil.copytree(chain.encoder / "model", tmp_path / "model")
    for path in made.glob("privacy_*"):
        path.unlink()
    with pytest.raises(PrivateDataError, match="lost its privacy card"):
        encode(chain, made, tmp_path / "run")


def test_an_encoder_with_another_claim_is_refused(chain: Chain, tmp_path: Path) -> None:
    log = PairsDataModule(folder=chain.root / "log", sampling="poisson", expected_batch_size=8)
    mode = DPSGD(eps=50.0, noise_multiplier=40.0, max_grad_norm=0.5, secret_file=chain.root / "secret")
    run(tmp_path / "direct", retriever(privacy=mode), log, steps=1)
    with pytest.raises(ConfigurationError, match=r"would spend both.*Encode passages .*trained on these queries"):
        encode(chain, tmp_path / "direct" / "model", tmp_path / "run")
    assert not (tmp_path / "run" / "embeddings" / "index.json").exists()


@pytest.mark.parametrize("reader", [SyntheticDataModule, PairsDataModule])
def test_a_dp_mode_is_not_given_data_with_a_claim_of_their_own(chain: Chain, tmp_path: Path, reader: Any) -> None:
    data = reader(folder=chain.synthetic, sampling="poisson", expected_batch_size=8)
    mode = DPSGD(eps=0.5, noise_multiplier=4.0, max_grad_norm=0.5, secret_file=chain.root / "secret")
    with pytest.raises(ConfigurationError, match=r"privacy=synthetic") as refused:
        run(tmp_path / "run", retriever(privacy=mode), data, steps=1)
    assert refused.value.trap == "T27"


def test_a_card_is_found_beside_the_files_of_the_queries_alone(chain: Chain, tmp_path: Path) -> None:
    """And only one of a data set: a run's own card may lie beside a log."""
    (tmp_path / "released" / "qrels").mkdir(parents=True)
    card, other = tmp_path / "released" / "privacy_card.json", tmp_path / "own"
    shutil.copy(chain.synthetic / "privacy_card.json", card)
    other.mkdir()
    shutil.copy(chain.encoder / "model" / "privacy_card.json", other)
    found = SimpleNamespace
    assert card_of_data(found(folder=str(card.parent))) == card
    assert card_of_data(found(pairs=card.parent / "pairs.jsonl")) == card
    (card.parent / "pairs").mkdir()
    assert card_of_data(found(folder=card.parent / "pairs")) == card
    assert card_of_data(found(queries=card.parent / "queries")) == card, "a folder of shards"
    assert card_of_data(found(pairs=other / "log.jsonl")) is None
    assert card_of_data(found(queries=card.parent / "queries.jsonl", qrels={"train": other / "t.tsv"})) == card
    assert card_of_data(found(queries=other / "q.jsonl", qrels=card.parent / "qrels")) == card
    assert card_of_data(found(queries=other / "q.jsonl", qrels={"train": card.parent / "qrels/train.tsv"})) == card
    assert card_of_data(found(folder=other, corpus=card.parent / "corpus.jsonl")) is None
    assert card_of_data(None) is None
