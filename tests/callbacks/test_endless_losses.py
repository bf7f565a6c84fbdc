"""A run whose every loss would be NaN is refused before its ledger opens, by rows that are no data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from stand_ins import Numbers, Regression, dp, fit
from tiny_generator import generator
from tiny_models import tiny_bert, tiny_tokenizer
from torch import Tensor

from lit_dpret.callbacks.doctor import examine
from lit_dpret.callbacks.refusals import refuse_endless_losses
from lit_dpret.encoders import Contract, TextEncoder
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import DualEncoder, FrozenDualEncoder, OptimizerSpec
from lit_dpret.privacy.modes import DPSGD, LogitDP, PublicPassages

LEDGER = "privacy_ledger.jsonl"


class Probed(Regression):
    """Its loss is multiplied by ``factor``; it has rows that are no data, and notes what it was asked about."""

    def __init__(self, *, factor: float = 1.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.factor, self.asked = factor, []

    def longest_rows(self, count: int) -> dict[str, Tensor]:
        return {"inputs": torch.full((count, 4), 0.5), "target": torch.zeros(count)}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        self.asked.append(bool((rows["inputs"] == 0.5).all()))
        return super().per_row_loss(rows) * self.factor


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_without_a_value_is_refused_before_the_ledger_and_no_row_of_the_data_was_looked_at(
    factor: float, tmp_path: Path
) -> None:
    module = Probed(factor=factor, privacy=dp(tmp_path))
    with pytest.raises(ConfigurationError, match="per_row_loss"):
        fit(tmp_path / "run", module, Numbers(), steps=2)
    assert module.asked == [True] and not (tmp_path / "run" / LEDGER).exists()


def test_a_finite_loss_trains_as_if_nobody_had_asked(tmp_path: Path) -> None:
    weights = []
    for kind in (Probed, Regression):
        torch.manual_seed(3)
        module = kind(privacy=dp(tmp_path, noise_seed=5))
        fit(tmp_path / kind.__name__, module, Numbers(), steps=2)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


class Broken(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net[0].weight.data[0, 0] = math.nan


def test_weights_that_are_no_numbers_are_refused_by_name_before_the_ledger(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"net\.0\.weight .*NaN"):
        fit(tmp_path / "run", Broken(privacy=dp(tmp_path)), Numbers(), steps=2)
    assert not (tmp_path / "run" / LEDGER).exists()


def test_the_doctor_finds_it_too(tmp_path: Path) -> None:
    trainer = L.Trainer(default_root_dir=tmp_path, max_steps=2, logger=False, accelerator="cpu", barebones=True)
    found = examine(trainer, Probed(factor=math.nan, privacy=dp(tmp_path)), Numbers())
    assert any("per_row_loss" in one.text for one in found.findings if one.status == "refused")


def encoder() -> TextEncoder:
    return TextEncoder(tiny_bert(), tiny_tokenizer(), Contract(query_max_length=8, passage_max_length=10))


SPEC = OptimizerSpec(name="sgd", lr=0.1)
MODULES = {
    "frozen, against a pool": lambda t: FrozenDualEncoder(
        encoder=encoder(), privacy=PublicPassages(eps=3.0), optimizer=SPEC, temperature=t
    ),
    "against a pool": lambda t: DualEncoder(
        encoder=encoder(), privacy=PublicPassages(eps=3.0), optimizer=SPEC, temperature=t
    ),
    "in the batch": lambda t: DualEncoder(
        encoder=encoder(), privacy=LogitDP(eps=3.0, delta=1e-3, max_logit_grad_norm=1.0), optimizer=SPEC, temperature=t
    ),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_temperature_that_leaves_no_loss_is_found_on_public_texts(kind: str) -> None:
    refuse_endless_losses(MODULES[kind](0.05))
    with pytest.raises(ConfigurationError, match="temperature"):
        refuse_endless_losses(MODULES[kind](1e-42))


def test_a_generator_is_asked_about_random_tokens_and_keeps_its_mode_and_coins() -> None:
    module = generator(privacy=DPSGD(eps=3.0)).train()
    coins = torch.random.get_rng_state()
    refuse_endless_losses(module)
    assert module.training and torch.equal(coins, torch.random.get_rng_state())
    with torch.no_grad():
        module.model.get_input_embeddings().weight.fill_(math.nan)
    with pytest.raises(ConfigurationError):
        refuse_endless_losses(module)
