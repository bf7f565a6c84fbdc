"""Queries that a model was privately trained on are not public because somebody says so, whichever task is told it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from card_chain import Chain, make_chain
from frozen_heads import frozen
from pair_stand_ins import data_module
from stand_ins import fit
from tiny_silos import SIZE
from tiny_tasks import no_parts, retriever, trainer

from lit_dpret.callbacks import PrivacyAccountant, RetrievalEvaluation
from lit_dpret.callbacks.refusals import refuse_protected_queries
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.datamodules.silo import SiloDataModule
from lit_dpret.datamodules.silo_folder import silo_folders, write_silos
from lit_dpret.errors import ConfigurationError
from lit_dpret.federated.data import planted_silos
from lit_dpret.modules import FrozenDualEncoder
from lit_dpret.privacy.modes import DPSGD, SyntheticData
from lit_dpret.privacy.noise import default_secret_file
from lit_dpret.tasks import Encode, Evaluate, FederatedAttacks, HardNegatives, Inversion
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
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return make_chain(tmp_path_factory.mktemp("made") / "chain")


@pytest.fixture
def chain(made_once: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """A chain of one's own, whose private run was keyed by the user's own secret."""
    made = Chain(Path(shutil.copytree(made_once.root, tmp_path / "chain")))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    place = default_secret_file().expanduser()
    place.parent.mkdir(parents=True)
    shutil.copy(made.root / "secret", place)
    return made


def log_of(chain: Chain) -> PairsDataModule:
    return PairsDataModule(folder=chain.root / "log", sampling="poisson", expected_batch_size=8)


def evaluating(split: str, data: Any = None) -> RetrievalEvaluation:
    return RetrievalEvaluation(data="public", datamodule=data, split=split, metrics=["success@1"], top_k=1)


def test_training_on_a_released_set_evaluates_on_no_queries_of_the_log_behind_it(chain: Chain, tmp_path: Path) -> None:
    made = SyntheticDataModule(folder=chain.synthetic, expected_batch_size=8)
    judged = (chain.root / "log/qrels/train.tsv").read_text(encoding="utf-8")
    (chain.root / "log/qrels/dev.tsv").write_text(judged.replace("\nq", "\nagain"), encoding="utf-8")
    with (chain.root / "log/queries.jsonl").open("r+", encoding="utf-8") as file:
        asked = [line for line in file if f"\n{json.loads(line)['_id']}\t" in judged]
        file.write("".join(line.replace('"q', '"again', 1) for line in asked))
    behind = SyntheticDataModule(folder=chain.synthetic, evaluation=log_of(chain))
    for split, other in (("train", log_of(chain)), ("dev", log_of(chain)), ("dev", behind)):
        with pytest.raises(ConfigurationError, match=r"callbacks\.evaluation\.data=public") as found:
            fit(tmp_path / "run", retriever(privacy=SyntheticData()), made, extra=[evaluating(split, other)])
        assert found.value.trap == "T25" and not (tmp_path / "run" / "privacy_ledger.jsonl").exists()
    fit(tmp_path / "test", retriever(privacy=SyntheticData()), made, steps=1, extra=[evaluating("test", log_of(chain))])


def test_a_run_that_starts_from_another_evaluates_on_no_train_queries_of_that_one(chain: Chain, tmp_path: Path) -> None:
    module, other = retriever(privacy=DPSGD(eps=8.0, delta=1e-2)), data_module(tmp_path / "other")
    for split, start in (("train", None), ("test", chain.generator), ("train", chain.generator)):
        counting = PrivacyAccountant(run_dir=tmp_path / "run", init_from=start)
        runner = trainer(max_steps=1, callbacks=[counting, evaluating(split, log_of(chain))], logger=False)
        if (split, start) != ("train", chain.generator):
            refuse_protected_queries(runner, module, other)
            continue
        with pytest.raises(ConfigurationError, match=r"callbacks\.evaluation\.data=public"):
            refuse_protected_queries(runner, module, other)


@pytest.mark.parametrize("made", ["synthetic", "encoder"])
def test_what_was_made_from_a_private_run_knows_its_training_data(made: str, chain: Chain) -> None:
    """The run lies beside it, as in the documented pipeline; the ledger is found by the card's name of it."""
    log = log_of(chain)
    log.prepare_data()
    log.setup("test")
    with pytest.raises(ConfigurationError, match=r"task\.whose=public"):
        refuse_training_data(log, getattr(chain, made), knob="task.whose")
