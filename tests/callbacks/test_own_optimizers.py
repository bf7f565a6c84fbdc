"""Optimizers and schedules of a module's own: those that a run cannot follow are refused before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import Regression, dp, fit
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.privacy.modes import NoPrivacy


class Plateau(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train/loss"}}


class Closure(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Two(Regression):
    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net[0].parameters()), torch.optim.Adam(self.net[3].parameters())]


class Without(Regression):
    def configure_optimizers(self) -> Any:
        return None


class TwoSchedules(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        every = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}
        return [optimizer], [every, {"scheduler": StepLR(optimizer, 1, 0.1), "interval": "step", "frequency": 3}]


def refused(folder: Path, module: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as found:
        fit(folder, module)
    assert '"intent"' not in (folder / "privacy_ledger.jsonl").read_text()
    return found.value


@pytest.mark.parametrize("kind", [Closure, Two, Without, Plateau])
@pytest.mark.parametrize("private", [True, False])
def test_an_optimizer_that_a_run_cannot_follow_is_refused_by_its_setting(
    kind: type[Any], private: bool, tmp_path: Path
) -> None:
    module = kind(privacy=dp(tmp_path) if private else NoPrivacy())
    found = refused(tmp_path / "run", module)
    assert "configure_optimizers" in str(found) and found.trap == ("T25" if kind is Plateau else None)


def test_every_schedule_is_followed(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "run", TwoSchedules(privacy=dp(tmp_path)), steps=6)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5**6 * 0.1**2)


class Halving(torch.optim.Adam):
    """Has a step of its own, which calls that of its base."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


class Halved(Regression):
    def configure_optimizers(self) -> Any:
        return Halving(self.parameters(), lr=1.0)


class HalvedAndMore(Halved):
    """Makes an update more in the last step, past Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch.rows is not None and batch.step == 2:
            raw: Any = self.optimizers(use_pl_optimizer=False)
            self.per_row_loss(batch.rows).mean().backward()
            raw.step()


@pytest.mark.slow
def test_a_step_that_calls_its_base_is_one_update(tmp_path: Path) -> None:
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # from now on torch runs the hooks in the step of Adam too
    trainer = fit(tmp_path / "run", Halved(privacy=dp(tmp_path)), steps=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5**3
    with pytest.raises(ConfigurationError) as found:
        fit(tmp_path / "more", HalvedAndMore(privacy=dp(tmp_path)), steps=3)
    assert found.value.trap == "T7"


class Smooth(Regression):
    """Differentiates inside its loss: a penalty on the gradient at the inputs."""

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        inputs = rows["inputs"].detach().requires_grad_()
        made = self.net(inputs).squeeze(-1)
        (slope,) = torch.autograd.grad(made.sum(), inputs, create_graph=True)
        return (made - rows["target"]).square() + 0.1 * slope.square().sum(1)


class SmoothAcrossRows(Smooth):
    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        return super().per_row_loss(rows) * rows["target"].mean()


def test_a_loss_that_differentiates_inside_itself_trains(tmp_path: Path) -> None:
    fit(tmp_path / "run", Smooth(privacy=dp(tmp_path, engine="loop")))
    with pytest.raises(UnsupportedModelError) as coupled:
        fit(tmp_path / "other", SmoothAcrossRows(privacy=dp(tmp_path, engine="loop")))
    assert coupled.value.trap == "T11"


class ExtraState(Regression):
    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_module_with_extra_state_trains(tmp_path: Path) -> None:
    fit(tmp_path / "run", ExtraState(privacy=dp(tmp_path)))
