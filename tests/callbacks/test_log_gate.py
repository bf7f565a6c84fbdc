"""Inside a run with a guarantee nobody logs a number of private rows, by whatever way; what is public goes on."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_runs import Case
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from stand_ins import Numbers, Regression, StopAfter, dp, fit
from torch import Tensor

from lit_dpret.callbacks import MetricsFile, PrivacyCard, PublicMlflowLogger, PublicTensorBoardLogger, PublicWandbLogger
from lit_dpret.cards.card import read_card
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.private_step import PrivateStep
from lit_dpret.privacy.modes import NoPrivacy

SECRET = "train/loss_of_rows"


class Service:
    """What a logger talks to."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def add_scalar(self, *content: Any) -> None:
        self.got.append(content)


class Stamped(DummyLogger):
    """A logger of which nothing is known: it may stamp what it gets with the time."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[tuple[dict[str, float], int | None]] = []
        self.service, self.when = Service(), "during"

    @property
    def experiment(self) -> Any:
        return self.service

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        self.got.append((dict(metrics), step))

    def log_text(self, key: str, text: str) -> None:
        self.experiment.add_scalar(key, text)

    def finalize(self, status: str) -> None:
        self.when = status


class Leaky(Regression):
    """Shows the loss of its rows in one of the ways that Lightning offers."""

    def __init__(self, *, way: Callable[[Any, float], None], **settings: Any) -> None:
        super().__init__(**settings)
        self.way = way

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        losses = super().per_row_loss(rows)
        self.way(self, float(losses.detach().mean()))
        return losses


class In(Callback):
    """Does something with trainer and module in one of the hooks of a callback."""

    def __init__(self, hook: str, way: Callable[[Any, float], None]) -> None:
        setattr(self, hook, lambda trainer, module, *rest, **more: way(module, 0.5))


WAYS: dict[str, Callable[[Any, float], None]] = {
    "log": lambda module, loss: module.log(SECRET, loss),
    "yes or no in the place of the epoch": lambda module, loss: module.log("epoch", torch.tensor(loss > -1)),
    "a count that wraps around": lambda module, loss: module.log("step", torch.tensor(255, dtype=torch.uint8)),
    "log on the progress bar alone": lambda module, loss: module.log(SECRET, loss, prog_bar=True, logger=False),
    "log_dict": lambda module, loss: module.log_dict({SECRET: loss}),
    "log_metrics": lambda module, loss: module.logger.log_metrics({SECRET: loss}),
    "log_hyperparams": lambda module, loss: module.logger.log_hyperparams({SECRET: loss}),
    "experiment": lambda module, loss: module.logger.experiment.add_scalar(SECRET, loss),
    "a method of the logger": lambda module, loss: module.logger.log_text(SECRET, str(loss)),
    "callback_metrics": lambda module, loss: module.trainer.callback_metrics.update({SECRET: torch.tensor(loss)}),
    "an item": lambda module, loss: module.trainer.callback_metrics.__setitem__(SECRET, torch.tensor(loss)),
    "logged_metrics": lambda module, loss: module.trainer.logged_metrics.setdefault(SECRET, torch.tensor(loss)),
    "progress_bar_metrics": lambda module, loss: module.trainer.progress_bar_metrics.update({SECRET: loss}),
}
FOR_THE_DOCTOR = ("log", "log_metrics", "experiment", "an item")
HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_train_end")
IN_HOOKS = [
    *((hook, "log") for hook in HOOKS),
    *(("on_train_batch_start", way) for way in ("log_metrics", "experiment")),
    *(("on_train_end", "callback_metrics"), ("teardown", "log_metrics"), ("teardown", "experiment")),
]


def texts(folder: Path) -> str:
    """Everything that is readable in the files of a run, but for its weights."""
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("way", WAYS)
def test_a_private_loss_is_refused_by_name_by_a_fit_and_by_the_doctor(way: str, tmp_path: Path) -> None:
    logger = Stamped()
    module = Leaky(way=WAYS[way], privacy=dp(tmp_path))
    with pytest.raises(ConfigurationError, match=r"model\.log_private_loss") as raised:
        fit(tmp_path / "run", module, logger=[logger, MetricsFile(tmp_path / "run")])
    assert raised.value.trap == "T25"
    assert not logger.got and not logger.service.got and SECRET not in texts(tmp_path / "run")
    assert logger.when == "failed" and type(logger) is Stamped, "the logger is what it was"
    if way not in FOR_THE_DOCTOR:
        return
    case = Case(tmp_path / "other", make_module=lambda **settings: Leaky(way=WAYS[way], **settings))
    found = case.examined()
    assert [finding.trap for finding in found.refused] == ["T25"], found.format()
    assert "log_private_loss" in found.refused[0].text


@pytest.mark.parametrize(("hook", "way"), IN_HOOKS)
def test_a_callback_that_logs_is_refused_in_every_hook(hook: str, way: str, tmp_path: Path) -> None:
    logger = Stamped()
    callback = In(hook, WAYS[way])
    with pytest.raises(ConfigurationError, match=r"public_metrics"):
        fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), steps=2, logger=[logger], extra=[callback])
    assert not any(SECRET in metrics for metrics, _ in logger.got) and not logger.service.got


def test_what_a_module_of_another_base_logs_is_refused_when_lightning_takes_it_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(PrivateStep, "log")
    logger = Stamped()
    kept = lambda module, loss: logger.log_metrics({SECRET: loss})  # noqa: E731  # by the logger that its owner kept
    for number, way in enumerate((kept, WAYS["log"])):
        with pytest.raises(ConfigurationError, match=SECRET):
            fit(tmp_path / str(number), Leaky(way=way, privacy=dp(tmp_path)), logger=[logger])
        assert not logger.got


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("log", SECRET), ("a count that wraps around", "step"), ("log_hyperparams", "log_hyperparams"),
        ("experiment", "experiment.add_scalar"), ("a method of the logger", "log_text"), ("an item", SECRET),
        ("logged_metrics", SECRET),
    ],
)  # fmt: skip
def test_a_declared_leak_passes_and_the_card_names_it(way: str, named: str, tmp_path: Path) -> None:
    logger, run = Stamped(), tmp_path / "run"
    module = Leaky(way=WAYS[way], privacy=dp(tmp_path))
    module.log_private_loss = True
    fit(run, module, steps=2, logger=[logger], extra=[PrivacyCard(run_dir=run)])
    card = read_card(run)
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None
    (told,) = [fact["text"] for fact in card["assumptions"] if fact["holds"] is False]
    assert named in told or "experiment.add_scalar" in told


def test_a_run_without_a_claim_logs_what_it_likes_when_it_likes(tmp_path: Path) -> None:
    logger = Stamped()
    seen: list[int] = []
    module = Leaky(way=WAYS["log"], privacy=NoPrivacy())
    watch = In("on_train_end", lambda module, loss: seen.append(len(logger.got)))
    fit(tmp_path / "run", module, steps=2, logger=[logger], extra=[watch])
    assert any(SECRET in metrics for metrics, _ in logger.got) and seen == [len(logger.got)]


@pytest.mark.parametrize("call", ["log_metrics", "metrics"])
def test_an_experiment_that_was_taken_before_the_fit_is_watched_as_well(call: str, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "csv")
    taken = logger.experiment

    def way(module: Any, loss: float) -> None:
        taken.log_metrics({SECRET: loss}) if call == "log_metrics" else taken.metrics.append({SECRET: loss})

    with pytest.raises(ConfigurationError, match=r"experiment\." + call):
        fit(tmp_path / "run", Leaky(way=way, privacy=dp(tmp_path)), logger=[logger])
    assert SECRET not in texts(tmp_path)
    taken.log_metrics({"own": 1.0})
    assert "Gated" not in str(type(taken).__mro__), "the experiment is what it was"
    run = tmp_path / "declared"
    logger = CSVLogger(run, name="csv")
    taken = logger.experiment
    module = Leaky(way=way, privacy=dp(tmp_path))
    module.log_private_loss = True
    fit(run, module, steps=2, logger=[logger], extra=[PrivacyCard(run_dir=run), LearningRateMonitor()])
    assert read_card(run)["claim"]["epsilon"] is None
    assert SECRET in texts(run / "csv") and "lr-Adam" in texts(run / "csv")


class Declared(Regression):
    public_metrics = ("train/temperature",)

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        self.log("train/temperature", 0.5)
        return super().per_row_loss(rows)


def test_what_is_public_goes_on_and_is_told_once_for_each_logical_step(tmp_path: Path) -> None:
    run, logger = tmp_path / "run", Stamped()
    loggers = [logger, MetricsFile(run), CSVLogger(run, name="csv")]
    fit(run, Declared(privacy=dp(tmp_path)), logger=loggers, extra=[LearningRateMonitor()])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("lr-Adam", "train/temperature"):
        steps = [line["step"] for line in lines if name in line]
        assert len(steps) >= 6 and len(set(steps)) == len(steps) and max(steps) <= 6, (name, steps)
    assert any("privacy/eps_spent" in line for line in lines)
    assert [{"step": step} | metrics for metrics, step in logger.got if set(metrics) - {"epoch"}]
    table = next(run.rglob("metrics.csv")).read_text(encoding="utf-8")
    assert "lr-Adam" in table and "privacy/eps_spent" in table and "train/temperature" in table
    assert Case(tmp_path / "other", make_module=Declared).examined().refused == []


def test_a_logger_that_may_stamp_times_is_told_when_the_run_is_over(tmp_path: Path) -> None:
    logger, seen = Stamped(), []
    watch = In("on_train_batch_end", lambda module, loss: seen.append(len(logger.got)))
    trainer = fit(
        tmp_path / "run", Regression(privacy=dp(tmp_path)), logger=[logger], extra=[watch, LearningRateMonitor()]
    )
    assert set(seen) == {0} and logger.when == "success"
    told = [(name, step) for metrics, step in logger.got for name in metrics]
    assert ("privacy/eps_spent", 6) in told and ("lr-Adam", 3) in told
    assert float(trainer.callback_metrics["privacy/eps_spent"]) < 3, "and the run's result is there as ever"
    trainer.callback_metrics["own"] = torch.tensor(1.0)
    assert "log_metrics" not in vars(logger) and type(logger) is Stamped


@pytest.mark.costly
def test_how_often_lightning_logs_does_not_tell_how_many_batches_a_draw_needed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = fit(
        run, Regression(privacy=dp(tmp_path, noise_multiplier=4.0)), Numbers(sampling="poisson", physical_batch_size=2),
        extra=[LearningRateMonitor()], log_every_n_steps=3,
    )  # fmt: skip
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if "lr-Adam" in line] == list(range(6))
    assert trainer.log_every_n_steps == 3


# -- what W&B, TensorBoard and MLflow are told of a run: curves, public settings and the claim, when--


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
    """Sees which files are there while it trains."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, set[Path]()

    def on_train_batch_end(self, *given: Any) -> None:
        self.seen |= set(files(self.folder))


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


@pytest.mark.costly
def test_what_is_public_is_told_when_training_is_over_and_nothing_private_ever(made: Made, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    watch = trained(run, made(run))
    assert watch.seen == set(), "so that no time that a service keeps is that of a step"
    content = {path: f"{path}\n".encode() + path.read_bytes() for path in files(run)}
    assert [(path, word) for path, data in content.items() for word in PRIVATE if word.encode() in data] == []
    everything = b"".join(content.values())
    claim = read_card(run)["claim"]
    for told in ("lr-Adam", "privacy.eps", "datamodule.expected_batch_size", "DPSGD", claim["neighbours"]):
        assert told.encode() in everything, told


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


@pytest.mark.costly
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
