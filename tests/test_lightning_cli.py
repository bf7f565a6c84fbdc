"""Lightning's own command line trains with the modules, data modules, modes and loggers of this package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from configured import composed
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf
from page_stages import lightning_cli
from stand_ins import CALIBRATED
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from lit_dpret import PrivateModule, UnitDataModule
from lit_dpret.cards.card import read_card
from lit_dpret.config import names
from lit_dpret.errors import ResumeError
from lit_dpret.privacy.modes import PrivacyMode

jsonargparse = pytest.importorskip("jsonargparse", reason="needs the extra cli (jsonargparse)")

KINDS = {"model": PrivateModule, "datamodule": L.LightningDataModule, "privacy": PrivacyMode}
CHOICES = [(group, name) for group in KINDS for name in names(group)]


def by_class_path(node: Any) -> Any:
    """A setting of ours as LightningCLI takes it."""
    if not isinstance(node, dict):
        return node
    rest = {key: by_class_path(value) for key, value in node.items() if not key.startswith("_")}
    return {"class_path": node["_target_"], "init_args": rest} if "_target_" in node else rest


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_the_settings_of_every_choice_are_arguments_that_lightning_cli_knows(group: str, name: str) -> None:
    chosen = composed(f"{group}={name}")[group]
    for key in [key for key in chosen if OmegaConf.is_missing(chosen, key)]:
        chosen[key] = "x"
    settings: Any = by_class_path(OmegaConf.to_container(chosen, resolve=True))
    if group == "model":
        settings["init_args"]["privacy"] = {"class_path": "lit_dpret.DPSGD", "init_args": {"eps": 3.0}}
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(KINDS[group], "it")
    parser.parse_object({"it": settings})
    with pytest.raises(jsonargparse.ArgumentError):  # and nothing else is
        parser.parse_object({"it": {**settings, "init_args": {**settings["init_args"], "no_such_setting": 1}}})


class Mine(L.LightningModule):
    """What somebody has already."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(width, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def losses_of_mine(model: Any, batch: Any) -> Tensor:
    return mse_loss(model.net(batch[0]).squeeze(1), batch[1], reduction="none")


class MyData(UnitDataModule):
    def __init__(self, rows: int = 200) -> None:
        dataset = TensorDataset(torch.randn(rows, 2, generator=torch.Generator().manual_seed(0)), torch.ones(rows))
        super().__init__(dataset, expected_batch_size=20)


class Interrupt(Callback):
    """Ends a run by an error after some batches, if it is told to."""

    def __init__(self, after: int | None = None) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if batch.last and batch.step + 1 == self.after:
            raise RuntimeError("stop")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program that the page shows, and a configuration of its second kind beside it."""
    monkeypatch.chdir(tmp_path)
    lightning_cli(tmp_path)
    spec = importlib.util.spec_from_file_location("train_cli", tmp_path / "train_cli.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setitem(sys.modules, "cli_classes", sys.modules[__name__])
    model = {"module": {"class_path": "cli_classes.Mine"}, "per_row_loss": "cli_classes.losses_of_mine", "eps": 3}
    chosen = {
        "model": {"class_path": "lit_dpret.make_private", "init_args": model,
                  "dict_kwargs": {"max_grad_norm": 0.5, "noise_multiplier": CALIBRATED}},
        "data": {"class_path": "cli_classes.MyData"},
        "trainer": {
            "max_steps": 6, "accelerator": "cpu", "default_root_dir": "runs/cli", "logger": False,
            "enable_progress_bar": False, "enable_model_summary": False,
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                 "init_args": {"dirpath": "runs/cli/checkpoints", "every_n_train_steps": 1, "save_last": True}},
                {"class_path": "cli_classes.Interrupt"},
            ],
        },
    }  # fmt: skip
    Path("mine.yaml").write_text(yaml.safe_dump(chosen), encoding="utf-8")
    yield made


def fit(script: ModuleType, *arguments: str) -> Any:
    """Run the program as the page does, with its settings."""
    return script.PrivateCLI(
        PrivateModule, L.LightningDataModule, subclass_mode_model=True, subclass_mode_data=True,
        save_config_kwargs={"overwrite": True}, args=["fit", "--config", "mine.yaml", *arguments],
    )  # fmt: skip


@pytest.mark.costly
def test_an_own_module_is_trained_interrupted_and_resumed_in_its_run_folder(script: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        fit(script, "--trainer.callbacks.after", "3")
    with pytest.raises(ResumeError, match="resume"):
        fit(script)
    done = fit(script, "--accountant.resume", "true", "--ckpt_path", "last")
    card = read_card(Path("runs/cli"))
    assert done.trainer.global_step == 6 and card["claim"]["guarantee"] == "dp"
    assert card["mechanism"]["max_grad_norm"] == 0.5 and card["claim"]["epsilon"] <= 3
    assert Path("runs/cli/model/weights.pt").is_file()
    trusted = next(str(one["text"]) for one in card["assumptions"] if "depends on no other row" in str(one["text"]))
    named = set(trusted.partition(":")[0].split(", "))
    assert "losses_of_mine" in named and not {name for name in named if name in dir(jsonargparse) or "Action" in name}


@pytest.mark.slow
def test_an_optimizer_of_the_command_line_is_the_one_that_runs_and_is_named(script: ModuleType) -> None:
    done = fit(script, "--optimizer", "SGD", "--optimizer.lr", "0.1")
    assert isinstance(done.trainer.optimizers[0], torch.optim.SGD)
    assert read_card(Path("runs/cli"))["mechanism"]["optimizer"] == "SGD"
