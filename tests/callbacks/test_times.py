"""How long a step takes depends on the private texts in it, and no file that is handed on tells how long it took."""

from __future__ import annotations

import shutil
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bad_runs import Case
from hydra import compose, initialize_config_module
from lightning.pytorch.callbacks import LearningRateMonitor, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit
from torch import Tensor

from lit_dpret.callbacks import MetricsFile, PrivacyCard, PublicWandbLogger
from lit_dpret.callbacks.progress import Throughput
from lit_dpret.config import CONFIG_MODULE
from lit_dpret.errors import ConfigurationError

STEPS, LONG, SHORT = 12, 120, 6
SECONDS_PER_TOKEN = 1e-3


class Timed(Regression):
    """A batch takes as long as its longest text; one unit of all has a long one."""

    def __init__(self, *, seconds_per_token: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.seconds_per_token = seconds_per_token

    def collate_rows(self, rows: list[Any]) -> dict[str, Tensor]:
        tokens = torch.tensor([float(LONG if row.query == "7" else SHORT) for row in rows])
        return {**super().collate_rows(rows), "tokens": tokens}

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        time.sleep(self.seconds_per_token * float(rows["tokens"].max()))
        return super().per_row_loss(rows)


def offline(folder: Path) -> Any:
    """W&B's logger, as ``logger=wandb logger.wandb.offline=true`` makes it."""
    pytest.importorskip("wandb")
    folder.mkdir(exist_ok=True)
    return PublicWandbLogger(save_dir=folder, offline=True)


def files(folder: Path, seconds_per_token: float) -> dict[str, bytes]:
    """The content of all files of a run whose long text takes so long."""
    torch.manual_seed(0)
    mode = dp(folder.parent, noise_multiplier=8.0, noise_seed=1)
    module = Timed(privacy=mode, dropout=0.0, seconds_per_token=seconds_per_token)
    data = Numbers(40, expected_batch_size=10, physical_batch_size=64)
    loggers = [MetricsFile(folder), CSVLogger(folder, name="csv")]
    extra = [PrivacyCard(run_dir=folder), LearningRateMonitor()]
    fit(folder, module, data, steps=STEPS, logger=loggers, extra=extra, save_every=5)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.costly
def test_runs_that_differ_in_the_time_of_their_steps_alone_leave_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last byte, though one is slower and begins later; so no file tells which steps drew the long text."""
    monkeypatch.setattr(
        "lit_dpret.privacy.ledger.private_run.random_secrets", SimpleNamespace(token_hex=lambda size: "ab" * size)
    )
    slow = files(tmp_path / "run", SECONDS_PER_TOKEN)
    shutil.rmtree(tmp_path / "run")  # the second run lies in the same place
    fast = files(tmp_path / "run", 0.0)
    endings = {Path(name).suffix for name in slow}
    assert {".jsonl", ".json", ".csv", ".ckpt", ".md", ".html"} <= endings, endings
    assert slow.keys() == fast.keys()
    assert [name for name in slow if slow[name] != fast[name]] == []


# -- what W&B writes -----------------------------------------------------------------------------------


def test_no_warning_of_a_command_is_written_into_its_folder() -> None:
    """A warning may depend on private rows, and the folder is handed on."""
    with initialize_config_module(config_module=CONFIG_MODULE, version_base="1.3"):
        settings = compose("train", return_hydra_config=True).hydra.job_logging
    formats = [one.format for one in settings.formatters.values()]
    assert formats and not any("asctime" in one or "relativeCreated" in one for one in formats), "nor any time"
    attached = [
        *settings.root.handlers,
        *(name for one in settings.get("loggers", {}).values() for name in one.handlers),
    ]
    kinds = {settings.handlers[name]["class"] for name in attached}
    assert kinds == {"logging.StreamHandler"}
    opened = {name for name, one in settings.handlers.items() if "filename" in one and not one.get("delay")}
    assert opened == set()


# -- what W&B collects by itself -----------------------------------------------------------------------


@pytest.mark.parametrize("quiet", [None, {"console": "off"}, {"x_disable_stats": True}])
def test_a_wandb_logger_that_keeps_the_terminal_or_measures_the_machine_is_refused(quiet: Any, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    settings = {} if quiet is None else {"settings": wandb.Settings(**quiet)}
    logger = WandbLogger(save_dir=tmp_path, offline=True, **settings)
    found = Case(tmp_path, trainer={"logger": logger}).examined()
    assert [finding.trap for finding in found.refused] == ["T35"] and "logger=wandb" in found.refused[0].text


def test_a_wandb_logger_that_does_neither_is_taken(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    both = wandb.Settings(console="off", x_disable_stats=True)
    for logger in (offline(tmp_path), WandbLogger(save_dir=tmp_path, offline=True, settings=both)):
        assert Case(tmp_path, trainer={"logger": logger}).examined().refused == []


@pytest.mark.parametrize("answer", [False, "raise"])
def test_wandb_without_a_key_is_refused_before_the_training(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    def login() -> bool:
        if answer == "raise":
            raise wandb.errors.UsageError("no key")
        return bool(answer)

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", login)
    with pytest.raises(ConfigurationError, match=r"logger\.wandb\.offline"):
        PublicWandbLogger(save_dir=tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offlin")  # which W&B takes for online
    with pytest.raises(ConfigurationError, match="WANDB_MODE='offlin'"):
        PublicWandbLogger(save_dir=tmp_path)


# -- what a run says of its own speed, and where it says it ------------------------------------


def test_times_go_to_the_terminal_and_into_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ticks = count()
    fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), Numbers(), steps=4,
        extra=[Throughput(every=2, clock=lambda: 2.0 * next(ticks))])  # fmt: skip
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("speed: ")]
    assert lines == ["speed: 1 s a step", "speed: 1 s a step"]
    assert not [f for f in (tmp_path / "run").rglob("*") if f.is_file() and b"speed/" in f.read_bytes()]


def test_a_setting_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"callbacks\.throughput\.every=0"):
        Throughput(every=0)
    with pytest.raises(ConfigurationError, match=r"callbacks\.throughput\.device='abacus'"):
        Throughput(device="abacus")


def _recording(kind: type[Any], seen: list[tuple[int, int | None]]) -> Any:
    """A bar of this kind that notes what it shows after each batch."""

    class Recording(kind):  # type: ignore[misc]
        def on_train_batch_end(self, *given: Any) -> None:
            super().on_train_batch_end(*given)
            if kind is TQDMProgressBar:
                seen.append((self.train_progress_bar.n, self.train_progress_bar.total))
            else:
                task = self.progress.tasks[self.train_progress_bar_id]
                seen.append((int(task.completed), task.total))

    return Recording()


@pytest.mark.costly
@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("private", [True, False], ids=["add_or_remove", "zero_out"])
def test_lightnings_bar_counts_logical_steps_and_no_physical_batches(
    kind: type[Any], private: bool, tmp_path: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    settings = {"neighbours": "add_or_remove", "delta": 1e-5} if private else {}
    data = Numbers(sampling="poisson", expected_batch_size=50, sample_rate=0.25, physical_batch_size=16)
    module = Regression(privacy=dp(tmp_path, noise_multiplier=8.0, **settings))
    fit(tmp_path / "run", module, data, steps=6, extra=[_recording(kind, seen)], enable_progress_bar=True)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4), (1, 2), (2, 2)], "a rate of a quarter: four steps to a pass"


@pytest.mark.costly
def test_a_bar_goes_on_where_a_run_was_interrupted(tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    data: dict[str, Any] = {"sampling": "poisson", "expected_batch_size": 50, "sample_rate": 0.25}
    module = lambda: Regression(privacy=dp(tmp_path, noise_multiplier=8.0))  # noqa: E731
    with pytest.raises(Killed):
        fit(tmp_path / "run", module(), Numbers(**data), steps=6, extra=[KillAt(3)])
    bar = _recording(TQDMProgressBar, seen)
    fit(tmp_path / "run", module(), Numbers(**data), steps=6, resume=True, extra=[bar], enable_progress_bar=True)
    # Lightning starts no new pass there, so that its bar knows the length of the next one alone.
    assert [done for done, _ in seen] == [3, 4, 1, 2] and seen[2:] == [(1, 2), (2, 2)]
