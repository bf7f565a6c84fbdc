"""What people do to a module of their own before they give it to ``trainer.fit``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from stand_ins import CALIBRATED, Numbers, Regression, dp, fit
from torch import nn

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import OptimizerSpec
from lit_dpret.privacy.modes import DPSGD, NoPrivacy


class Keeps(Regression):
    def __init__(self, *, width: int = 3, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters()


class KeepsSome(Regression):
    def __init__(self, *, width: int = 3, note: str = "a", **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters(ignore="note")


@pytest.mark.parametrize("kind", [Keeps, KeepsSome])
def test_a_module_that_saves_its_hyperparameters_trains_logs_them_and_goes_on(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for steps, resume in ((6, False), (6, True)):
        module = kind(privacy=dp(tmp_path), optimizer=OptimizerSpec(lr=0.01))
        assert dict(module.hparams) == {"width": 3}
        fit(folder, module, Numbers(), steps=steps, resume=resume, logger=CSVLogger(folder, version=f"{resume}"))
    assert "width: 3" in (folder / "lightning_logs" / "False" / "hparams.yaml").read_text(encoding="utf-8")


class Lazy(Regression):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("private", [True, False])
def test_a_layer_without_a_shape_is_refused_by_name_and_trains_once_it_has_one(private: bool, tmp_path: Path) -> None:
    mode = dp(tmp_path) if private else NoPrivacy()
    module = Lazy(privacy=mode)
    with pytest.raises(ConfigurationError, match=r"net\.0\.weight"):
        fit(tmp_path / "lazy", module)
    assert not (tmp_path / "lazy" / "privacy_ledger.jsonl").exists()
    module.net(torch.zeros(1, 4))
    fit(tmp_path / "built", module, steps=1)


@pytest.mark.parametrize("private", [True, False])
def test_a_module_inside_torch_compile_is_refused(private: bool, tmp_path: Path) -> None:
    module: Any = torch.compile(Regression(privacy=dp(tmp_path) if private else NoPrivacy()), backend="eager")
    with pytest.raises(ConfigurationError, match=r"torch\.compile"):
        fit(tmp_path / "run", module)
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


class OwnMode(DPSGD):
    """A mode of somebody else's: nothing shows how it clips."""


@pytest.mark.parametrize("kind", [DPSGD, OwnMode])
def test_a_card_says_that_a_mode_of_ones_own_is_believed(kind: type[DPSGD], tmp_path: Path) -> None:
    mode = kind(eps=3.0, max_grad_norm=1.0, noise_multiplier=CALIBRATED, secret_file=tmp_path / "secret")
    fit(tmp_path / "run", Regression(privacy=mode), extra=[PrivacyCard(run_dir=tmp_path / "run")])
    stated = read_card(tmp_path / "run")["assumptions"]
    found = [one["holds"] for one in stated if one["text"].startswith("OwnMode is a privacy mode from outside")]
    assert found == (["unverified"] if kind is OwnMode else [])
