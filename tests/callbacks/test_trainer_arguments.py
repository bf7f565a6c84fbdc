"""Every argument of Lightning's Trainer has a verdict under a private run: it works, or it is refused by its name."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
from bad_runs import Case
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.plugins import MixedPrecision

from lit_dpret.callbacks.strategies import refuse_unsupported
from lit_dpret.distributed.strategies import STRATEGIES, Supported
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger
from lit_dpret.privacy.modes import DPSGD, NoPrivacy, PrivacyMode

WORKS = "works"  # the run makes the two steps that were planned, and its ledger holds them

# By argument: values, and whether they work or which setting the refusal names. Each value is tried.
VERDICTS: dict[str, list[tuple[Any, str]]] = {
    "accelerator": [("cpu", WORKS)],
    "strategy": [("auto", WORKS), ("ddp_spawn", r"trainer\.devices|trainer\.strategy")],
    "devices": [(1, WORKS)],
    "num_nodes": [(1, WORKS), (2, "num_nodes")],
    "precision": [
        (None, WORKS), ("bf16-mixed", WORKS), ("64-true", WORKS), ("16-true", r"trainer\.precision"),
    ],
    "logger": [(False, WORKS)],
    "callbacks": [
        ([], WORKS), ([LearningRateMonitor], WORKS), ([Timer], r"trainer\.max_time"),
        ([DeviceStatsMonitor], "DeviceStatsMonitor"), ([lambda: ThroughputMonitor(len)], "ThroughputMonitor"),
        ([SpikeDetection], "SpikeDetection"),
    ],
    "fast_dev_run": [(False, WORKS), (True, r"trainer\.fast_dev_run"), (3, r"trainer\.fast_dev_run")],
    "max_epochs": [(-1, WORKS), (None, WORKS), (1, WORKS), (0, r"trainer\.max_epochs")],
    "min_epochs": [(5, WORKS)],
    "max_steps": [(2, WORKS), (-1, r"trainer\.max_steps"), (0, r"trainer\.max_steps")],
    "min_steps": [(5, WORKS)],
    "max_time": [
        (None, WORKS), ("00:01:00:00", r"trainer\.max_time"), (timedelta(days=1), r"trainer\.max_time"),
        ({"days": 1}, r"trainer\.max_time"),
    ],
    "limit_train_batches": [
        (None, WORKS), (1.0, WORKS), (1, r"trainer\.limit_train_batches"), (0, r"trainer\.limit_train_batches"),
        (3, r"trainer\.limit_train_batches"), (0.0, r"trainer\.limit_train_batches"),
        (0.5, r"trainer\.limit_train_batches"),
    ],
    "limit_val_batches": [(0, WORKS), (1, WORKS), (0.5, WORKS)],
    "limit_test_batches": [(0, WORKS), (1, WORKS)],
    "limit_predict_batches": [(0, WORKS), (1, WORKS)],
    "overfit_batches": [
        (0.0, WORKS), (1, r"trainer\.overfit_batches"), (1.0, r"trainer\.overfit_batches"),
        (0.5, r"trainer\.overfit_batches"),
    ],
    "val_check_interval": [(1.0, WORKS), (None, WORKS), (1, WORKS), (timedelta(seconds=1), WORKS),
                           (0.5, "val_check_interval")],
    "check_val_every_n_epoch": [(1, WORKS), (3, WORKS), (None, WORKS)],
    "num_sanity_val_steps": [(0, WORKS), (2, WORKS), (-1, WORKS)],
    "log_every_n_steps": [(0, WORKS), (1, WORKS)],
    "enable_checkpointing": [(False, WORKS), (True, WORKS)],
    "enable_progress_bar": [(False, WORKS), (True, WORKS)],
    "enable_model_summary": [(False, WORKS), (True, WORKS)],
    "accumulate_grad_batches": [(1, WORKS), (2, r"trainer\.accumulate_grad_batches")],
    "gradient_clip_val": [(None, WORKS), (0, WORKS), (1.0, r"trainer\.gradient_clip_val")],
    "gradient_clip_algorithm": [("norm", WORKS), ("value", WORKS)],  # of nothing, where nothing is clipped
    "deterministic": [(True, WORKS), ("warn", WORKS)],
    "benchmark": [(True, WORKS)],
    "inference_mode": [(True, WORKS), (False, WORKS)],
    "use_distributed_sampler": [(True, WORKS), (False, WORKS)],
    "profiler": [(None, WORKS), ("simple", r"trainer\.profiler"), ("advanced", r"trainer\.profiler"),
                 ("pytorch", r"trainer\.profiler")],
    "detect_anomaly": [(False, WORKS), (True, r"trainer\.detect_anomaly")],
    "barebones": [(True, "barebones")],  # Lightning refuses it beside a logger, and a run has one
    "plugins": [(lambda: MixedPrecision("bf16-mixed", "cpu"), WORKS),
                (lambda: MixedPrecision("16-mixed", "cpu", None), r"trainer\.precision|scaler")],
    "sync_batchnorm": [(True, WORKS)],
    "reload_dataloaders_every_n_epochs": [(0, WORKS), (1, r"trainer\.reload_dataloaders_every_n_epochs")],
    "default_root_dir": [("elsewhere", WORKS)],
    "enable_autolog_hparams": [(True, WORKS), (False, WORKS)],
    "model_registry": [(None, WORKS)],  # where checkpoints are uploaded to: they hold what the claim covers
}  # fmt: skip

REFUSED = [(name, value, verdict) for name, tried in VERDICTS.items() for value, verdict in tried if verdict != WORKS]
WORKING = {name: [value for value, verdict in tried if verdict == WORKS] for name, tried in VERDICTS.items()}


def case_with(folder: Path, settings: dict[str, Any], **more: Any) -> Case:
    callbacks = [make() for make in settings.pop("callbacks", [])]
    if "plugins" in settings:
        settings["plugins"] = settings["plugins"]()
    if "default_root_dir" in settings:
        settings["default_root_dir"] = str(folder / settings["default_root_dir"])
    return Case(folder, callbacks=callbacks, trainer=settings, **more)


def test_every_argument_of_the_trainer_has_a_verdict() -> None:
    assert set(inspect.signature(L.Trainer).parameters) == set(VERDICTS), "try the new argument, and write it down"


@pytest.mark.parametrize("number", range(max(map(len, WORKING.values()))))
def test_what_works_makes_all_steps_of_the_plan(number: int, tmp_path: Path) -> None:
    """The first values of all arguments together, then the second ones, and so on."""
    settings = {name: values[number] for name, values in WORKING.items() if number < len(values)}
    case_with(tmp_path, settings).fitted()
    records = PrivacyLedger.read(tmp_path / "run" / "privacy_ledger.jsonl").records
    assert sum(record["kind"] == "release" for record in records) == 2


@pytest.mark.parametrize(
    ("argument", "value", "verdict"), REFUSED, ids=[f"{name}-{number}" for number, (name, _, _) in enumerate(REFUSED)]
)
def test_what_does_not_is_refused_by_its_name(argument: str, value: Any, verdict: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=verdict):  # Lightning refuses some of them itself
        case_with(tmp_path, {argument: value}).fitted()
    ledger = tmp_path / "run" / "privacy_ledger.jsonl"
    assert not ledger.exists() or not any(r["kind"] == "intent" for r in PrivacyLedger.read(ledger).records)


def test_what_can_never_finish_a_step_is_refused_without_a_claim_too(tmp_path: Path) -> None:
    for argument, value in (("fast_dev_run", True), ("reload_dataloaders_every_n_epochs", 1), ("max_epochs", 0)):
        with pytest.raises(ConfigurationError, match=rf"trainer\.{argument}"):
            case_with(tmp_path, {argument: value}, make_mode=NoPrivacy).fitted()


def test_times_may_be_told_where_nothing_is_promised(tmp_path: Path) -> None:
    case_with(tmp_path, {"profiler": "simple"}, make_mode=NoPrivacy).fitted()


class Undeclared(DPSGD):
    """A mode of a user's own, which says nothing of several ranks."""

    name: ClassVar[str] = "undeclared"
    strategies: ClassVar[Supported] = PrivacyMode.strategies


def test_a_mode_that_declares_no_strategy_runs_in_one_process_alone(tmp_path: Path) -> None:
    mode = Undeclared(eps=1.0, max_grad_norm=1.0)
    for row in STRATEGIES:
        assert (row.reason_against(mode) is None) == (row.name == "one_device")
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"trainer\.strategy=ddp"):
        refuse_unsupported(trainer, mode)
