"""Checkpoints of a run with a guarantee hold no number of private rows that nobody counts, whoever puts it there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit
from torchmetrics import MeanMetric

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.cards.card import read_card
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.hook_watch import HookWatch
from lit_dpret.privacy.modes import NoPrivacy, StepCounts

SECRET = "loss_of_rows"


class Keeping(Regression):
    """Shows a number of each batch's rows to ``keep``, in a hook: what the loss keeps is put back."""

    def __init__(self, keep: Callable[[Any, float], None] = lambda module, loss: None, **settings: Any) -> None:
        super().__init__(**settings)
        self.keep, self.last = keep, 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch.rows is not None:
            self.last = float(batch.rows["target"].mean())
            self.keep(self, self.last)


class WithBuffer(Keeping):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer(SECRET, torch.zeros(()))

    def on_train_batch_end(self, *given: Any) -> None:
        self.get_buffer(SECRET).fill_(self.last)


class WithExtraState(Keeping):
    def get_extra_state(self) -> Any:
        return {SECRET: getattr(self, "last", None)}

    def set_extra_state(self, state: Any) -> None:
        pass


class Lays(Keeping):
    """Lays the last number into what is saved, as ``lay`` says."""

    def __init__(self, lay: Callable[[Any, float], None], **settings: Any) -> None:
        super().__init__(**settings)
        self.lay = lay


class InHook(Lays):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self.lay(checkpoint, self.last)


class InStateDict(Lays):
    """The attributes of a state dict and of its tensors are pickled with it."""

    def state_dict(self, *given: Any, **named: Any) -> Any:
        found = super().state_dict(*given, **named)
        self.lay(found, self.last)
        return found


class BesideAWeight(Keeping):
    """Its bias is the first value of a longer tensor, whose others hold what the rows were."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.room = [torch.zeros(9)]
        self.net[3].bias = torch.nn.Parameter(self.room[0][:1])

    def on_train_batch_end(self, *given: Any) -> None:
        self.room[0].data[1:] = 12345.0 + self.last


def to_hparams(module: Any, loss: float) -> None:
    module.hparams[SECRET] = loss


class Keeps(Callback):
    """Has the last loss in its state, by one of the ways of a callback."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
        self.last = module.last

    def state_dict(self) -> dict[str, Any]:
        name = "step" if self.way == "state named like a step" else SECRET
        return {name: {SECRET: [self.last]}} if self.way.startswith("state") and hasattr(self, "last") else {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.way == "hook":
            checkpoint[SECRET] = getattr(self, "last", None)
        if self.way == "of another":
            next(iter(checkpoint["callbacks"].values()))[SECRET] = getattr(self, "last", None)


class Stateful(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {SECRET: getattr(self.trainer.lightning_module, "last", None)}  # type: ignore[union-attr]


MODULES: dict[str, Callable[..., Any]] = {
    "hparams": lambda **settings: Keeping(to_hparams, **settings),
    "hparams of the data": lambda **settings: Keeping(
        lambda module, loss: module.trainer.datamodule.hparams.update({SECRET: loss}), **settings
    ),
    "buffer": WithBuffer,
    "extra state": WithExtraState,
    "hook": partial(InHook, lambda checkpoint, loss: checkpoint.update({SECRET: loss})),
    "state in a hook": partial(InHook, lambda c, loss: c["state_dict"].update({SECRET: torch.tensor(loss)})),
    "metadata": partial(InStateDict, lambda state, loss: state._metadata[""].update({SECRET: [loss]})),
    "attribute": partial(InStateDict, lambda state, loss: vars(state).update({SECRET: loss})),
    "attribute of a weight": partial(
        InStateDict, lambda state, loss: vars(next(iter(state.values()))).update({SECRET: loss})
    ),
}
CALLBACKS = ("state_dict", "state named like a step", "hook", "of another")
WAYS = (*MODULES, *(f"callback: {way}" for way in CALLBACKS), "data")


def attacked(way: str, folder: Path, *, leak: bool = False, mode: Any = None, **settings: Any) -> Any:
    module = MODULES.get(way, Keeping)(privacy=mode or dp(folder))
    module.log_private_loss = leak
    extra = [Keeps(way.removeprefix("callback: "))] if way.startswith("callback") else []
    data = Stateful() if way == "data" else Numbers()
    fit(folder / "run", module, data, extra=[*extra, *settings.pop("extra", ())], **settings)
    return module


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in folder.rglob("*.ckpt")]


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_with_a_private_number_is_refused_and_not_written(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HookWatch, "compare", lambda *_: None)  # which looks at some batches only
    with pytest.raises(ConfigurationError, match=r"public_metrics") as refused:
        attacked(way, tmp_path)
    assert refused.value.trap == "T25" and SECRET in str(refused.value)
    assert not checkpoints(tmp_path)


@pytest.mark.costly
@pytest.mark.parametrize("way", ["metadata", "attribute", "attribute of a weight", "extra state"])
def test_saved_weights_with_a_private_number_beside_them_are_refused(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HookWatch, "compare", lambda *_: None)
    with pytest.raises(ConfigurationError, match=SECRET):
        attacked(way, tmp_path, save_every=100, extra=[PrivacyCard(run_dir=tmp_path / "run")])
    assert not list(tmp_path.rglob("weights.pt"))


def test_files_hold_the_values_of_a_weight_and_not_what_lies_beside_it_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HookWatch, "compare", lambda *_: None)
    monkeypatch.setattr(HookWatch, "compare_last", lambda *_, **named: None)
    module = BesideAWeight(privacy=dp(tmp_path))
    fit(tmp_path / "run", module, extra=[PrivacyCard(run_dir=tmp_path / "run")])
    assert module.net[3].bias.data_ptr() == module.room[0].data_ptr() and float(module.room[0][1]) > 1e4
    files = [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("weights.pt")]
    assert len(files) > 2
    for file in files:
        found = torch.load(file, weights_only=True)
        bias = found.get("state_dict", found)["net.3.bias"]
        assert bias.untyped_storage().nbytes() == 4 and torch.isfinite(bias).all()


@pytest.mark.parametrize(
    "way", ["hparams", "buffer", "state in a hook", "attribute of a weight", "callback: of another", "data"]
)
def test_a_declared_leak_passes_and_the_card_names_it(way: str, tmp_path: Path) -> None:
    attacked(way, tmp_path, leak=True, extra=[PrivacyCard(run_dir=tmp_path / "run")])
    card = read_card(tmp_path / "run")
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None
    (named,) = [fact["text"] for fact in card["assumptions"] if fact["holds"] is False]
    assert SECRET in named
    assert checkpoints(tmp_path)


def test_a_run_without_a_claim_keeps_what_it_likes(tmp_path: Path) -> None:
    for way in ("buffer", "hook", "callback: state_dict"):
        attacked(way, tmp_path / way.replace(": ", " "), mode=NoPrivacy())
        assert checkpoints(tmp_path / way.replace(": ", " "))


@pytest.mark.parametrize("leak", [False, True])
def test_a_checkpoint_that_is_asked_for_after_the_fit_is_looked_at_as_well(leak: bool, tmp_path: Path) -> None:
    module = Keeping(privacy=dp(tmp_path))
    module.log_private_loss = leak
    trainer = fit(tmp_path / "run", module, steps=1)
    trainer.save_checkpoint(tmp_path / "honest.ckpt")
    to_hparams(module, module.last)
    for number, weights_only in enumerate((False, True)):
        path = tmp_path / f"later{number}.ckpt"
        with nullcontext() if leak else pytest.raises(ConfigurationError, match=SECRET):
            trainer.save_checkpoint(path, weights_only)
        assert path.exists() is leak


def test_after_an_error_such_a_checkpoint_is_left_out_and_the_error_stays(tmp_path: Path) -> None:
    keep = OnExceptionCheckpoint(tmp_path / "left", "left")
    with pytest.warns(UserWarning, match=SECRET), pytest.raises(Killed):
        attacked("hparams", tmp_path, save_every=100, extra=[KillAt(1), keep])
    assert not checkpoints(tmp_path)


class BuiltAtFirstUse(Regression):
    """Builds a part without weights in its first forward pass."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.norm: Any = None

    def per_row_loss(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.norm is None:
            self.norm = torch.nn.LayerNorm(4, elementwise_affine=False)
        return super().per_row_loss(rows | {"inputs": self.norm(rows["inputs"])})


def test_a_part_without_weights_that_is_built_at_its_first_use_may_be_saved(tmp_path: Path) -> None:
    fit(tmp_path / "run", BuiltAtFirstUse(privacy=dp(tmp_path)), save_every=1)
    assert checkpoints(tmp_path)


# -- what honest users keep ----------------------------------------------------------------------------


class Settings(Callback):
    """Keeps its settings in checkpoints, by both ways."""

    def __init__(self) -> None:
        self.settings = {"every": 3, "names": ["a", "b"], "scale": torch.ones(2), "missing": float("nan")}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.settings)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["settings_of_a_callback"] = dict(self.settings)


class Counts(Callback):
    """Counts logical steps, and says that no private row is behind the number."""

    public_metrics = ("steps",)

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.steps += bool(batch.last)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class OwnCheckpoint(ModelCheckpoint):
    """A subclass whose state is Lightning's."""


class Honest(Regression):
    public_metrics = ("passes", "told")

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters({"width": 8, "nested": {"words": ["a"]}})
        self.register_buffer("scale", torch.tensor([1.0, float("nan")]))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.seen, self.told = MeanMetric(), MeanMetric()
        self.told.persistent(True)
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass

    def on_train_batch_end(self, *given: Any) -> None:
        self.seen.update(0.5)
        self.told.update(0.5)
        self.get_buffer("passes").add_(1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["vocabulary"] = ["a", "b"]
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith("frozen")}


def honest(folder: Path) -> Iterator[Callback]:
    yield from (Settings(), Counts(), LearningRateMonitor())
    yield OwnCheckpoint(dirpath=folder / "own", filename="{step}", every_n_train_steps=3, save_top_k=-1)


@pytest.mark.costly
def test_what_is_as_it_was_at_the_start_or_declared_is_kept_and_a_run_goes_on_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        fit(folder, Honest(privacy=dp(tmp_path, noise_multiplier=4.0)), extra=[*honest(folder), KillAt(5)])
    module, counts = Honest(privacy=dp(tmp_path, noise_multiplier=4.0)), Counts()
    module.strict_loading = False
    fit(folder, module, resume=True, extra=[counts, Settings()])
    assert counts.steps == 6
    found = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert found["callbacks"]["Counts"] == {"steps": 6} and found["vocabulary"] == ["a", "b"]
    assert found["hyper_parameters"]["nested"] == {"words": ["a"]} and "frozen.weight" not in found["state_dict"]


# -- data that are there from the start ----------------------------------------------------------------


class KeepsFromTheStart(Callback):
    def __init__(self, state: Any, way: str = "state", public: tuple[str, ...] = ()) -> None:
        self.state, self.way, self.public_metrics = state, way, public

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": self.state} if self.way == "state" else {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.way == "hook":
            checkpoint["vocabulary"] = self.state


class KeptByTheData(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": {f"word {i}": i for i in range(100)}}


class KeptAsExtraState(Regression):
    def get_extra_state(self) -> Any:
        return {"vocabulary": list(range(100))}

    def set_extra_state(self, state: Any) -> None:
        pass


DATA: dict[str, Any] = {
    "many": list(range(100)),
    "tensor": torch.arange(40),
    "text": "word " * 200,
}


@pytest.mark.parametrize("way", [*(f"{way} {what}" for way in ("state", "hook") for what in DATA), "data", "extra"])
def test_data_that_a_checkpoint_would_hold_from_the_start_are_refused(way: str, tmp_path: Path) -> None:
    kind, _, what = way.partition(" ")
    module = (KeptAsExtraState if way == "extra" else Regression)(privacy=dp(tmp_path))
    extra = [KeepsFromTheStart(DATA[what], kind)] if what else []
    with pytest.raises(ConfigurationError) as refused:
        fit(tmp_path / "run", module, KeptByTheData() if way == "data" else Numbers(), extra=extra)
    assert refused.value.trap == "T25" and not checkpoints(tmp_path)


def test_such_data_pass_by_declaration_and_the_card_names_who_keeps_something(tmp_path: Path) -> None:
    extra = [KeepsFromTheStart(DATA["tensor"], public=("vocabulary",)), PrivacyCard(run_dir=tmp_path / "run")]
    fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), extra=extra)
    card = read_card(tmp_path / "run")
    assert card["claim"]["epsilon"] is not None
    assert any(
        "KeepsFromTheStart" in fact["text"] and "checkpoints keep" in fact["text"] for fact in card["assumptions"]
    )


def test_a_trainer_that_fits_another_module_afterwards_is_left_alone(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), steps=1)
    other = BoringModel()
    other.hparams["own"] = 1.0
    trainer.strategy.connect(other)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    assert (tmp_path / "other.ckpt").exists()


def test_a_copy_or_a_pickle_of_a_module_in_training_holds_nothing_of_the_run(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    class Copies(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            module.privacy.counts = StepCounts(units=3, clipped=2)  # as in the middle of a step
            module._losses.append(torch.ones(1))
            kept["copy"], kept["pickle"] = copy.deepcopy(module), pickle.dumps(module)
            module._losses.pop()

    module = Regression(privacy=dp(tmp_path))
    fit(tmp_path / "run", module, steps=1, extra=[Copies()])
    assert (tmp_path / "secret").read_bytes() not in kept["pickle"]
    for made in (kept["copy"], pickle.loads(kept["pickle"])):
        assert made._guard is None and made._handover is not module._handover and not made._losses
        assert made.privacy.counts == StepCounts() and made.privacy.eps == module.privacy.eps
        assert not [name for name in vars(made.privacy) if name.startswith("_")]
