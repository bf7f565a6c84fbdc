"""Every argument of Lightning's Trainer has a verdict under a private run: it works, or it is refused by its name."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
from bad_runs import BAD, Case
from frozen_heads import frozen
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.plugins import MixedPrecision
from negative_cases import dual
from pair_stand_ins import data_module
from stand_ins import fit, granted, records

from lit_dpret.callbacks.planning import fingerprint_of_files
from lit_dpret.callbacks.strategies import refuse_unsupported
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.distributed.strategies import STRATEGIES, Supported
from lit_dpret.errors import ConfigurationError, DataError, ResumeError
from lit_dpret.losses import MarginMSELoss
from lit_dpret.modules import FrozenDualEncoder
from lit_dpret.negatives import LabelledNegatives
from lit_dpret.negatives.drawn import LabelledNegative
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
    "fast_dev_run": [(False, WORKS), (3, r"trainer\.fast_dev_run")],
    "max_epochs": [(-1, WORKS), (None, WORKS), (1, WORKS), (0, r"trainer\.max_epochs")],
    "min_epochs": [(5, WORKS)],
    "max_steps": [(2, WORKS), (-1, r"trainer\.max_steps"), (0, r"trainer\.max_steps")],
    "min_steps": [(5, WORKS)],
    "max_time": [
        (None, WORKS), ("00:01:00:00", r"trainer\.max_time"), ({"days": 1}, r"trainer\.max_time"),
    ],
    "limit_train_batches": [
        (None, WORKS), (1.0, WORKS), (1, r"trainer\.limit_train_batches"), (0, r"trainer\.limit_train_batches"),
        
        (0.5, r"trainer\.limit_train_batches"),
    ],
    "limit_val_batches": [(0, WORKS), (1, WORKS), (0.5, WORKS)],
    "limit_test_batches": [(0, WORKS), (1, WORKS)],
    "limit_predict_batches": [(0, WORKS), (1, WORKS)],
    "overfit_batches": [
        (0.0, WORKS), (1, r"trainer\.overfit_batches"), (0.5, r"trainer\.overfit_batches"),
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
    "profiler": [(None, WORKS), ("simple", r"trainer\.profiler"), ("pytorch", r"trainer\.profiler")],
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

# What a bad run of `test_doctor.py` gives to the Trainer is refused there, by the doctor and by a fit.
TOLD_BY_THE_DOCTOR = [each["trainer"] for _, _, each in BAD if isinstance(each, dict) and list(each) == ["trainer"]]
REFUSED = [
    (name, value, verdict)
    for name, tried in VERDICTS.items()
    for value, verdict in tried
    if verdict != WORKS and {name: value} not in TOLD_BY_THE_DOCTOR
]
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
    assert len(records(tmp_path / "run", "release")) == 2


@pytest.mark.parametrize(
    ("argument", "value", "verdict"), REFUSED, ids=[f"{name}-{number}" for number, (name, _, _) in enumerate(REFUSED)]
)
def test_what_does_not_is_refused_by_its_name(argument: str, value: Any, verdict: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=verdict):  # Lightning refuses some of them itself
        case_with(tmp_path, {argument: value}).fitted()
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists() or not granted(tmp_path / "run")


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


# -- the plan of a run covers the files that a training reads beside its DataModule: a resume with o--


KEY = bytes(32)


def labels(path: Path, margin: float = 1.0) -> Path:
    records = [
        LabelledNegative(
            query_id=f"queries{i}", passage_id=f"corpus{i}", negative_id=f"corpus{(i + 5) % 13}", margin=margin
        )
        for i in range(13)
    ]
    path.write_text("".join(record.line() for record in records), encoding="utf-8")
    return path


def head(**settings: Any) -> FrozenDualEncoder:
    """Not prepared: it looks through the data that it is given."""
    return FrozenDualEncoder(optimizer=frozen().optimizer_spec, encoder=frozen().encoder, **settings)


def module_of(folder: Path, family: Any = head, **mode: Any) -> Any:
    known = {"eps": 8.0, "delta": 1e-2, "max_grad_norm": 0.1, "noise_multiplier": 4.0, "secret_file": folder / "secret"}
    privacy = DPSGD(**known | mode)
    source = LabelledNegatives(file=folder / "labels.tsv", lines_are_independent=True)
    return family(privacy=privacy, negatives=[source], loss=MarginMSELoss())


def private_data(folder: Path) -> PairsDataModule:
    if not (folder / "data").exists():
        data_module(folder / "data")
    return PairsDataModule(folder=folder / "data", sampling="poisson", expected_batch_size=4, physical_batch_size=16)


@pytest.mark.costly
def test_a_run_goes_on_with_the_labels_that_it_began_with_and_no_others(tmp_path: Path) -> None:
    labels(tmp_path / "labels.tsv")
    fit(tmp_path / "run", module_of(tmp_path), private_data(tmp_path), steps=2)
    labels(tmp_path / "labels.tsv", margin=-1.0)
    with pytest.raises(ResumeError, match="another file of labels or negatives"):
        fit(tmp_path / "run", module_of(tmp_path), private_data(tmp_path), steps=2, resume=True)
    labels(tmp_path / "labels.tsv")
    fit(tmp_path / "run", module_of(tmp_path), private_data(tmp_path), steps=2, resume=True)


@pytest.mark.parametrize("family", [head, dual])
def test_the_fingerprint_is_keyed_and_covers_the_files(family: Any, tmp_path: Path) -> None:
    labels(tmp_path / "labels.tsv")
    module = module_of(tmp_path, family)
    found = fingerprint_of_files(module, KEY)
    assert found == fingerprint_of_files(module, KEY) != fingerprint_of_files(module, bytes([1] * 32))
    assert fingerprint_of_files(frozen(), KEY) is None
    labels(tmp_path / "labels.tsv", margin=2.0)
    assert fingerprint_of_files(module, KEY) != found
    (tmp_path / "labels.tsv").unlink()
    with pytest.raises(DataError, match=r"negatives\.\w+\.file=.*labels\.tsv cannot be read"):
        fingerprint_of_files(module, KEY)
