"""A private run whose weights are NaN or infinite ends: they were released, and further steps would change nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from stand_ins import Numbers, Regression, dp, fit, granted, records, weights

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import verify_card
from lit_dpret.errors import DivergenceError
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.private_module import refuse_infinite
from lit_dpret.privacy.modes import NoPrivacy


class Rises(Callback):
    """Takes steps from one on whose length no float holds."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if batch.step == self.step:
            for group in trainer.optimizers[0].param_groups:
                group |= {"lr": 1e38, "weight_decay": 1e30}


def diverging(folder: Path, *, steps: int = 6, **given: Any) -> Regression:
    module = Regression(privacy=dp(folder), optimizer=OptimizerSpec(name="sgd", lr=0.01))
    extra = [PrivacyCard(run_dir=folder / "run"), Rises(3)]
    fit(folder / "run", module, Numbers(), steps=steps, save_every=1, extra=extra, **given)
    return module


def test_a_run_ends_where_its_weights_do_and_claims_what_was_planned(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"step 4 .*net\.0\.weight.*max_steps.*lr"):
        diverging(tmp_path)
    assert len(granted(tmp_path / "run")) == 4, "the two others are not paid for"
    last = records(tmp_path / "run")[-1]
    assert (last["kind"], last["reason"], last["steps"]) == ("end", "DivergenceError", 4), "of no private row"
    card = json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["claim"]["guarantee"] == "dp" and card["mechanism"]["steps_counted"] == 6
    assert not any("private rows" in banner for banner in card["banners"])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*.ckpt"))
    for name in names:
        saved = torch.load(tmp_path / "run" / "checkpoints" / name, weights_only=True)["state_dict"]
        assert all(bool(value.isfinite().all()) for value in saved.values()), name


def test_the_last_finite_checkpoint_is_had_by_a_resume_that_ends_there(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError):
        diverging(tmp_path)
    module = diverging(tmp_path, steps=3, resume=True)
    assert bool(weights(module).isfinite().all()) and (tmp_path / "run" / "model" / "weights.pt").is_file()
    card = json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["claim"]["guarantee"] == "dp" and verify_card(card, tmp_path / "run" / "privacy_ledger.jsonl") == []
    assert card["mechanism"]["steps_counted"] == 6, "which checkpoint it is follows from what was released"


def test_a_run_without_a_promise_goes_on_as_lightning_has_it(tmp_path: Path) -> None:
    module = Regression(privacy=NoPrivacy(), optimizer=OptimizerSpec(name="sgd", lr=0.01))
    fit(tmp_path / "run", module, Numbers(), steps=6, extra=[Rises(3)])
    assert not bool(weights(module).isfinite().all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_trained_weight_is_looked_at_and_no_frozen_one(value: float) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 0), torch.nn.Linear(2, 1)).half()
    refuse_infinite(layer, 0)
    with torch.no_grad():
        layer[2].bias[0] = value
    with pytest.raises(DivergenceError, match=r"2\.bias"):
        refuse_infinite(layer, 0)
    layer[2].bias.requires_grad = False
    refuse_infinite(layer, 0)
