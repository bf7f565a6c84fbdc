"""Several processes from the command line: one folder, one ledger, one error, whoever starts the ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from configured import composed
from stand_ins import records
from test_cli import ROOT, TINY, call, refused, write_log

from lit_dpret import cli
from lit_dpret.distributed import rank_watch
from lit_dpret.errors import ConfigurationError

TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
CHEAP = ["privacy.noise_multiplier=5.0", "privacy.accountant=rdp", "datamodule.sampling=poisson"]


def settings(folder: Path, *more: str) -> list[str]:
    return [*TINY, *CHEAP, f"datamodule.pairs={write_log(folder)}", *more]


def test_a_task_for_one_process_is_refused_to_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="2 processes"):
        cli.run(composed("task=check_data"))


def test_how_many_processes_were_started_is_read_from_whoever_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert rank_watch.world_size() == 1
    monkeypatch.setenv("SLURM_PROCID", "0")  # in a batch script, without srun
    assert rank_watch.world_size() == 1
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert rank_watch.world_size() == 4
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert rank_watch.world_size() == 8


@pytest.mark.slow
def test_a_pipeline_on_several_processes_is_refused_before_it_trains(tmp_path: Path) -> None:
    done = call("task=pipeline", *settings(tmp_path, *TWO), folder=tmp_path)
    assert "this task trains in one" in refused(done)


@pytest.mark.slow
def test_the_ranks_of_a_command_share_one_folder_and_one_ledger(tmp_path: Path) -> None:
    done = call(*settings(tmp_path, *TWO), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert len(records(run, "plan")) == 1 and [r["step"] for r in records(run, "intent")] == [0, 1]
    assert (run / "privacy_card.json").is_file() and (run / "model" / "privacy_card.json").is_file()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == len(set(steps)), "a rank logged beside rank 0"
    again = call(*settings(tmp_path, *TWO), folder=tmp_path)
    assert "already holds a ledger" in refused(again), "the refusal of rank 0 is told once, by rank 0"


@pytest.mark.slow
def test_each_job_of_a_multirun_has_ranks_of_its_own(tmp_path: Path) -> None:
    jobs = settings(tmp_path, *TWO, "privacy.eps=3,4", f"hydra.sweep.dir={tmp_path / 'sweep'}",
                    "hydra.sweep.subdir=${hydra.job.num}")  # fmt: skip
    done = call(*jobs, folder=tmp_path, program=("train.py", "-m"))
    assert done.returncode == 0, done.stderr
    budgets = [records(tmp_path / "sweep" / job, "plan")[0]["plan"]["budget"]["eps"] for job in ("0", "1")]
    assert budgets == [3, 4]


@pytest.mark.slow
def test_torchrun_starts_the_ranks_as_two_nodes_of_one(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1",
              f"--master_port={port}"]  # fmt: skip
    given = settings(tmp_path, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=2")
    nodes = []
    for node in (0, 1):
        state = {"XDG_STATE_HOME": str(tmp_path / f"state{node}"), "CUDA_VISIBLE_DEVICES": ""}  # no shared secret file
        command = [sys.executable, *common, f"--node_rank={node}", "train.py", f"hydra.run.dir={tmp_path / 'run'}"]
        nodes.append(subprocess.Popen([*command, *given], cwd=ROOT, env=os.environ | state, start_new_session=True))
    try:
        assert [node.wait(timeout=180) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert [r["step"] for r in records(tmp_path / "run", "intent")] == [0, 1]
    assert not (tmp_path / "state1" / "lit-dpret").exists(), "a rank made a secret of its own"


# -- killed ranks --------------------------------------------------------------------------------


def children(process: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            found.append(int(stat.parent.name))
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def started(folder: Path, *given: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a session of its own, of which nothing is left in the end."""
    process = subprocess.Popen(
        [sys.executable, "train.py", f"hydra.run.dir={folder / 'run'}", *given], cwd=ROOT, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(true: Callable[[], bool], *, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["setup", "step"])
@pytest.mark.parametrize("victim", ["first", "second"])
def test_a_killed_process_ends_the_command_in_a_minute_and_goes_on(victim: str, moment: str, tmp_path: Path) -> None:
    given = settings(tmp_path, *TWO, "trainer.max_steps=12", "callbacks.checkpoint.every_n_train_steps=5")
    ledger = tmp_path / "run" / "privacy_ledger.jsonl"

    def in_a_step() -> bool:
        return ledger.exists() and ledger.read_text(encoding="utf-8").count('"kind":"intent"') >= 7

    with started(tmp_path, *given) as process:
        assert wait_until(lambda: bool(children(process.pid)), seconds=120)
        second = children(process.pid)[0]
        if moment == "step":
            assert wait_until(in_a_step, seconds=120)
        os.kill(process.pid if victim == "first" else second, signal.SIGKILL)
        assert wait_until(lambda: process.poll() is not None and not alive(second), seconds=60), "the job goes on"
        assert process.stderr is not None
        said = process.stderr.read()
    assert "error: " in said and "resume=true" in said and "of this job ended" in said
    done = call(*given, "resume=true", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    granted = [(r["attempt"], r["step"]) for r in records(tmp_path / "run", "intent")]
    assert granted == [(0, step) for step in range(12)], "a step was lost, or paid for twice"
    assert (tmp_path / "run" / "privacy_card.json").is_file()
