"""Checkpoints of a run with a guarantee hold no number of private rows that nobody counts, whoever puts it there."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.connectors import signal_connector
from rank_runs import REFUSED, Server, told, weights
from stand_ins import KillAt, Killed, Numbers, Regression, dp, fit, granted, records
from torch import Tensor
from torchmetrics import MeanMetric

from lit_dpret.callbacks import PrivacyCard
from lit_dpret.callbacks.checkpoint_files import newest_checkpoint
from lit_dpret.cards.card import read_card
from lit_dpret.errors import ConfigurationError, ResumeError
from lit_dpret.modules.module_state import HookWatch
from lit_dpret.privacy.modes import NoPrivacy, StepCounts

SECRET = "loss_of_rows"


class Keeping(Regression):
    """Shows the loss of its rows to ``keep``."""

    def __init__(self, keep: Callable[[Any, float], None] = lambda module, loss: None, **settings: Any) -> None:
        super().__init__(**settings)
        self.keep, self.last = keep, 0.0

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        losses = super().per_row_loss(rows)
        self.last = float(losses.detach().mean())
        self.keep(self, self.last)
        return losses


class WithMetric(Keeping):
    """A metric of the rows whose state is saved with the weights."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen = MeanMetric()
        self.seen.persistent(True)

    def on_train_batch_end(self, *given: Any) -> None:
        self.seen.update(self.last)


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


class WithHook(Keeping):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[SECRET] = self.last


class HookInState(Keeping):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"][SECRET] = torch.tensor(self.last)


class WithMetadata(Keeping):
    """Lays rows beside the tensors of its state dict, where PyTorch keeps version numbers."""

    def state_dict(self, *given: Any, **named: Any) -> Any:
        found = super().state_dict(*given, **named)
        found._metadata[""][SECRET] = [self.last]
        return found


class WithAttribute(Keeping):
    """What hangs on a state dict is pickled with it."""

    def state_dict(self, *given: Any, **named: Any) -> Any:
        found = super().state_dict(*given, **named)
        vars(found)[SECRET] = self.last
        return found


class WithAttributeOfAWeight(Keeping):
    def state_dict(self, *given: Any, **named: Any) -> Any:
        found = super().state_dict(*given, **named)
        vars(next(iter(found.values())))[SECRET] = self.last
        return found


class BesideAWeight(Keeping):
    """Its bias is the first value of a longer tensor, whose others hold what the rows were."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.room = [torch.zeros(9)]
        self.net[3].bias = torch.nn.Parameter(self.room[0][:1])

    def per_row_loss(self, rows: dict[str, Tensor]) -> Tensor:
        losses = super().per_row_loss(rows)
        self.room[0].data[1:] = 12345.0 + losses.detach().mean()
        return losses


def to_hparams(module: Any, loss: float) -> None:
    module.hparams[SECRET] = loss


def to_hparams_of_the_data(module: Any, loss: float) -> None:
    module.trainer.datamodule.hparams[SECRET] = loss


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


Made = Callable[..., Any]
MODULES: dict[str, Made] = {
    "hparams": lambda **settings: Keeping(to_hparams, **settings),
    "hparams of the data": lambda **settings: Keeping(to_hparams_of_the_data, **settings),
    "metric": WithMetric,
    "buffer": WithBuffer,
    "extra state": WithExtraState,
    "hook": WithHook,
    "state in a hook": HookInState,
    "metadata": WithMetadata,
    "attribute": WithAttribute,
    "attribute of a weight": WithAttributeOfAWeight,
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
    assert refused.value.trap == "T25" and ("seen" if way == "metric" else SECRET) in str(refused.value)
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize("way", ["metadata", "attribute", "attribute of a weight", "metric", "extra state"])
def test_saved_weights_with_a_private_number_beside_them_are_refused(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HookWatch, "compare", lambda *_: None)
    with pytest.raises(ConfigurationError, match="seen" if way == "metric" else SECRET):
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


@pytest.mark.parametrize("way", WAYS)
def test_a_declared_leak_passes_and_the_card_names_it(way: str, tmp_path: Path) -> None:
    attacked(way, tmp_path, leak=True, extra=[PrivacyCard(run_dir=tmp_path / "run")])
    card = read_card(tmp_path / "run")
    assert card["claim"]["guarantee"] == "not_proved" and card["claim"]["epsilon"] is None
    (named,) = [fact["text"] for fact in card["assumptions"] if fact["holds"] is False]
    assert ("seen" if way == "metric" else SECRET) in named
    assert checkpoints(tmp_path)


def test_a_declared_leak_is_kept_after_the_end_as_well(tmp_path: Path) -> None:
    module = Keeping(privacy=dp(tmp_path))
    module.log_private_loss = True
    trainer = fit(tmp_path / "run", module, steps=1)
    module.hparams[SECRET] = module.last
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert (tmp_path / "later.ckpt").exists()


@pytest.mark.parametrize("way", ["hparams", "metric", "hook", "callback: state_dict"])
def test_a_run_without_a_claim_keeps_what_it_likes(way: str, tmp_path: Path) -> None:
    attacked(way, tmp_path, mode=NoPrivacy())
    assert checkpoints(tmp_path)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_that_is_asked_for_after_the_fit_is_looked_at_as_well(weights_only: bool, tmp_path: Path) -> None:
    settings = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    module = Keeping(to_hparams, privacy=dp(tmp_path))
    trainer = fit(tmp_path / "run", module, steps=1, save_every=100, callbacks=[accountant(tmp_path)], **settings)
    with pytest.raises(ConfigurationError, match=SECRET):
        trainer.save_checkpoint(tmp_path / "later.ckpt", weights_only)
    assert not checkpoints(tmp_path)
    honest = Regression(privacy=dp(tmp_path))
    trainer = fit(tmp_path / "other", honest, steps=1, callbacks=[accountant(tmp_path / "other")], **settings)
    trainer.save_checkpoint(tmp_path / "later.ckpt", weights_only)
    assert checkpoints(tmp_path)


def accountant(folder: Path) -> Any:
    from lit_dpret.callbacks import PrivacyAccountant

    return PrivacyAccountant(run_dir=folder / "run", eps_log_points=1)


def test_after_an_error_such_a_checkpoint_is_left_out_and_the_error_stays(tmp_path: Path) -> None:
    keep = OnExceptionCheckpoint(tmp_path / "left", "left")
    with pytest.warns(UserWarning, match=SECRET), pytest.raises(Killed):
        attacked("hparams", tmp_path, save_every=100, extra=[KillAt(3), keep])
    assert not checkpoints(tmp_path)


def test_a_checkpoint_of_weights_alone_does_not_tell_how_many_batches_a_draw_needed(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path / "weights", "{step}", every_n_train_steps=3, save_weights_only=True)
    data = Numbers(sampling="poisson", physical_batch_size=2)
    fit(tmp_path / "run", Regression(privacy=dp(tmp_path, noise_multiplier=4.0)), data, extra=[keep])
    found = checkpoints(tmp_path / "weights")
    assert found
    for checkpoint in found:
        loop = checkpoint["loops"]["fit_loop"]
        assert loop["epoch_loop.batch_progress"]["total"]["ready"] == checkpoint["global_step"]
        assert "_batches_that_stepped" not in loop["epoch_loop.state_dict"]


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


def test_a_trainer_that_fits_another_module_afterwards_is_left_alone(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), steps=1)
    other = BoringModel()
    other.hparams["own"] = 1.0
    trainer.strategy.connect(other)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    assert (tmp_path / "other.ckpt").exists()


def test_a_mode_that_is_pickled_keeps_nothing_of_the_run(tmp_path: Path) -> None:
    modes = []

    class Pickling(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            module.privacy.counts = StepCounts(units=3, clipped=2)  # as in the middle of a step
            modes.extend([dict(vars(module.privacy)), vars(pickle.loads(pickle.dumps(module.privacy)))])

    fit(tmp_path / "run", Regression(privacy=dp(tmp_path)), steps=1, extra=[Pickling()])
    own, kept = modes
    assert own["counts"] != kept["counts"] == StepCounts()
    assert [any(name.startswith("_") for name in each) for each in modes] == [True, False]


# -- checkpoints that are asked for in the middle of a logical step, and attempts that die before th--


STEPS = 6
# Three physical batches a step for one rank, and as many for each of two.
DATA = {"sampling": "truncated_poisson", "physical_batch_size": 8}
SMALL = DATA | {"physical_batch_size": 5}
# Of varying number, which a checkpoint does not tell.
HIDDEN = {"sampling": "poisson", "physical_batch_size": 4}
MODE = {"fixed": {"name": "dp_sgd", "accountant": "pld"}, "hidden": {"name": "dp_sgd"}}


KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("fit", 1, {}),
    "ddp": ("fit", 2, {}),
    "fsdp": ("shard_jobs:fit", 2, {}),
    "zero1": ("zero_fit", 2, {"zero": {"stage": 1}}),
    "zero2": ("zero_fit", 2, {"zero": {"stage": 2}}),
    "zero3": ("zero_fit", 2, {"zero": {"stage": 3}}),
}
FAST = [("one", "never", "fixed"), ("one", "auto", "hidden"), ("ddp", "never", "hidden")]
CASES = [
    (kind, replay, law)
    for kind in KINDS for replay in (("auto", "never") if kind in ("one", "ddp") else ("never",)) for law in MODE
]  # fmt: skip


def killed_twice(server: Server, folder: Path, job: str, world: int, given: dict[str, Any]) -> None:
    """Kill a run in a step, go on, kill that at once in its first step, and go on to the end."""
    for resume, at in ((False, 3), (True, 2)):
        doom = {"whose": -1, "at": at, "part": 1}
        assert server.run(job, folder, world=world, resume=resume, doom=doom, **given) == [-9] * world, told(
            folder, 0
        ).get("text")
    assert server.run(job, folder, world=world, resume=True, **given) == [0] * world, told(folder, 0).get("text")


@pytest.mark.parametrize(
    ("kind", "replay", "law"), [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_a_run_that_is_killed_and_killed_again_at_once_goes_on(
    kind: str, replay: str, law: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: Server = request.getfixturevalue("zero_server" if kind.startswith("zero") else "server")
    job, world, settings = KINDS[kind]
    data = HIDDEN if law == "hidden" else DATA if world == 1 else SMALL
    given = {"data": data, "steps": STEPS, "replay": replay, "mode": MODE[law]} | settings
    killed_twice(server, tmp_path / "run", job, world, given)
    made = weights(told(tmp_path / "run", 0))
    assert bool(made.isfinite().all()) and told(tmp_path / "run", 0)["global_step"] == STEPS
    if replay == "auto":  # the steps that were granted already are repeated bit by bit
        assert granted(tmp_path / "run") == [(0, step) for step in range(STEPS)]
        assert server.run(job, tmp_path / "whole", world=world, **given) == [0] * world
        assert torch.equal(made, weights(told(tmp_path / "whole", 0)))
        return
    again = [(2, step) for step in range(2, STEPS)]
    assert granted(tmp_path / "run") == [(0, 0), (0, 1), (0, 2), *again]
    begun = [r for r in records(tmp_path / "run", "event") if r["name"] == "fresh_attempt"]
    assert [(r["attempt"], r["step"]) for r in begun] == [(1, 2), (2, 2)]


# Four logical steps an epoch, three physical batches each.
EPOCHS = {"sampling": "truncated_poisson", "expected_batch_size": 50, "physical_batch_size": 32}
IN_EPOCHS: dict[str, Any] = {"data": EPOCHS, "steps": 9, "replay": "auto", "mode": MODE["fixed"]}
MOMENTS = [(0, 1, "start"), (2, 0, "end"), (4, 1, "start"), (4, 2, "start"), (4, 2, "end"), (5, 0, "start")]


@pytest.fixture(scope="module")
def asked_inside(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a checkpoint was asked for at each of `MOMENTS`."""
    folder = tmp_path_factory.mktemp("asked") / "run"
    asks = [{"at": at, "part": part, "where": where} for at, part, where in MOMENTS]
    assert server.run("fit", folder, world=1, asks=asks, **IN_EPOCHS) == [0], told(folder, 0)
    return folder


@pytest.mark.parametrize(("at", "part", "where"), MOMENTS)
def test_a_run_goes_on_with_the_whole_step_from_a_checkpoint_that_was_asked_for_inside_it(
    at: int, part: int, where: str, asked_inside: Path, server: Server, tmp_path: Path
) -> None:
    run = shutil.copytree(asked_inside, tmp_path / "run")
    made, path = told(run, 0)["weights"], run / f"asked{MOMENTS.index((at, part, where))}.ckpt"
    asked = torch.load(path, weights_only=True)
    done = at + (part == 2 and where == "end")
    progress = asked["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert position(asked)["steps_done"] == asked["global_step"] == done
    assert progress["total"]["ready"] == 3 * done and progress["current"]["ready"] == 3 * (done % 4 or 4 * (done > at))
    before = granted(run)
    for other in (run / "checkpoints").iterdir():
        other.unlink()
    path.rename(run / "checkpoints" / "last.ckpt")
    assert server.run("fit", run, world=1, resume=True, **IN_EPOCHS) == [0], told(run, 0)
    assert told(run, 0)["weights"] == made
    assert granted(run) == before == [(0, step) for step in range(9)]


def position(checkpoint: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in checkpoint["callbacks"].values() if "steps_done" in s)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero2", "zero3"])
@pytest.mark.parametrize("at", [0, 3])
def test_asking_for_a_checkpoint_inside_a_step_changes_nothing(
    kind: str, at: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: Server = request.getfixturevalue("zero_server" if kind.startswith("zero") else "server")
    job, world, settings = KINDS[kind]
    given = {"data": SMALL, "steps": 5, "mode": MODE["fixed"]} | settings
    assert server.run(job, tmp_path / "whole", world=world, **given) == [0] * world
    asks = [{"at": at, "part": 1}]
    assert server.run(job, tmp_path / "run", world=world, asks=asks, **given) == [0] * world, told(tmp_path / "run", 0)
    assert told(tmp_path / "run", 0)["weights"] == told(tmp_path / "whole", 0)["weights"]
    asked = torch.load(tmp_path / "run" / "asked0.ckpt", weights_only=True)
    assert position(asked)["steps_done"] == at
    if at == 0:
        counts = [n for n in numbers(asked["optimizer_states"]) if n]
        assert not counts, "the state of an optimizer that has made no step"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "ddp" else pytest.mark.slow) for kind in ("ddp", "fsdp", "zero3")]
)
@pytest.mark.parametrize("whose", [0, 1])
def test_a_private_number_that_one_rank_keeps_is_refused_by_all(
    kind: str, whose: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: Server = request.getfixturevalue("zero_server" if kind.startswith("zero") else "server")
    job, world, settings = KINDS[kind]
    given = {"data": SMALL, "steps": 5, "mode": MODE["fixed"]} | settings
    doom = {"whose": whose, "at": 1, "how": "keep"}
    assert server.run(job, tmp_path / "run", world=world, doom=doom, **given) == [REFUSED] * world
    for rank in range(world):
        assert "hyper_parameters.kept_number" in told(tmp_path / "run", rank)["text"]
    assert not list((tmp_path / "run").rglob("*.ckpt"))


def numbers(state: Any) -> list[float]:
    """The numbers in an optimizer's state, its settings left out."""
    if isinstance(state, dict):
        return [n for key, value in state.items() if key not in ("param_groups", "groups") for n in numbers(value)]
    if isinstance(state, list):
        return [n for value in state for n in numbers(value)]
    return state.flatten().tolist() if isinstance(state, torch.Tensor) else [float(state)] if state else []


class Breaks(Regression):
    """Fails in the forward pass of some physical batch, or while its third update is made."""

    def __init__(self, *, at: int | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.at, self.passes = at, 0

    def per_row_loss(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.passes += 1
            if self.passes == self.at:
                raise RuntimeError("a defect")
        return super().per_row_loss(rows)


class BreaksUpdate(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("a defect")


def broken(tmp_path: Path, at: int | None, *extra: Callback) -> Path:
    """A run that an error ends, with both ways of Lightning to write a checkpoint then."""
    folder = tmp_path / "run"
    ways = [OnExceptionCheckpoint(folder, "left"), ModelCheckpoint(folder / "more", "{step}", save_on_exception=True)]
    L.seed_everything(0, verbose=False)
    module = Breaks(at=at, privacy=dp(tmp_path, noise_multiplier=2.0))
    with pytest.raises(RuntimeError, match="a defect"):
        fit(folder, module, Numbers(physical_batch_size=8), extra=[*extra, *ways])
    return folder


def test_an_error_inside_a_step_leaves_the_checkpoint_from_before_it(tmp_path: Path) -> None:
    folder = broken(tmp_path, at=13)  # of three passes a step and one more for each unit's gradient, or of three
    left = torch.load(folder / "left.ckpt", weights_only=True)
    done = position(left)["steps_done"]
    assert done == len(records(folder, "release")) == left["global_step"] > 0
    assert len(list((folder / "more").glob("*.ckpt"))) == 1
    (folder / "left.ckpt").replace(folder / "checkpoints" / "last.ckpt")
    module = Breaks(at=None, privacy=dp(tmp_path, noise_multiplier=2.0))
    fit(folder, module, Numbers(physical_batch_size=8), resume=True)
    assert granted(folder) == [(0, step) for step in range(6)]


def test_an_error_inside_an_update_leaves_no_checkpoint(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="skipped: the update of a step was not finished"):
        folder = broken(tmp_path, None, BreaksUpdate())
    assert not (folder / "left.ckpt").exists() and not list((folder / "more").glob("*.ckpt"))
    kept = [torch.load(path, weights_only=True) for path in (folder / "checkpoints").glob("*.ckpt")]
    assert kept and {position(found)["steps_done"] for found in kept} == {2}


class Asks(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        trainer.save_checkpoint(trainer.default_root_dir + "/asked.ckpt")


def test_who_asks_inside_an_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="on_train_batch_end"):
        fit(tmp_path / "run", Regression(privacy=dp(tmp_path, noise_multiplier=2.0)), extra=[Asks()])
    assert not (tmp_path / "run" / "asked.ckpt").exists()


def test_a_trainer_gets_its_own_way_of_saving_back(tmp_path: Path) -> None:
    runner = fit(tmp_path / "run", Regression(privacy=dp(tmp_path, noise_multiplier=2.0)), steps=1)
    assert "save_checkpoint" not in vars(runner)
    assert broken(tmp_path / "other", at=4).exists()


class Requeued(Callback):
    """SLURM asks for the job to be requeued, in the middle of a step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if batch.step == 3 and batch.part == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def test_slurms_requeue_is_met_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(signal_connector, "call", lambda command, **_: asked.append(command) or 0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(SLURMEnvironment, "validate_settings", lambda self, num_devices, num_nodes: None)
    for name, value in {"global_rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1}.items():
        monkeypatch.setattr(SLURMEnvironment, name, lambda self, value=value: value)
    folder = tmp_path / "run"
    before = signal.getsignal(signal.SIGUSR1)
    module = Regression(privacy=dp(tmp_path, noise_multiplier=2.0))
    fit(folder, module, Numbers(physical_batch_size=8), extra=[Requeued()], plugins=[SLURMEnvironment()])
    assert asked == [["scontrol", "requeue", "7"]]
    assert position(torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=True))["steps_done"] == 4
    assert signal.getsignal(signal.SIGUSR1) == before
    assert newest_checkpoint(folder / "checkpoints") == folder / "checkpoints" / "last.ckpt"
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    assert newest_checkpoint(folder / "checkpoints") == folder / "hpc_ckpt_1.ckpt"
