"""What W&B, TensorBoard and MLflow are told of a run: curves, public settings and the claim, when training is over."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from stand_ins import Regression, StopAfter, dp, fit

from lit_dpret.callbacks import MetricsFile, PrivacyCard, PublicMlflowLogger, PublicTensorBoardLogger, PublicWandbLogger
from lit_dpret.cards.card import read_card
from lit_dpret.errors import ConfigurationError

PRIVATE = ("ann_log.jsonl", "what did ann ask", "machine-of-ann", "user-ann", "ann_script.py", "home-of-ann")
SETTINGS = {
    "privacy": {"_target_": "lit_dpret.privacy.modes.DPSGD", "eps": 3.0, "secret_file": PRIVATE[0]},
    "datamodule": {"pairs": PRIVATE[0], "words": PRIVATE[1], "expected_batch_size": 4,
                   "weights": {f"/home/{PRIVATE[0]}": 2.0, PRIVATE[1]: {"share": 0.5}}},
}  # fmt: skip


def wandb_logger(folder: Path) -> Any:
    return PublicWandbLogger(save_dir=folder, offline=True, settings=SETTINGS)


def tensorboard(folder: Path) -> Any:
    return PublicTensorBoardLogger(save_dir=folder, settings=SETTINGS)


def mlflow(folder: Path) -> Any:
    return PublicMlflowLogger(save_dir=folder, settings=SETTINGS)


SERVICES = {"wandb": wandb_logger, "tensorboard": tensorboard, "mlflow": mlflow}
Made = Callable[[Path], Any]


@pytest.fixture(params=SERVICES)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Make the logger of one service, on a machine with a name and a user that are nobody's business."""
    pytest.importorskip(request.param)
    monkeypatch.setattr(socket, "gethostname", lambda: PRIVATE[2])
    monkeypatch.setattr(getpass, "getuser", lambda: PRIVATE[3])
    monkeypatch.setattr(sys, "argv", [PRIVATE[4]])
    monkeypatch.setenv("HOME", str(tmp_path / PRIVATE[5]))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield SERVICES[request.param]
    finish_wandb()


def finish_wandb() -> None:
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.finish()
        wandb.teardown()


class Named(Regression):
    """Keeps a private path among its arguments, for every logger."""

    def __init__(self, file: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters("file")


class Watch(Callback):
    """Sees which files are there while it trains, and when it ended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen, self.ended = folder, set[Path](), 0.0

    def on_train_batch_end(self, *given: Any) -> None:
        self.seen |= set(files(self.folder))

    def on_train_end(self, *given: Any) -> None:
        self.ended = time.time()


def files(folder: Path) -> list[Path]:
    """The files of the services in a run folder; not what W&B writes for itself about a run of its program."""
    return [
        path for name in ("wandb", "tensorboard", "mlflow.db", "mlartifacts")
        for path in [folder / name, *(folder / name).rglob("*")]
        if path.is_file() and not path.name.startswith("debug")
    ]  # fmt: skip


def trained(folder: Path, logger: Any) -> Watch:
    watch = Watch(folder)
    module = Named(PRIVATE[0], privacy=dp(folder.parent))
    extra = [watch, LearningRateMonitor(), PrivacyCard(run_dir=folder)]
    fit(folder, module, logger=[MetricsFile(folder), logger], extra=extra)
    finish_wandb()
    return watch


def test_what_is_public_is_told_when_training_is_over_and_nothing_private_ever(made: Made, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    watch = trained(run, made(run))
    assert watch.seen == set()
    assert min(times(run)) >= watch.ended - 1  # some services count whole seconds
    content = {path: f"{path}\n".encode() + path.read_bytes() for path in files(run)}
    assert [(path, word) for path, data in content.items() for word in PRIVATE if word.encode() in data] == []
    everything = b"".join(content.values())
    claim = read_card(run)["claim"]
    for told in ("lr-Adam", "privacy.eps", "datamodule.expected_batch_size", "DPSGD", claim["neighbours"]):
        assert told.encode() in everything, told


def times(folder: Path) -> Iterator[float]:
    """Every moment that a service keeps, in seconds."""
    for path in files(folder):
        if "tfevents" in path.name:
            from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

            yield from (event.wall_time for event in EventFileLoader(str(path)).Load())
        elif path.name == "mlflow.db":
            from mlflow.tracking import MlflowClient

            client = MlflowClient(f"sqlite:///{path}")
            for experiment in client.search_experiments():
                yield experiment.creation_time / 1e3
                for run in client.search_runs([experiment.experiment_id]):
                    yield run.info.start_time / 1e3
                    for name in run.data.metrics:
                        yield from (one.timestamp / 1e3 for one in client.get_metric_history(run.info.run_id, name))
        else:
            yield path.stat().st_mtime


def test_mlflow_gets_the_claim_as_tags_and_the_card_as_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = pytest.importorskip("mlflow").tracking.MlflowClient
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tmp_path / "run"
    trained(run, PublicMlflowLogger(save_dir=run, tracking_uri=f"sqlite:///{tmp_path}/all_runs.db"))
    assert "MLFLOW_TRACKING_URI" not in os.environ, "the next run in this process has a store of its own"
    client = connect(f"sqlite:///{tmp_path}/all_runs.db")
    (found,) = client.search_runs([client.get_experiment_by_name("lit-dpret").experiment_id])
    claim = read_card(run)["claim"]
    assert found.data.tags["privacy.epsilon"] == str(claim["epsilon"]) and found.info.status == "FINISHED"
    told = ("guarantee", "epsilon", "delta", "unit", "neighbours")
    assert set(found.data.tags) == {"mlflow.runName", *(f"privacy.{name}" for name in told)}
    assert {one.path for one in client.list_artifacts(found.info.run_id)} == {"privacy_card.json", "privacy_card.html"}
    assert len(list((tmp_path / "mlartifacts").rglob("privacy_card.json"))) == 1, "beside the database, not in one run"


def test_tensorboard_shows_the_claim_beside_the_curves_and_a_second_run_its_own_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    for resume in (False, True):
        with nullcontext() if resume else pytest.raises(RuntimeError):
            fit(run, Regression(privacy=dp(tmp_path)), resume=resume, logger=[tensorboard(run)],
                extra=[LearningRateMonitor(), PrivacyCard(run_dir=run), StopAfter(99 if resume else 3)])  # fmt: skip
    found = EventAccumulator(str(run / "tensorboard")).Reload()
    assert {one.step for one in found.Scalars("lr-Adam")} == set(range(6))
    assert found.Scalars("privacy/epsilon")[-1].value == pytest.approx(read_card(run)["claim"]["epsilon"])
    assert sorted(path.name for path in (run / "tensorboard").glob("events*")) == [
        "events.out.tfevents.1", "events.out.tfevents.2"
    ]  # fmt: skip


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "sqlite:////no/such/folder/mlflow.db", "file:mlruns"])
def test_a_store_of_mlflow_that_is_not_there_is_refused_before_the_training(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", minversion="3.17")  # earlier ones take a folder
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=r"logger\.mlflow\.tracking_uri"):
        PublicMlflowLogger(save_dir=tmp_path, tracking_uri=address)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_whose_package_is_missing_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=rf"lit-dpret\[{name}\]"):
        SERVICES[name](tmp_path)
