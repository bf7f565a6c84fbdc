"""A checkpoint inside a logical step is that from before it, and attempts that die at once are gone on from."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import lightning as L
import own_modules
import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.connectors import signal_connector
from rank_runs import REFUSED, Server, told, weights
from stand_ins import Numbers, Regression, StopAfter, Stopped, dp, fit, granted, records

from lit_dpret import PrivacyAccountant
from lit_dpret.callbacks.checkpoint_files import newest_checkpoint
from lit_dpret.errors import ConfigurationError, ResumeError

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
MOMENTS = [(0, 1, "start"), (2, 0, "end"), (4, 2, "start"), (4, 2, "end")]


@pytest.fixture(scope="module")
def asked_inside(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a checkpoint was asked for at each of `MOMENTS`."""
    folder = tmp_path_factory.mktemp("asked") / "run"
    asks = [{"at": at, "part": part, "where": where} for at, part, where in MOMENTS]
    assert server.run("fit", folder, world=1, asks=asks, **IN_EPOCHS) == [0], told(folder, 0)
    return folder


@pytest.mark.costly
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

    public_metrics = ("passes",)  # a count would be put back

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


@pytest.mark.costly
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


# -- refusals and errors after steps were paid for -----------------------------------------------------


class History(Callback):
    """Keeps a number of each step, as progress callbacks do, and puts it into checkpoints."""

    def __init__(self, when: str) -> None:
        self.history: list[int] = []
        setattr(self, when, self._note)

    def _note(self, trainer: Any, *_: Any) -> None:
        self.history.append(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.history)}


@pytest.mark.costly
def test_what_no_checkpoint_may_hold_is_refused_after_one_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"History\.history") as refused:
        own_modules.fit(tmp_path, own_modules.made(), callbacks=[History("on_train_batch_end")])
    assert refused.value.trap == "T25" and len(granted(tmp_path)) == 1


class FailsIn(Callback):
    """Raises in one of its hooks once all steps are made."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise ValueError("The picture could not be drawn.")


@pytest.mark.costly
@pytest.mark.parametrize(
    "callback",
    [
        History("on_train_epoch_end"),
        *(FailsIn(hook) for hook in ("on_save_checkpoint", "on_train_batch_end")),
    ],
    ids=["refused", "save", "batch"],
)
def test_a_run_whose_last_hook_fails_keeps_its_steps_and_can_be_finished(callback: Any, tmp_path: Path) -> None:
    given = {"expected_batch_size": None, "sample_rate": 1 / 6}
    with pytest.raises((ConfigurationError, ValueError)):
        own_modules.fit(tmp_path, own_modules.made(), own_modules.data(**given), callbacks=[callback])
    (last,) = tmp_path.rglob("last.ckpt")
    assert not any("History" in key for key in torch.load(last, weights_only=False)["callbacks"])
    resumed = [PrivacyAccountant(resume=True)]
    own_modules.fit(tmp_path, own_modules.made(), own_modules.data(**given), ckpt_path=last, callbacks=resumed)
    assert len(granted(tmp_path)) == 6 and own_modules.card_in(tmp_path)["claim"]["guarantee"] == "dp"
    assert (tmp_path / "model" / "weights.pt").is_file()


@pytest.mark.costly
def test_a_resume_without_its_checkpoint_names_it_wherever_it_lies_in_the_run_folder(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2)
    with pytest.raises(Stopped):
        own_modules.fit(tmp_path, own_modules.made(), callbacks=[kept, StopAfter(3)])
    with pytest.raises(ResumeError, match=r"kept.*ckpt"):
        own_modules.fit(tmp_path, own_modules.made(), callbacks=[PrivacyAccountant(resume=True)])
    assert len(granted(tmp_path)) == 3
