"""Images, views and encoder in a private run: the accountant finds what it asks for, a replay sees the same pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tiny_images as tiny
import torch
from stand_ins import KillAt, Killed, fit
from torch import Tensor

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.callbacks.planning import plan_run
from lit_dpret.datamodules import ImagesDataModule
from lit_dpret.encoders.vision import AugmentedViews, EmbeddingNet, UnitLength
from lit_dpret.errors import ResumeError
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.private_module import PrivateModule
from lit_dpret.privacy.modes import DPSGD


class Agreement(PrivateModule):
    """Pulls the two views of each image together: a sum over images, for which DP-SGD is enough."""

    def __init__(self, *, views_seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(0)
        chosen: dict[str, Any] = {"eps": 50.0, "delta": 1e-3, "unit": "pair", "max_grad_norm": 1.0,
                                  "noise_multiplier": 1.0, "noise_seed": 0}  # fmt: skip
        super().__init__(privacy=DPSGD(**chosen | settings), optimizer=OptimizerSpec(name="adam", lr=0.01))
        self.net = UnitLength(EmbeddingNet(dim=4, channels=(4, 4)))
        self.views = AugmentedViews(seed=views_seed)

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        return self.views(rows)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return (self.net(rows["query"]) * self.net(rows["passage"])).sum(dim=1).neg()


def data(folder: Path, **settings: Any) -> ImagesDataModule:
    chosen: dict[str, Any] = {"expected_batch_size": 4, "physical_batch_size": 4, "sampling": "poisson"}
    return ImagesDataModule(source="cifar10", folder=folder, **chosen | settings)


def test_the_plan_takes_images_as_units_and_finds_no_user_with_too_many(tmp_path: Path) -> None:
    mode = DPSGD(eps=3.0, delta=1e-3, unit="pair", noise_multiplier=3.0, max_grad_norm=1.0, max_units_per_user=2)
    trainer = L.Trainer(accelerator="cpu", max_steps=6, max_epochs=-1, logger=False, enable_checkpointing=False)
    planned = plan_run(trainer, mode, data(tiny.parquet(tmp_path)))
    assert planned.steps == 6 and planned.steps_per_epoch == 3
    assert planned.plan is not None and planned.plan.budget.unit == "pair"


@pytest.mark.slow
def test_a_run_over_images_spends_its_epsilon_and_replays_its_views_after_a_kill(tmp_path: Path) -> None:
    folder = tiny.parquet(tmp_path / "images")
    accountant = PrivacyAccountant(run_dir=tmp_path / "whole", eps_log_points=1)
    whole = Agreement()
    fit(tmp_path / "whole", whole, data(folder), accountant=accountant)
    assert 0 < accountant.epsilon() < float("inf")

    def resumed(name: str, **settings: Any) -> dict[str, Tensor]:
        with pytest.raises(Killed):
            fit(tmp_path / name, Agreement(), data(folder), extra=[KillAt(3)])
        module = Agreement(**settings)
        fit(tmp_path / name, module, data(folder), resume=True)
        return module.state_dict()

    weights = whole.state_dict()
    same = resumed("same")
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    with pytest.raises(ResumeError, match="could not be repeated bit by bit"):
        resumed("other", views_seed=1)


def test_changed_pixels_stop_a_resume(tmp_path: Path) -> None:
    folder = tiny.parquet(tmp_path / "images")
    with pytest.raises(Killed):
        fit(tmp_path / "run", Agreement(), data(folder), extra=[KillAt(3)])
    changed = data(folder)
    changed.train_units().rows(0)[0].image[0, 0, 0] += 1
    with pytest.raises(ResumeError):
        fit(tmp_path / "run", Agreement(), changed, resume=True)
