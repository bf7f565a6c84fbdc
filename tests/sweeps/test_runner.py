"""Trials of a sweep on this machine: each once, each to its end, whoever is interrupted, killed or comes second."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_tasks import parts

from lit_dpret.cards.card import read_card
from lit_dpret.errors import ConfigurationError, ResumeError, WorkerError
from lit_dpret.privacy.ledger.dataset_account import RunLock
from lit_dpret.sweeps import SweepFile, SweepFolder, SweepTerms, run_trials
from lit_dpret.sweeps.folder import SWEEP
from lit_dpret.sweeps.report import write_report
from lit_dpret.tasks import Sweep

# A stand-in for a training: a dozen lines that leave what a trial leaves, or fail as one does.
STUB = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["LIT_DPRET_SWEEP"]) / "trials" / os.environ["WANDB_RUN_ID"]
given = dict(word.split("=", 1) for word in sys.argv[1:])
with open(folder.parent.parent / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
assert os.environ["WANDB_MODE"] == "offline" and "WANDB_SWEEP_ID" not in os.environ
if given["how"] == "refused":
    sys.exit(print("error: privacy.eps=0 is not a budget", file=sys.stderr) or 2)
if given["how"] == "killed_once" and not (folder / "privacy_ledger.jsonl").exists():
    (folder / "privacy_ledger.jsonl").write_text("")
    os.kill(os.getpid(), 9)
if given["how"] == "pipeline" and not (folder / "pipeline.fingerprint").exists():
    (folder / "pipeline.fingerprint").write_text("")
    os.kill(os.getpid(), 9)
if given["how"] == "crashed":
    sys.exit(3)
if given["how"] == "silent":
    sys.exit(0)
if given["how"] == "slow":
    (folder / "begun").write_text("")
    time.sleep(60)
result = {"settings": ["how=" + given["how"], "x=" + given["x"]], "metrics": {"loss": float(given["x"])}}
(folder / "trial.json").write_text(json.dumps(result))
"""


OF_THIS_SWEEP = (
    "trial_of=${envvar:LIT_DPRET_SWEEP}", "hydra.run.dir=${envvar:LIT_DPRET_SWEEP}/trials/${oc.env:WANDB_RUN_ID}"
)  # fmt: skip


def sweep(
    folder: Path, *hows: str, xs: tuple[float, ...] = (1.0,), told: bool = False
) -> tuple[SweepFolder, SweepFile]:
    stub = folder / "stub.py"
    stub.write_text(STUB, encoding="utf-8")
    content = {
        "program": str(stub),
        "metric": {"name": "loss", "goal": "minimize"},
        "parameters": {"how": {"values": list(hows)}, "x": {"values": list(xs)}},
        "command": ["${interpreter}", "${program}", "${args_no_hyphens}", *(OF_THIS_SWEEP if told else ())],
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    file = SweepFile.read(folder / "sweep.yaml")
    made = SweepFolder.plan(folder / "s", file, file.trials(), [], SweepTerms(budget=None, metric_data="public"))
    return made, file


def go(made: SweepFolder, file: SweepFile) -> Any:
    return run_trials(made, file, file.trials(), offline=True)


def calls(made: SweepFolder) -> list[str]:
    return (made.folder / "calls").read_text(encoding="utf-8").splitlines()


def test_every_trial_runs_once_and_a_second_call_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "of-some-server")
    made, file = sweep(tmp_path, "ok", xs=(2.0, 1.0))
    shown: list[tuple[int, int]] = []
    run_trials(made, file, file.trials(), offline=True, progress=lambda done, total, extra: shown.append((done, total)))
    assert go(made, file).failed == {} and calls(made) == ["how=ok x=2.0", "how=ok x=1.0"]
    assert shown == [(0, 2), (1, 2), (2, 2)]


def test_a_trial_that_fails_is_named_with_its_reason_and_the_others_run(tmp_path: Path) -> None:
    made, file = sweep(tmp_path, "refused", "ok")
    outcome = go(made, file)
    assert list(outcome.failed.values()) == ["privacy.eps=0 is not a budget"] and len(outcome.done) == 1


@pytest.mark.parametrize("how", ["refused", "killed_once", "crashed"])
def test_the_reason_of_a_trial_that_failed_is_a_sentence_of_its_own(how: str, tmp_path: Path) -> None:
    made, file = sweep(tmp_path, how, told=True)
    with pytest.raises(WorkerError, match="1 of 1 trials") as found:
        Sweep(file=file.path, metric_data="public", min_free_mb=1).run(parts(tmp_path, run_dir=made.folder))
    assert re.search(r"[^.]\. Finished", str(found.value)), found.value


@pytest.mark.parametrize("how", ["killed_once", "pipeline"])
def test_a_trial_that_was_killed_goes_on_where_it_stopped(how: str, tmp_path: Path) -> None:
    made, file = sweep(tmp_path, how, "ok")
    assert list(go(made, file).failed.values()) == ["was ended by SIGKILL"]
    assert go(made, file).failed == {}
    assert calls(made) == [f"how={how} x=1.0", "how=ok x=1.0", f"how={how} x=1.0 resume=true"]


def test_what_a_trial_reached_and_what_it_printed_is_for_its_owner_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made, file = sweep(tmp_path, "ok", xs=(2.0, 1.0))
    before = os.umask(0o022)
    try:
        go(made, file)
        write_report(made)
    finally:
        os.umask(before)
    names = [f"trials/{trial.id}/trial.log" for trial in file.trials()]
    names += ["sweep.csv", "sweep.md", "sweep.png", "sweep_report.json"]
    assert {name: oct((made.folder / name).stat().st_mode & 0o777) for name in names} == dict.fromkeys(names, "0o600")


def test_a_trial_that_somebody_else_is_at_is_left_to_them(tmp_path: Path) -> None:
    made, file = sweep(tmp_path, "ok", xs=(1.0, 2.0))
    theirs = RunLock(made.folder / SWEEP, file.trials()[0].id)
    theirs.take()
    outcome = go(made, file)
    theirs.release()
    assert outcome.elsewhere == [file.trials()[0].id] and calls(made) == ["how=ok x=2.0"]


@pytest.mark.parametrize("left_out", ["trial_of=", "hydra.run.dir="])
def test_a_command_that_tells_its_trials_of_no_sweep_is_refused_at_once(left_out: str, tmp_path: Path) -> None:
    _, file = sweep(tmp_path, "ok")
    content = yaml.safe_load(file.path.read_text(encoding="utf-8"))
    content["command"] += [word for word in OF_THIS_SWEEP if not word.startswith(left_out)]
    file.path.write_text(yaml.safe_dump(content), encoding="utf-8")
    new = tmp_path / "new"
    with pytest.raises(ConfigurationError, match=left_out):
        Sweep(file=file.path, metric_data="public", min_free_mb=1).run(parts(tmp_path, run_dir=new))
    assert not (new / SWEEP).exists() and not (new / "calls").exists()


def test_a_command_that_trains_no_trial_ends_the_sweep_with_the_first(tmp_path: Path) -> None:
    made, file = sweep(tmp_path, "silent", "ok")
    with pytest.raises(ConfigurationError, match=r"task\.file"):
        go(made, file)
    assert len(calls(made)) == 1


@pytest.mark.slow
def test_an_interruption_ends_the_trial_too(tmp_path: Path) -> None:
    made, _ = sweep(tmp_path, "slow")
    code = (
        # Under a shell that runs the tests in the background, an interruption would be ignored from the start.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from lit_dpret.sweeps import *; f = SweepFile.read(sys.argv[1]); "
        "run_trials(SweepFolder.read(sys.argv[2]), f, f.trials(), offline=True)"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "sweep.yaml"), str(made.folder)], stderr=subprocess.PIPE
    )
    end = time.monotonic() + 60
    while not list(made.folder.glob("trials/*/begun")) and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(runner.pid, signal.SIGINT)
    runner.communicate(timeout=60)
    assert runner.returncode != 0
    trial = next(made.folder.glob("trials/*/trial.log"))
    assert "KeyboardInterrupt" in trial.read_text(encoding="utf-8"), "it was told, and had time to end by itself"


def test_another_file_does_not_go_on_with_a_planned_sweep(tmp_path: Path) -> None:
    made, file = sweep(tmp_path, "ok")
    made.require(file, None, None, "public")
    for changed in ((tmp_path / "ledger", None, "public"), (None, 3.0, "public"), (None, None, "private")):
        with pytest.raises(ResumeError, match="was planned with"):
            made.require(file, *changed)
    (tmp_path / "sweep.yaml").write_text((tmp_path / "sweep.yaml").read_text().replace("1.0", "3.0"), encoding="utf-8")
    with pytest.raises(ResumeError, match="another file"):
        SweepFolder.read(made.folder).require(SweepFile.read(tmp_path / "sweep.yaml"), None, None, "public")


def test_the_report_names_the_best_trial_and_that_nothing_private_was_spent(tmp_path: Path) -> None:
    made, file = sweep(tmp_path, "ok", xs=(2.0, 1.0, 3.0))
    go(made, file)
    report = write_report(made)
    assert report.best == file.trials()[1].id and report.epsilon is None
    table = (made.folder / "sweep.csv").read_text(encoding="utf-8").splitlines()
    assert table[0] == "trial,how,x,epsilon,loss" and len(table) == 4
    assert json.loads((made.folder / "sweep_report.json").read_text())["best"] == report.best


def test_a_trial_that_diverged_is_not_the_best(tmp_path: Path) -> None:
    made, file = sweep(tmp_path, "ok", xs=(math.nan, 1.0))
    go(made, file)
    assert write_report(made).best == file.trials()[1].id


ROOT = Path(__file__).resolve().parent.parent.parent
SECRETS = ("PLANTEDQUERY", "PLANTEDPASSAGE", "PLANTEDFOLDER", "PLANTEDSECRET")


def call(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )


def planted(folder: Path) -> Path:
    """A log whose queries, passages and place can be told wherever they turn up."""
    place = folder / "PLANTEDFOLDER"
    place.mkdir()
    rows = [
        {"query": f"PLANTEDQUERY what is number {i}", "passage": f"PLANTEDPASSAGE number {i} comes after {i - 1}"}
        for i in range(40)
    ]
    (place / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return place


def written(folder: Path, place: Path) -> Path:
    """Two points, one of them without privacy, on that log."""
    content = {
        "program": "train.py",
        "parameters": {"point": {"values": ["eps8", "eps_inf"]}},
        "command": [
            "${env}", "${interpreter}", "${program}", "task=fit", "trainer.max_steps=2", "datamodule=pairs",
            f"datamodule.pairs={place / 'log.jsonl'}", "datamodule.expected_batch_size=8",
            "datamodule.physical_batch_size=8", "model.max_passage_length=16", "model.max_query_length=8",
            "logger=wandb", "trial_of=${envvar:LIT_DPRET_SWEEP}",
            "hydra.run.dir=${envvar:LIT_DPRET_SWEEP}/trials/${oc.env:WANDB_RUN_ID}", "${args_no_hyphens}",
        ],
    }  # fmt: skip
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return folder / "sweep.yaml"


@pytest.mark.slow
def test_a_sweep_is_refused_without_a_limit_and_tells_wandb_nothing_private(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    file, ledger = written(tmp_path, planted(tmp_path)), tmp_path / "data.jsonl"
    settings = ["sweep", str(file), f"hydra.run.dir={tmp_path / 's'}", f"task.dataset_ledger={ledger}"]
    refused = call(*settings, folder=tmp_path)
    assert refused.returncode == 2 and "all trials together cost epsilon" in refused.stderr, refused.stderr
    refused = call(*settings, "task.total_eps=1", folder=tmp_path)
    assert refused.returncode == 2 and "does not cover this sweep" in refused.stderr and not ledger.exists()

    done = call(*settings, "task.total_eps=9", "task.metric_data=public", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    cards = {
        path.parent.name: read_card(path.parent) for path in (tmp_path / "s" / "trials").glob("*/privacy_card.json")
    }
    claims = sorted(card["claim"]["guarantee"] for card in cards.values())
    assert claims == ["dp", "none"]
    private = next(card for card in cards.values() if card["claim"]["guarantee"] == "dp")
    assert private["tuning"]["sweep"]["trials"] == 2 and private["tuning"]["n_trials"] == 2
    assert "one of the 2 trials of sweep" in private["tuning"]["text"]

    logs = [path for path in (tmp_path / "s").rglob("wandb/**/*") if path.is_file() and not path.is_symlink()]
    assert sum(path.suffix == ".wandb" for path in logs) == 2
    assert any(b"model.optimizer.lr" in path.read_bytes() for path in logs), "what may be told is there"
    assert any(b"privacy/eps_spent" in path.read_bytes() for path in logs)
    assert any(path.suffix == ".html" for path in logs), "and so is the card"
    for path in logs:
        for secret in SECRETS:
            assert secret.encode() not in path.read_bytes(), f"{secret} in {path.name}"
