"""Ctrl-C, sent to the program at several moments: status 130, one line, and the way on."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.types import RunMode
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from stand_ins import Numbers, Regression, dp, records
from test_cli import ROOT, call
from test_cli_ranks import TWO, settings, wait_until
from tiny_generator import generator
from tiny_tasks import trainer, write_log

from lit_dpret import PrivacyAccountant, PrivacyCard, cli
from lit_dpret.cards.card import read_card
from lit_dpret.datamodules import PairsDataModule
from lit_dpret.distributed import rank_watch
from lit_dpret.errors import DataError, ResumeError, WorkerError
from lit_dpret.privacy.modes import DPSGD, NoPrivacy
from lit_dpret.tasks.fit import Training, train

# Keeps the program at a place until somebody ends it: a file appears, and then nothing happens for a minute.
WAIT = """
import pathlib, sys, time
sys.argv = sys.argv[1:]
place, mark = sys.argv[0].split("@")
import importlib
module, _, name = place.partition(":")
owner = importlib.import_module(module)
*path, last = name.split(".")
for part in path:
    owner = getattr(owner, part)
real = getattr(owner, last)
def waiting(*given, **named):
    found = real(*given, **named) if mark.endswith("after") else None
    pathlib.Path(mark).touch()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.01)
    return found
setattr(owner, last, waiting)
sys.argv[0] = "train.py"
from lit_dpret.cli import main
main()
"""
WAITING_IMPORT = """
import pathlib, sys, time
class Waits:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            pathlib.Path({mark!r}).touch()
            time.sleep(60)
sys.meta_path.insert(0, Waits())
"""
# As an installed lit-dpret begins.
SCRIPT = "import sys; from lit_dpret.__main__ import main; sys.exit(main())"
PLACES = {
    "preparing": "lit_dpret.datamodules.pairs:PairsDataModule.prepare_data",
    "calibrating": "lit_dpret.callbacks.run_ledgers:plan_run",
    "clipping": "lit_dpret.modules.private_module:PrivateModule._add_piece",
    "updating": "lit_dpret.modules.private_module:PrivateModule._logical_step",
    "writing": "lit_dpret.callbacks.checkpoint_files:WholeCheckpoints.save_checkpoint",
}


@contextmanager
def started(command: list[str], folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a session of its own, of which nothing is left in the end; Ctrl-C is not ignored in it."""
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": ""} | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def told(process: subprocess.Popen[str], *, seconds: float = 60) -> str:
    """What an interrupted program said: one line of ours, no traceback."""
    said = process.communicate(timeout=seconds)[1]
    assert process.returncode == 130, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: interrupted. ") and "Traceback" not in said
    return errors[0]


def way_on(line: str) -> list[str]:
    """The settings that the line says to add."""
    found = re.search(r"The same command with (.*) continues", line)
    assert found, line
    return shlex.split(found.group(1))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("privacy", ["dp_sgd", "none"])
def test_an_interrupted_run_says_how_it_goes_on_and_does(place: str, privacy: str, tmp_path: Path) -> None:
    mark = tmp_path / "there"
    given = settings(tmp_path, "trainer.max_steps=3", "callbacks.checkpoint.every_n_train_steps=1")
    if privacy == "none":
        given = [word for word in given if not word.startswith("privacy.")] + ["privacy=none"]
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    with started([sys.executable, "-c", WAIT, f"{PLACES[place]}@{mark}", folder, *given], tmp_path) as process:
        assert wait_until(mark.exists, seconds=120)
        os.kill(process.pid, signal.SIGINT)
        line = told(process)
    begun = (tmp_path / "run" / "privacy_ledger.jsonl").exists()
    assert begun == (place in ("clipping", "updating", "writing"))
    if not begun:
        assert "Nothing has started" in line
        again = call(*given, folder, "resume=true", folder=tmp_path)
        assert again.returncode == 2 and "hydra.run.dir" in again.stderr and "error: " in again.stderr
    more = way_on(line) if begun else [folder]
    done = call(*given, *more, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {record["step"] for record in records(tmp_path / "run", "intent")} == {0, 1, 2}


class Ended(Callback):
    """Sends SIGTERM after the last step, where Lightning no longer looks for it."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.costly
def test_a_sigterm_after_the_last_step_ends_what_would_come_after(tmp_path: Path) -> None:
    run = tmp_path / "run"
    callbacks: list[Callback] = [PrivacyAccountant(run_dir=run), PrivacyCard(run_dir=run), Ended()]
    how = Training(run_dir=run, make_trainer=partial(trainer, max_steps=2), callbacks=callbacks)
    data = PairsDataModule(folder=write_log(tmp_path / "log"), sampling="poisson", expected_batch_size=8)
    with pytest.raises(SIGTERMException):
        train(generator(privacy=dp(tmp_path, unit="query"), seed=0), data, how)
    assert read_card(run)["mechanism"]["steps_done"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("everyone", [True, False])
def test_an_interruption_of_several_ranks_is_told_once(everyone: bool, tmp_path: Path) -> None:
    given = settings(tmp_path, *TWO, "trainer.max_steps=600", "callbacks.checkpoint.every_n_train_steps=5")
    ledger = tmp_path / "run" / "privacy_ledger.jsonl"

    def in_a_step() -> bool:
        return ledger.exists() and ledger.read_text(encoding="utf-8").count('"kind":"intent"') >= 3

    command = [sys.executable, "train.py", f"hydra.run.dir={tmp_path / 'run'}", *given]
    with started(command, tmp_path) as process:
        assert wait_until(in_a_step, seconds=180)
        if everyone:
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(process.pid, signal.SIGINT)
        assert way_on(told(process))[-1] == "resume=true"
        assert wait_until(lambda: not list_group(process.pid), seconds=30), "a rank is left"


def list_group(leader: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_an_interrupted_multirun_goes_on_and_begins_what_it_had_not_come_to(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    jobs = settings(tmp_path, "privacy.eps=3,4,5", "trainer.max_steps=2", "hydra.sweep.subdir=${hydra.job.num}")
    second = sweep / "1" / "privacy_ledger.jsonl"
    slow = [*jobs, f"hydra.sweep.dir={sweep}"]
    with started([sys.executable, "train.py", "-m", *slow], tmp_path) as process:
        assert wait_until(second.exists, seconds=240)
        os.kill(process.pid, signal.SIGINT)
        more = way_on(told(process))
    assert more == [f"hydra.sweep.dir={sweep}", "resume=true"] and not (sweep / "2").exists()
    done = call(*jobs, *more, folder=tmp_path, program=("train.py", "-m"))
    assert done.returncode == 0, done.stderr
    for job in "012":
        assert {record["step"] for record in records(sweep / job, "intent")} == {0, 1}


PROGRAMS = {"train.py": ["train.py"], "-m": ["-m", "lit_dpret"], "-c": ["-c", SCRIPT]}


# How a program begins matters for the first of these imports, all of which one function makes.
@pytest.mark.costly
@pytest.mark.parametrize(
    ("program", "module"),
    [*(("train.py", name) for name in ("torch", "transformers", "lit_dpret.tasks.plan")), ("-m", "torch"),
     ("-c", "torch")],
)  # fmt: skip
def test_an_interruption_while_the_program_is_loaded_is_told_as_any_other(
    program: str, module: str, tmp_path: Path
) -> None:
    # Every Python that finds this file runs it at its start: the import of one module then lasts for a minute.
    (tmp_path / "sitecustomize.py").write_text(WAITING_IMPORT.format(module=module, mark=str(tmp_path / "there")))
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    with started([sys.executable, *PROGRAMS[program], "task=plan"], tmp_path, PYTHONPATH=path) as process:
        assert wait_until((tmp_path / "there").exists, seconds=60)
        os.kill(process.pid, signal.SIGINT)
        assert "Nothing has started" in told(process)


# -- without the program -------------------------------------------------------------------------


def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: Callable[[], None]
) -> tuple[int, str]:
    """Status and last line of a command that ends so."""
    monkeypatch.setattr(cli, "_hydra_main", end)
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=0"])
    with pytest.raises(SystemExit) as found:
        cli.main()
    return int(found.value.code or 0), capsys.readouterr().err


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


def as_lightning_does() -> None:
    try:
        interrupt()
    except KeyboardInterrupt:
        sys.exit(1)


def after_another_rank() -> None:
    with suppress(KeyboardInterrupt):
        interrupt()
    raise WorkerError("another process ended")


@pytest.fixture
def python_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_interrupts")
@pytest.mark.parametrize("end", [interrupt, as_lightning_does, after_another_rank])
def test_an_interruption_is_130_whoever_catches_it(
    end: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = ended(monkeypatch, capsys, end)
    assert status == 130 and said.startswith("error: interrupted. ")
    monkeypatch.setattr(rank_watch, "is_started_by_launcher", lambda: True)
    monkeypatch.setattr(rank_watch, "begin", lambda: None)
    if end is as_lightning_does:  # a further rank leaves the message to the first
        assert ended(monkeypatch, capsys, end) == (0, "")


def refused() -> None:
    with suppress(KeyboardInterrupt):
        interrupt()
    raise DataError("something else was wrong.")


def terminated() -> None:
    raise SIGTERMException


@pytest.mark.usefixtures("python_interrupts")
@pytest.mark.parametrize(("end", "status"), [(lambda: sys.exit(7), 7), (refused, 2), (terminated, 143)])
def test_other_ends_keep_their_status(
    end: Callable[[], None], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, capsys, end)[0] == status
    monkeypatch.setattr(cli, "_note_interrupt", lambda: lambda: False)
    if end is refused:
        assert ended(monkeypatch, capsys, lambda: (_ for _ in ()).throw(WorkerError("a rank died")))[0] == 2


def test_the_way_on_names_the_folder_of_what_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(mode=RunMode.RUN, runtime=SimpleNamespace(output_dir=tmp_path))
    monkeypatch.setattr(cli, "HydraConfig", SimpleNamespace(initialized=lambda: True, get=lambda: known))
    cli._note_place()
    assert "Nothing has started" in cli._way_on()
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "privacy_ledger.jsonl").touch()
    assert way_on(cli._way_on()) == [f"hydra.run.dir={tmp_path}", "resume=true"]
    assert "no checkpoint" in cli._way_on()
    (tmp_path / "stage" / "last.ckpt").touch()
    assert "no checkpoint" not in cli._way_on()


@pytest.mark.parametrize("mode", [NoPrivacy, DPSGD])
def test_resume_without_a_run_is_refused_before_data_are_read(mode: Any, tmp_path: Path) -> None:
    class Unread(Numbers):
        def prepare_data(self) -> None:
            raise AssertionError("data were read")

    run, privacy = tmp_path / "run", NoPrivacy() if mode is NoPrivacy else dp(tmp_path)
    callbacks = [PrivacyAccountant(run_dir=run, resume=True)]
    how = Training(run_dir=run, make_trainer=partial(trainer, max_steps=1), callbacks=callbacks, resume=True)
    with pytest.raises(ResumeError, match=r"hydra\.run\.dir"):
        train(Regression(privacy=privacy), Unread(), how)
    assert not (run / "privacy_ledger.jsonl").exists()
