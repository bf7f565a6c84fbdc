"""A module's own validation step on public data, within a private run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from own_modules import Classifier, card_in, data, fit, made, row_loss, rows
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lit_dpret import OptimizerSpec, PrivacyAccountant, PublicValidation
from lit_dpret.errors import ConfigurationError, UnsupportedModelError

NAMES = ("val_loss", "val_acc", "val_f1", "last_acc")
OWN, SGD = rows(), OptimizerSpec(name="sgd", lr=0.1)


class Measured(Classifier):
    """Validates by the means that Lightning's users have: numbers, a metric, and a collection."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5))
        collection = {"acc": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3)}
        self.collection, self.last = MetricCollection(collection, prefix="val_"), MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", row_loss(self, batch).mean(), prog_bar=True)
        self.collection.update(self(x), y)
        self.last(self(x), y)
        self.log("last_acc", self.last)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.collection.compute())
        self.collection.reset()


def public() -> DataLoader[Any]:
    x, y = rows(50).tensors
    return DataLoader(TensorDataset(x[20:] + 0.1, y[20:]), 8, shuffle=True)  # batches of 8, 8, 8 and 6 rows


def validation(**settings: Any) -> PublicValidation:
    return PublicValidation(public(), **{"metrics": NAMES, "every_n_steps": 2} | settings)


@pytest.mark.costly
def test_the_numbers_are_those_of_the_trainers_own_validation(tmp_path: Path) -> None:
    module, callback = Measured(), validation()
    trainer = fit(tmp_path, made(module), callbacks=[callback], max_steps=4)
    module.net.train()
    (found,) = L.Trainer(logger=False, accelerator="cpu").validate(module, public(), verbose=False)
    assert callback.last == pytest.approx(found, rel=1e-5) and set(found) == set(NAMES)
    assert {name: trainer.callback_metrics[name].item() for name in NAMES} == pytest.approx(found, rel=1e-5)
    card = card_in(tmp_path)
    (said,) = [each for each in card["assumptions"] if "validation rows" in each["text"]]
    assert said["holds"] == "unverified" and card["claim"]["guarantee"] == "dp"


@pytest.mark.costly
def test_a_run_is_the_same_with_and_without_it(tmp_path: Path) -> None:
    found = []
    for name, callbacks in (("with", [validation()]), ("without", [])):
        torch.manual_seed(3)
        module = Measured()
        module.net[1].eval()  # as somebody froze it
        fit(tmp_path / name, made(module, noise_seed=1), callbacks=callbacks)
        found.append((module.state_dict(), [each.training for each in module.modules()], torch.rand(1)))
        assert "log" not in vars(module) and all(metric.sync_on_compute for metric in (module.last,))
    (weights, modes, coin), (others, other_modes, other_coin) = found
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert modes == other_modes and torch.equal(coin, other_coin)


class Shared(Measured):
    """Counts in one metric, and keeps in lists and numbers, what training and validation have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.best = 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("kept", float(len(self.seen)) + self.best)


def keeping_loss(model: Any, batch: Any) -> Tensor:
    found = row_loss(model, batch)
    model.last.update(model(batch[0]), batch[1])
    model.seen.append(found.detach())
    model.best = max(model.best, float(found.max()))
    return found


@pytest.mark.costly
def test_nothing_that_training_keeps_is_in_a_public_metric(tmp_path: Path) -> None:
    found = []
    for name, loss in (("keeps", keeping_loss), ("keeps nothing", row_loss)):
        torch.manual_seed(3)
        callback = validation(metrics=(*NAMES, "kept"))
        fit(tmp_path / name, made(Shared(), noise_seed=1, per_row_loss=loss), callbacks=[callback], max_steps=4)
        found.append(callback.last)
    assert found[0] == found[1] and found[0]["kept"] == 0.0


class KeepsTensors(Measured):
    """Keeps an average, a list and an array of what it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.history, self.curve = torch.zeros(()), list[Tensor](), np.zeros(0)
        self.register_buffer("best", torch.tensor(torch.inf), persistent=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        found = row_loss(self, batch).mean()
        self.average = 0.9 * self.average + found
        self.best = torch.minimum(self.best, found)
        self.history.append(found)
        self.curve = np.append(self.curve, float(found))


@pytest.mark.costly
def test_a_public_validation_may_keep_tensors_and_others_may_not(tmp_path: Path) -> None:
    module = KeepsTensors()
    fit(tmp_path / "keeps", made(module), callbacks=[validation(every_n_steps=1)], max_steps=6)
    # In six validations of one number of batches each; that on trial leaves nothing.
    assert len(module.history) == len(module.curve) == 6 * len(public()) and module.average > 0

    class Writes(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.module.average = torch.rand(())

    with pytest.raises(UnsupportedModelError, match="average"):
        callbacks = [validation(every_n_steps=1), Writes()]
        fit(tmp_path / "writes", made(KeepsTensors()), callbacks=callbacks, max_steps=6)


@pytest.mark.costly
def test_the_patience_of_early_stopping_counts_validations(tmp_path: Path) -> None:
    """With so large a threshold nothing is an improvement after the first."""
    stop = EarlyStopping("val_loss", min_delta=100.0, patience=2)
    fit(tmp_path, made(Measured(), noise_multiplier=3.0), callbacks=[stop, validation(every_n_steps=1)], max_steps=9)
    assert card_in(tmp_path)["mechanism"]["steps_done"] == 3


@pytest.mark.costly
def test_a_checkpoint_is_chosen_by_it_and_resumed_from(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", monitor="val_loss", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path / "run", made(Measured()), callbacks=[validation(), kept])
    assert len(kept.best_k_models) == 3 and kept.best_model_score == min(kept.best_k_models.values())
    (path,) = (tmp_path / "kept").glob("*step=4.ckpt")
    resumed = [validation(), PrivacyAccountant(resume=True)]
    fit(tmp_path / "run", made(Measured()), callbacks=resumed, ckpt_path=path)
    assert card_in(tmp_path / "run")["mechanism"]["steps_done"] == 6


@pytest.mark.costly
@pytest.mark.parametrize(
    "kept",
    [
        lambda folder: EarlyStopping("val_loss", patience=9),
        lambda folder: ModelCheckpoint(folder / "kept", monitor="val_loss", every_n_train_steps=2),
        lambda folder: EMAWeightAveraging(decay=0.9),
    ],
    ids=["stopping", "checkpoint", "average"],
)
def test_a_callback_that_goes_on_with_the_numbers_of_an_earlier_fit_is_refused(kept: Any, tmp_path: Path) -> None:
    callback = kept(tmp_path)
    fit(tmp_path / "one", made(Measured()), callbacks=[callback, validation()], max_steps=4)
    with pytest.raises(ConfigurationError, match=type(callback).__name__):
        fit(tmp_path / "two", made(Measured()), callbacks=[callback, validation()], max_steps=4)


@pytest.mark.costly
@pytest.mark.parametrize("first", [True, False])
def test_an_average_of_the_weights_is_what_is_measured(first: bool, tmp_path: Path) -> None:
    module, callback, average = Measured(), validation(every_n_steps=6), EMAWeightAveraging(decay=0.9)
    both = [average, callback] if first else [callback, average]
    fit(tmp_path, made(module), callbacks=both)  # which puts the average into the module at the end
    (found,) = L.Trainer(logger=False, accelerator="cpu").validate(module, public(), verbose=False)
    assert callback.last["val_loss"] == pytest.approx(found["val_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("module", "callback", "named"),
    [
        (Measured, lambda: validation(metrics=NAMES[:-1]), "last_acc"),
        (Measured, lambda: validation(metrics=(*NAMES, "val_auc")), "val_auc"),
        (nn.Linear, validation, "validation_step"),
        (Measured, lambda: PublicValidation(DataLoader(OWN, 8), metrics=NAMES, equal_rows=60), "the training data set"),
        (
            Measured,
            lambda: PublicValidation(DataLoader(Subset(OWN, [50]), 8), metrics=NAMES, equal_rows=60),
            "the training data set",
        ),
    ],
    ids=["unnamed", "never", "plain", "own", "held-out"],
)
def test_what_cannot_be_public_or_is_not_said_is_refused_before_the_first_release(
    module: Any, callback: Any, named: str, tmp_path: Path
) -> None:
    one = module(4, 3) if module is nn.Linear else module()
    settings = {"optimizer": SGD} if module is nn.Linear else {}
    with pytest.raises(ConfigurationError, match=named):
        fit(tmp_path, made(one, noise_multiplier=3.0, **settings), data(Subset(OWN, range(40))), callbacks=[callback()])
    ledger = tmp_path / "privacy_ledger.jsonl"
    assert not ledger.exists() or '"intent"' not in ledger.read_text(encoding="utf-8")


class Changed(Dataset[Any]):
    """The rows of another data set, by way of a transform, as the usual ones of training and validation."""

    def __init__(self, rows: Any, scale: float = 1.0) -> None:
        self.rows, self.scale = rows, scale

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x * self.scale, y


class Images(Dataset[Any]):
    """Columns in attributes, as data sets of torchvision have them, and coins."""

    def __init__(self, data: Any, targets: Any) -> None:
        self.data, self.targets = data.numpy(), targets.tolist()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.data[index]) + torch.rand(1), self.targets[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([OWN[3], OWN[4]])


X, Y = OWN.tensors
PUBLIC = TensorDataset(X[:8] + 9.0, Y[:8])
HALVES = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).train_test_split(test_size=0.3, seed=0)
TENTH = [half.with_format("torch") for half in HALVES["train"].train_test_split(test_size=0.1, shuffle=False).values()]
READS: dict[str, tuple[Any, Any]] = {
    "half of a table": (HALVES["train"].with_format("torch"), HALVES["test"].with_format("torch")),
    "end of a table": (TENTH[0], Subset(TENTH[1], [0, 1])),
    "another object": (OWN, TensorDataset(X.clone(), Y)),
    "other labels": (OWN, TensorDataset(X.clone(), 2 - Y)),
    "batches": (OWN, [OWN[:8], OWN[8:16]]),
    "rows of a list": (OWN, [*OWN]),
    "stream": (OWN, Stream()),
    "concatenated": (OWN, ConcatDataset([PUBLIC, Subset(TensorDataset(X.clone(), Y), [5])])),
    "held out behind a transform": (Changed(Subset(OWN, range(40)), 0.5), Changed(Subset(OWN, range(40, 60)), 2.0)),
    "read again behind a transform": (Changed(OWN, 0.5), Changed(TensorDataset(X.clone(), Y), 2.0)),
    "columns": (Images(X, Y), Images(X.clone(), Y)),
    "held out of columns": (Subset(Images(X, Y), range(40)), Subset(Images(X.clone(), Y), range(40, 60))),
}


@pytest.mark.parametrize(("trained", "read"), READS.values(), ids=READS)
def test_rows_of_the_training_are_refused_whatever_object_gives_them(trained: Any, read: Any, tmp_path: Path) -> None:
    loader = read if isinstance(read, list) and len(read) == 2 else DataLoader(read, 8)
    callback = PublicValidation(loader, metrics=NAMES)
    before = torch.get_rng_state()
    with pytest.raises(ConfigurationError, match="PublicValidation") as refused:
        fit(tmp_path, made(Measured()), data(trained), callbacks=[callback])
    assert refused.value.trap == "T25" and torch.equal(before, torch.get_rng_state())
    assert not (tmp_path / "privacy_ledger.jsonl").exists()


class Packed:
    """A batch of which nobody knows the rows."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __iter__(self) -> Any:
        return iter(self.parts)


APART = Subset(ConcatDataset([OWN, PUBLIC]), range(60, 68))
MIXED = ConcatDataset([PUBLIC, TensorDataset(X[:2].clone(), Y[:2])])
SAID: dict[str, tuple[Any, dict[str, Any], str]] = {
    "compared": (DataLoader(APART, 8), {}, "validation rows that"),
    "some are equal": (DataLoader(MIXED, 8), {"equal_rows": 2}, "up to 2 of which"),
    "not compared": ([Packed(X[:8] + 9.0, Y[:8])], {}, "not compared"),
}


@pytest.mark.costly
@pytest.mark.parametrize(("loader", "settings", "said"), SAID.values(), ids=SAID)
def test_the_card_says_what_is_declared_of_other_rows(
    loader: Any, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    callback = PublicValidation(loader, metrics=NAMES, **settings)
    fit(tmp_path, made(Measured()), data(Subset(OWN, range(40))), callbacks=[callback], max_steps=1)
    (text,) = [each["text"] for each in card_in(tmp_path)["assumptions"] if "validation rows" in each["text"]]
    assert said in text


@pytest.mark.parametrize("settings", [{"every_n_steps": 0}, {"metrics": ()}, {"equal_rows": -1}])
def test_a_setting_out_of_range_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        validation(**settings)
