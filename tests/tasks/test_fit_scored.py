"""A generator is scored on queries that it was not trained on; a score on private ones goes nowhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import DummyLogger
from tiny_generator import generator
from tiny_tasks import parts, trainer

from lit_dpret.cards.card import read_card
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


@pytest.mark.parametrize("data", ["public", "private"])
def test_the_score_is_logged_unless_it_is_of_private_queries(tmp_path: Path, data: Any) -> None:
    told = Told()
    result = run(tmp_path, told, data=data)
    assert 0 <= result[BLEU] <= 100
    assert (BLEU in told.metrics) is (data == "public")
    assert read_card(tmp_path / "run")["claim"]["guarantee"] == "dp"


def test_whose_the_queries_are_has_to_be_said_and_a_missing_split_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="whose the validation queries are"):
        FitScored()
    with pytest.raises(ConfigurationError, match="max_passages=0"):
        FitScored(data="public", max_passages=0)
    with pytest.raises(DataError, match="nowhere"):
        run(tmp_path, Told(), split="nowhere")
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()
