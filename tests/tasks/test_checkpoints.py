"""A run that is stopped anywhere on the disk's side goes on: half-written files, broken checkpoints, no card yet."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from planned_sweeps import STEPS, trial_parts
from stand_ins import Numbers, Regression, StopAfter, dp
from tiny_tasks import no_parts

from lit_dpret.callbacks import PrivacyAccountant, PrivacyCard, checkpoint_files
from lit_dpret.callbacks.checkpoint_files import WholeCheckpoints, newest_checkpoint
from lit_dpret.cards.card import read_card, verify_card
from lit_dpret.errors import ConfigurationError, LedgerError, ResumeError, StorageError
from lit_dpret.privacy.accounting.composition import epsilon
from lit_dpret.privacy.ledger.chain import ChainedFile
from lit_dpret.privacy.ledger.gate import ReleaseGate
from lit_dpret.privacy.ledger.private_run import Position
from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases, noise_keys, read_keys
from lit_dpret.tasks import Fit, Verify
from lit_dpret.tasks.fit import Training, train, warn_of_crowded_cores


def run(folder: Path, *, resume: bool = False, replay: str = "auto", eps: float = 3.0, reserve: int = 0,
        noise: float | None = None, extra: list[Callback] | None = None) -> Regression:  # fmt: skip
    """Six steps in ``folder`` as `train.py` makes them, a checkpoint after every second one."""
    L.seed_everything(0, verbose=False)
    settings = {} if noise is None else {"noise_multiplier": noise}
    module = Regression(privacy=dp(folder.parent, eps=eps, **settings))
    saving = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=2, save_last=True)
    accountant = PrivacyAccountant(
        run_dir=folder, resume=resume, replay=replay, eps_log_points=1, resume_reserve=reserve
    )

    def trainer(**given: Any) -> L.Trainer:
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
        return L.Trainer(accelerator="cpu", devices=1, max_steps=6, max_epochs=-1, **quiet, **given)

    folder.mkdir(exist_ok=True)
    train(
        module,
        Numbers(),
        Training(run_dir=folder, make_trainer=trainer, callbacks=[accountant, *(extra or []), saving], resume=resume),
    )
    return module


def records(folder: Path) -> list[dict[str, Any]]:
    return PrivacyLedger.read(folder / "privacy_ledger.jsonl").records


def spent(folder: Path) -> float:
    return epsilon(charged_releases(records(folder)), delta=1 / 400, neighbours="zero_out")


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class Photographs:
    """Copies of a run folder at the moments of a run: what a kill would leave on the disk just then."""

    MOMENTS = ("first record", "half an intent", "granted", "confirmed", "half a checkpoint", "two checkpoints", "done")

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.calls = folder, dict.fromkeys(self.MOMENTS, 0)
        granted, confirmed, written = ReleaseGate.authorise, ReleaseGate.record, ChainedFile._write

        def authorise(gate: Any, *given: Any) -> Any:
            permit = granted(gate, *given)
            self.take("granted", at=4)
            return permit

        def record(gate: Any, *given: Any) -> None:
            confirmed(gate, *given)
            self.take("confirmed", at=3)

        def write(ledger: Any, file: Any, data: bytes) -> None:
            self.take("first record", at=1, after=b"")
            if b'"kind":"intent"' in data:
                self.take("half an intent", at=4, after=data[: len(data) // 2])
            written(ledger, file, data)

        def replace(draft: Path, target: Path) -> None:
            self.take("half a checkpoint", at=3, after=draft)
            os.rename(draft, target)
            self.take("two checkpoints", at=3)

        patch.setattr(ReleaseGate, "authorise", authorise)
        patch.setattr(ReleaseGate, "record", record)
        patch.setattr(ChainedFile, "_write", write)
        patch.setattr(checkpoint_files.os, "replace", replace)

    def take(self, name: str, *, at: int, after: bytes | Path = b"") -> None:
        """Copy the folder at the ``at``-th call, with a torn ledger line or half of a draft."""
        self.calls[name] += 1
        if self.calls[name] != at:
            return
        copy = self.place(name)
        shutil.copytree(self.folder, copy)
        if isinstance(after, Path):
            draft = copy / after.relative_to(self.folder)
            draft.write_bytes(draft.read_bytes()[: draft.stat().st_size // 2])
        else:
            with (copy / "privacy_ledger.jsonl").open("ab") as file:
                file.write(after)

    def place(self, name: str) -> Path:
        return self.folder.with_name(name.replace(" ", "_"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Photographs, torch.Tensor, float]:
    """An uninterrupted run that was photographed on its way, its weights and its epsilon."""
    folder = tmp_path_factory.mktemp("photographed") / "run"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        photographs = Photographs(folder, patch)
        module = run(folder)
    shutil.copytree(folder, photographs.place("done"))
    return photographs, weights(module), spent(folder)


@pytest.mark.parametrize("moment", Photographs.MOMENTS)
def test_a_killed_run_ends_as_if_it_had_not_been(moment: str, whole: tuple[Photographs, torch.Tensor, float]) -> None:
    photographs, expected, cost = whole
    folder = photographs.place(moment)
    if moment == "first record":
        begin_with_the_streams_of(photographs.folder, folder)
    resumed = run(folder, resume=True)
    assert torch.equal(weights(resumed), expected)
    assert spent(folder) == cost
    known = records(folder)
    read_keys(known)
    assert noise_keys(known) == [(0, step) for step in range(6)]
    assert sum(record["kind"] == "plan" for record in known) == 2, "the ledger says that the run was resumed"
    assert [r["kind"] for r in known].count("repair") == (moment == "half an intent")
    assert not list((folder / "checkpoints").glob(".*")), "no draft is left"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under a budget with room for its steps twice, without its checkpoints, and its secret beside it."""
    root = tmp_path_factory.mktemp("roomy")
    run(root / "run", noise=2.0, eps=50.0)
    for path in (root / "run" / "checkpoints").glob("*.ckpt"):
        path.unlink()
    return root


@pytest.mark.costly
@pytest.mark.parametrize("replay", ["auto", "never"])
def test_a_resume_tells_the_cost_of_steps(
    replay: str, roomy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(roomy, tmp_path, dirs_exist_ok=True)) / "run"
    run(folder, resume=True, replay=replay, noise=2.0, eps=50.0)
    told = capsys.readouterr().err
    assert "steps 1-6" in told and ("charged again" in told) == (replay == "never")
    assert len(noise_keys(records(folder))) == (12 if replay == "never" else 6), "what was told is what was charged"


@pytest.mark.costly
def test_a_resume_tells_as_free_only_what_its_attempt_began(
    roomy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(roomy, tmp_path, dirs_exist_ok=True)) / "run"
    (tmp_path / "secret").unlink()  # another one is made, and with it a second attempt
    with pytest.raises(RuntimeError, match="stop"):
        run(folder, resume=True, noise=2.0, eps=50.0, extra=[StopAfter(5)])
    capsys.readouterr()
    run(folder, resume=True, noise=2.0, eps=50.0)
    assert "repeats steps 5-5 with the same noise" in capsys.readouterr().err
    assert noise_keys(records(folder))[-2:] == [(1, 4), (1, 5)], "the sixth was charged again"


@pytest.mark.costly
def test_a_run_with_a_ledger_of_its_data_prints_the_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = tmp_path / "all.jsonl"
    for name in ("first", "second"):
        folder = tmp_path / name
        Fit(min_free_mb=1).run(trial_parts(tmp_path, folder, settings={"dataset_ledger": ledger, "total_eps": 40.0}))
        total = read_card(folder)["accounting"]["dataset_total"]["epsilon"]
        told = capsys.readouterr()
        (line,) = [line for line in told.out.splitlines() if "all runs on this data set" in line]
        assert f"epsilon = {total:.3f}" in line and "repeated" not in told.err
    with pytest.raises(ConfigurationError, match=r"task\.card"):  # no card, and a card has the number
        Verify(card=ledger).run(no_parts(tmp_path / "check"))


def trial(root: Path, *, resume: bool) -> dict[str, float]:
    """A run with checkpoints and a card, in a folder of ``root``."""
    folder = root / "run"

    def callbacks() -> list[Any]:
        saving = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=2)
        return [PrivacyAccountant(run_dir=folder, resume=resume), PrivacyCard(run_dir=folder), saving]

    return Fit(min_free_mb=1).run(trial_parts(root, folder, make_callbacks=callbacks, resume=resume))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A folder with a finished run, and its results; tests copy it."""
    root = tmp_path_factory.mktemp("finished")
    return root, trial(root, resume=False)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("lost", "refused"), [(None, False), ("privacy_card.json", False), ("model/model.safetensors", True)]
)
def test_a_finished_run_is_left_alone_unless_its_card_is_lost(
    lost: str | None, refused: bool, finished: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    """A card that was made from it names its card by the SHA-256."""
    folder = Path(shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)) / "run"
    if lost is not None:
        (folder / lost).unlink()
    before = files_of(folder)
    if refused:
        with pytest.raises(ResumeError, match=rf"resume=true.*{re.escape(str(folder))}"):
            trial(tmp_path, resume=True)
        assert before == files_of(folder)
        (folder / "privacy_card.json").unlink()
    assert trial(tmp_path, resume=True) == pytest.approx(finished[1])
    assert (before == files_of(folder)) == (lost is None)
    assert noise_keys(records(folder)) == [(0, step) for step in range(STEPS)] and (folder / (lost or "")).exists()


def test_the_empty_ledger_of_a_finished_run_is_refused_by_its_name(
    finished: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "privacy_ledger.jsonl").write_bytes(b"")
    with pytest.raises(LedgerError, match="privacy_ledger"):
        trial(tmp_path, resume=True)


def begin_with_the_streams_of(run: Path, other: Path) -> None:
    first = (run / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (other / "privacy_ledger.jsonl").write_text(first + "\n", encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["granted", "half a checkpoint"])
def test_without_replay_a_killed_run_pays_for_what_it_repeats(moment: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    settings: dict[str, Any] = {"replay": "never", "noise": 0.8, "reserve": 2}
    with pytest.MonkeyPatch.context() as patch:
        photographs = Photographs(folder, patch)
        run(folder, **settings)
    killed = photographs.place(moment)
    announced = len(noise_keys(records(killed)))
    run(killed, resume=True, **settings)
    known = records(killed)
    read_keys(known)
    assert len(noise_keys(known)) == announced + 4, "the last whole checkpoint was that of step 2"
    assert spent(folder) < spent(killed) <= 3.0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def hole(path: Path) -> None:
    """A part of the file that never reached the disk."""
    content = path.read_bytes()
    third = len(content) // 3
    path.write_bytes(content[:third] + bytes(third) + content[2 * third :])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "names"), [(cut, "last.ckpt"), (hole, "last.ckpt"), (hole, "*.ckpt"), (empty, "*.ckpt")]
)
def test_a_broken_checkpoint_is_passed_over_and_the_run_ends_with_the_same_weights(
    damage: Callable[[Path], None], names: str, whole: tuple[Photographs, torch.Tensor, float], tmp_path: Path
) -> None:
    photographs, expected, cost = whole
    folder = photographs.folder.with_name(tmp_path.name)
    shutil.copytree(photographs.folder, folder)
    for path in (folder / "checkpoints").glob(names):
        damage(path)
    with pytest.warns(UserWarning, match=r"last\.ckpt"):
        resumed = run(folder, resume=True)
    assert torch.equal(weights(resumed), expected)
    assert spent(folder) == cost
    replays = [record for record in records(folder) if record["kind"] == "replay"]
    assert len(replays) == (6 if names == "*.ckpt" else 0)


class Fails:
    """A tensor-like thing that cannot be written."""

    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one_and_no_draft(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    writer = WholeCheckpoints()
    writer.save_checkpoint({"global_step": 1}, target)
    before = target.read_bytes()
    with pytest.raises(StorageError, match=r"last\.ckpt could not be written: the disk is full"):
        writer.save_checkpoint({"global_step": 2, "weight": Fails()}, target)
    assert target.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


class KillBeforeTheCard(Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        raise RuntimeError("killed after the last step")


@pytest.mark.slow
def test_a_run_killed_after_its_last_step_still_gets_its_model_and_card(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="after the last step"):
        run(folder, extra=[KillBeforeTheCard()])
    assert not (folder / "privacy_card.json").exists()
    run(folder, resume=True, extra=[PrivacyCard(run_dir=folder)])
    assert (folder / "model" / "weights.pt").is_file()
    assert verify_card(read_card(folder), folder / "privacy_ledger.jsonl", folder=folder / "model") == []


def test_the_newest_checkpoint_of_a_run_has_its_latest_attempt_and_step(tmp_path: Path) -> None:
    writer, ours, mixed = WholeCheckpoints(), tmp_path / "ours", tmp_path / "mixed"
    places = [("last", "r", 0, 4), ("b", "r", 1, 3), ("a", "r", 1, 2), ("z", "r", 0, 5), ("other", "another", 9, 9)]
    for name, run, attempt, step in places:
        state = {"global_step": step, "callbacks": {"PrivacyAccountant": Position(run, attempt, step).to_dict()}}
        for folder in (ours, mixed) if run == "r" else (mixed,):
            writer.save_checkpoint(state, folder / f"{name}.ckpt")
    writer.save_checkpoint({"global_step": 9, "callbacks": {}}, mixed / "of_a_plain_trainer.ckpt")
    assert newest_checkpoint(ours) == ours / "b.ckpt" and newest_checkpoint(tmp_path / "nowhere") is None
    with pytest.warns(UserWarning, match="of this run") as told:
        assert newest_checkpoint(mixed, run_id="r") == mixed / "b.ckpt"
    assert len(told) == 2


def test_a_run_whose_ledger_was_deleted_is_not_begun_anew_among_its_checkpoints(tmp_path: Path) -> None:
    run(tmp_path / "run")
    (tmp_path / "run" / "privacy_ledger.jsonl").unlink()
    with pytest.raises(ResumeError, match=r"hydra\.run\.dir"):
        run(tmp_path / "run")
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


@pytest.mark.parametrize(("cores", "warned"), [({0, 1, 2}, False), ({0, 1}, True)])
def test_more_processes_than_cores_are_warned_of(
    cores: set[int], warned: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    warn_of_crowded_cores(L.Trainer(accelerator="cpu", devices=3, strategy="ddp", logger=False, barebones=True))
    assert any("trainer.devices=3" in str(one.message) for one in recwarn) == warned
