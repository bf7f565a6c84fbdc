"""Hooks of a Lightning user's own put nothing that no noise covers into the weights that `make_private` saves."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from own_modules import Classifier, card_in, fit, made, row_loss, rows
from torch import Tensor, nn

from lit_dpret import PrivacyAccountant
from lit_dpret.errors import ConfigurationError, LitDpretError, UnsupportedModelError
from lit_dpret.modules.hook_watch import HookWatch

ONCE = {"max_steps": -1, "max_epochs": 1}


class WithMean(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))


def writes(hook: str, *, weight: bool = False) -> L.Callback:
    """Return a callback that writes what it reads off the private rows in one of its hooks."""

    def write(trainer: Any, private: Any, *_: Any) -> None:
        found = rows().tensors[0].mean(0)
        with torch.no_grad():
            if weight:
                private.module.net[-1].bias.copy_(found[:3])
            else:
                private.module.mean.copy_(found)

    callback = L.Callback()
    setattr(callback, hook, write)
    return callback


@pytest.mark.parametrize(
    ("hook", "weight"),
    [
        ("on_fit_start", True),
        ("on_train_start", False),
        ("on_train_epoch_start", True),
        ("on_train_epoch_start", False),
    ],
)
def test_what_is_written_before_the_first_batch_is_refused(hook: str, weight: bool, tmp_path: Path) -> None:
    with pytest.raises(LitDpretError, match=r"module\."):
        fit(tmp_path, made(WithMean()), callbacks=[writes(hook, weight=weight)], max_steps=2)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("hook", "done", "weight"),
    [("on_load_checkpoint", 1, True), ("on_load_checkpoint", 1, False), ("on_fit_start", 1, True),
     ("on_train_start", 1, False), ("on_fit_start", 2, True), ("on_fit_start", 2, False)],
)  # fmt: skip
def test_what_is_written_before_the_first_batch_of_a_resume_is_refused_and_without_one_before_it_is_saved(
    hook: str, done: int, weight: bool, tmp_path: Path
) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(tmp_path, made(WithMean()), callbacks=[kept], max_steps=2)
    shutil.rmtree(tmp_path / "model")
    callbacks = [writes(hook, weight=weight), PrivacyAccountant(resume=True)]
    with pytest.raises(LitDpretError, match=r"module\."):
        fit(tmp_path, made(WithMean()), callbacks=callbacks, max_steps=2, ckpt_path=tmp_path / f"kept/step={done}.ckpt")
    assert not (tmp_path / "model").exists()


@pytest.mark.costly
@pytest.mark.parametrize("average", [(), (WeightAveraging(),)], ids=["weights", "average"])
def test_a_resume_without_such_a_hook_goes_on(average: Any, tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(tmp_path, made(), callbacks=[kept, *average], max_steps=2)
    again = [PrivacyAccountant(resume=True), *average]
    (tmp_path / "model" / "weights.pt").unlink()
    fit(tmp_path, made(), callbacks=again, max_steps=2, ckpt_path=tmp_path / "kept/step=1.ckpt")
    assert (tmp_path / "model" / "weights.pt").is_file()


@pytest.mark.parametrize(
    ("hook", "weight"), [("on_train_epoch_end", False), ("on_train_epoch_end", True), ("on_train_end", False)]
)
@pytest.mark.parametrize("length", [ONCE, {"max_steps": 2}], ids=["epoch", "steps"])
def test_what_is_written_after_the_last_batch_is_not_saved(
    hook: str, weight: bool, length: dict[str, int], tmp_path: Path
) -> None:
    if hook == "on_train_epoch_end" and length is not ONCE:
        length = {"max_steps": 3}  # an epoch's end
    kept = ModelCheckpoint(tmp_path / "kept", save_on_train_epoch_end=True)
    with pytest.raises(LitDpretError, match=r"module\."):
        fit(tmp_path, made(WithMean()), callbacks=[writes(hook, weight=weight), kept], **length)
    assert not (tmp_path / "model").exists()
    assert hook == "on_train_end" or not [*(tmp_path / "kept").glob("*.ckpt")]


class ReturnsMore(Classifier):
    """Adds nothing to the state dict of its parents, and returns one with the rows of the last batch."""

    rows: Any = None

    def state_dict(self, *given: Any, **named: Any) -> Any:
        return {**super().state_dict(*given, **named), "rows": self.rows}


def keeping_loss(model: Any, batch: Any) -> Tensor:
    model.rows = batch[0].tolist()
    return row_loss(model, batch)


def test_what_an_inner_module_returns_beside_its_weights_is_not_saved_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HookWatch, "compare", lambda *_: None)  # which looks at attributes of some batches
    monkeypatch.setattr(HookWatch, "compare_last", lambda *_, **named: None)
    fit(tmp_path, made(ReturnsMore(), per_row_loss=keeping_loss), max_steps=2, enable_checkpointing=False)
    saved = torch.load(tmp_path / "model" / "weights.pt", weights_only=True)
    assert saved and "rows" not in saved


# -- a memory of earlier batches that the loss reads ------------------------------------------------------------


class Held:
    """An object in the surroundings of a loss."""

    bank: Any = None


QUEUE: list[Tensor] = []


def against(bank: Any, model: Any, batch: Any) -> Tensor:
    """Return the losses of rows that repel each other and, once there is one, a memory of earlier rows."""
    far = 0.0 if bank is None else torch.logsumexp(model(batch[0]) @ torch.as_tensor(bank).T, 1)
    return row_loss(model, batch) + far


class Remembers(L.Callback):
    """Gives the outputs of a batch's rows to ``keep`` when it has ended."""

    bank: Any = None

    def __init__(self, keep: Any = None) -> None:
        self.keep, self.batches = keep, torch.zeros(())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1  # which no loss reads
        if batch.rows is None or not len(batch.rows[0]):
            return
        found = pl_module.module(batch.rows[0]).detach()
        if self.keep is None:
            self.bank = found
        else:
            self.keep(found)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return against(self.read(), model, batch)

    def read(self) -> Any:
        return self.bank


def bank_of(model: Any) -> Any:
    return QUEUE[0] if QUEUE else None


def in_a_callback() -> tuple[Any, L.Callback]:
    mine = Remembers()
    return mine.loss, mine


def in_a_callback_by_its_text() -> tuple[Any, L.Callback]:
    mine = Remembers()
    return (lambda model, batch: against(getattr(mine, "bank"), model, batch)), mine  # noqa: B009


def in_a_closure() -> tuple[Any, L.Callback]:
    held = Held()
    return (lambda model, batch: against(held.bank, model, batch)), Remembers(
        lambda found: setattr(held, "bank", found)
    )


def in_an_array() -> tuple[Any, L.Callback]:
    held: dict[str, Any] = {"bank": None}
    keep = Remembers(lambda found: held.update(bank=found.numpy()))
    return partial(lambda held, model, batch: against(held["bank"], model, batch), held), keep


def in_a_class() -> tuple[Any, L.Callback]:
    class Own(Held):
        bank: Any = None

    return (lambda model, batch: against(Own.bank, model, batch)), Remembers(lambda found: setattr(Own, "bank", found))


def in_a_global() -> tuple[Any, L.Callback]:
    QUEUE.clear()
    return (lambda model, batch: against(bank_of(model), model, batch)), Remembers(lambda found: QUEUE.insert(0, found))


def in_a_module_beside_it() -> tuple[Any, L.Callback]:
    other = nn.Linear(1, 1)
    other.register_buffer("rows", torch.zeros(1, 3))
    return (lambda model, batch: against(other.rows, model, batch)), Remembers(lambda x: setattr(other, "rows", x))


def behind_the_trainer() -> tuple[Any, L.Callback]:
    mine = Remembers()
    private: list[Any] = []

    def loss(model: Any, batch: Any) -> Tensor:
        kept = [each.bank for each in model.mine().callbacks if isinstance(each, Remembers)]
        return against(kept[0], model, batch)

    mine.setup = lambda trainer, pl_module, stage: private.append(setattr(pl_module.module, "mine", lambda: trainer))  # type: ignore[method-assign]
    return loss, mine


PLACES = [
    in_a_callback, in_a_callback_by_its_text, in_a_closure, in_an_array, in_a_class, in_a_global,
    in_a_module_beside_it, behind_the_trainer,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_memory_of_earlier_rows_that_the_loss_reads_is_refused_wherever_it_is_kept(
    place: Any, tmp_path: Path
) -> None:
    loss, callback = place()
    with pytest.raises(UnsupportedModelError, match=r"bank|rows|QUEUE") as refusal:
        fit(tmp_path, made(per_row_loss=loss), callbacks=[callback])
    assert refusal.value.trap == "T11" and not (tmp_path / "model").exists()


@pytest.mark.costly
def test_what_the_code_of_a_loss_does_not_read_may_change_between_batches(tmp_path: Path) -> None:
    fit(tmp_path, made(), callbacks=[Remembers()])
    assert (tmp_path / "model" / "weights.pt").is_file()


@pytest.mark.parametrize("declared", [False, True])
def test_an_average_of_trained_weights_that_a_loss_reads_is_declared(declared: bool, tmp_path: Path) -> None:
    teacher = Classifier()

    class Follows(L.Callback):
        public_metrics = ("teacher",) if declared else ()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            with torch.no_grad():
                for mine, trained in zip(teacher.parameters(), pl_module.module.parameters(), strict=True):
                    mine.lerp_(trained, 0.5)

    def loss(model: Any, batch: Any) -> Tensor:
        return row_loss(model, batch) + (model(batch[0]) - teacher(batch[0]).detach()).square().mean(1)

    private = made(per_row_loss=loss)
    if not declared:
        with pytest.raises(UnsupportedModelError, match="teacher"):
            fit(tmp_path, private, callbacks=[Follows()])
        return
    fit(tmp_path, private, callbacks=[Follows()])
    assert (tmp_path / "model" / "weights.pt").is_file()


class KeepsTexts(Classifier):
    def __init__(self, vocabulary: list[str]) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_data_in_the_hyper_parameters_that_checkpoints_keep_for_the_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"KeepsTexts\.save_hyperparameters keeps vocabulary") as refusal:
        fit(tmp_path / "texts", made(KeepsTexts([f"word {number}" for number in range(100)])), max_steps=2)
    assert refusal.value.trap == "T25"
    fit(tmp_path / "few", made(KeepsTexts(["word"])), max_steps=2)
    assert any("KeepsTexts.vocabulary" in one["text"] for one in card_in(tmp_path / "few")["assumptions"])
