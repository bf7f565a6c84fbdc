"""A generator is scored on queries that it was not trained on; a score on private ones goes nowhere."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import DummyLogger
from tiny_generator import generator
from tiny_tasks import parts, trainer, write_log, write_synthetic

from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import PairsDataModule, SyntheticDataModule
from lit_dpret.errors import ConfigurationError, DataError
from lit_dpret.tasks import FitScored
from lit_dpret.tasks.fit_scored import BLEU
from lit_dpret.tasks.parts import Parts
from lit_dpret.tasks.pipeline_stages import stage_callbacks


class Told(DummyLogger):
    """A logger that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}
        self.finalized: list[str] = []

    def finalize(self, status: str) -> None:
        self.finalized.append(status)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics |= metrics


def run(tmp_path: Path, told: Told, **settings: Any) -> dict[str, float]:
    given: Parts = parts(
        tmp_path,
        make_module=lambda privacy: generator(privacy=privacy, seed=0),
        make_callbacks=lambda: stage_callbacks(tmp_path / "run", resume=False, label="training"),
        make_loggers=lambda: [told],
        make_trainer=partial(trainer, max_steps=2),
    )
    given = replace(given, make_datamodule=partial(given.make_datamodule, expected_batch_size=8, physical_batch_size=8))
    return FitScored(**{"data": "public", "split": "test", "min_free_mb": 1} | settings).run(given)


@pytest.mark.costly
@pytest.mark.parametrize("data", ["public", "private"])
def test_the_score_is_logged_unless_it_is_of_private_queries(tmp_path: Path, data: Any) -> None:
    told = Told()
    result = run(tmp_path, told, data=data)
    assert 0 <= result[BLEU] <= 100
    assert (BLEU in told.metrics) is (data == "public")
    assert told.finalized == (["success"] * 2 if data == "public" else ["success"]), "for what is logged afterwards"
    kept = tmp_path / "run" / "validation_score.json"
    assert json.loads(kept.read_text())[BLEU] == result[BLEU]
    assert kept.stat().st_mode & 0o077 == (0o044 if data == "public" else 0)
    assert read_card(tmp_path / "run")["claim"]["guarantee"] == "dp"


def test_a_missing_split_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        run(tmp_path, Told(), split="nowhere")
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


@pytest.mark.parametrize(("again", "split"), [(False, "train"), (True, "train"), (True, "test")])
def test_queries_that_the_run_protects_are_not_taken_for_public_ones(tmp_path: Path, again: bool, split: str) -> None:
    own = None
    if again:
        copy = write_log(tmp_path / "copy")
        own = PairsDataModule(folder=copy, sampling="shuffle", drop_queries_without_passage=True)
        (copy / "qrels" / "train.tsv").rename(copy / "qrels" / f"{split}.tsv")
    with pytest.raises(ConfigurationError, match=rf"task\.data=public with task\.split={split}"):
        run(tmp_path, Told(), datamodule=own, split=split)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


@pytest.mark.costly
def test_public_data_of_its_own_may_be_scored_by_its_train_split(tmp_path: Path) -> None:
    other = PairsDataModule(folder=write_log(tmp_path / "other", [f"other{i}" for i in range(24)]))
    assert BLEU in run(tmp_path, Told(), datamodule=other, split="train")


@pytest.mark.costly
def test_synthetic_queries_are_held_against_their_card(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="privacy card"):
        run(tmp_path, Told(), data="synthetic")
    log = PairsDataModule(folder=tmp_path / "log")
    made = SyntheticDataModule(folder=write_synthetic(tmp_path / "made", log))
    assert BLEU in run(tmp_path, Told(), data="synthetic", datamodule=made, split="train")
    (tmp_path / "made" / "queries.jsonl").write_text('{"_id": "pseudo-p0", "text": "red car"}\n', encoding="utf-8")
    changed = SyntheticDataModule(folder=tmp_path / "made")
    with pytest.raises(DataError):
        run(tmp_path / "again", Told(), data="synthetic", datamodule=changed, split="train")
