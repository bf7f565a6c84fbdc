"""The command line: one line and a non-zero exit for what a user can cause, before training starts."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cards import Run, make_plan, rewrite_chain
from configured import composed
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import SIGTERMException
from safetensors import SafetensorError

from lit_dpret import cli
from lit_dpret.cards.card import write_card
from lit_dpret.cli import build_parts, explain, with_task
from lit_dpret.cli.arguments import quoted
from lit_dpret.errors import ConfigurationError, DataError, LitDpretError
from lit_dpret.privacy.modes import NoPrivacy
from lit_dpret.tasks.resumed_settings import keep_settings

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "trainer.max_steps=2", "datamodule=pairs", "datamodule.expected_batch_size=8", "datamodule.physical_batch_size=8",
    "model.max_passage_length=16", "model.max_query_length=8",
]  # fmt: skip


def write_log(folder: Path, lines: int = 40) -> Path:
    path = folder / "log.jsonl"
    rows = [{"query": f"what is number {i}", "passage": f"number {i} is a number after {i - 1}"} for i in range(lines)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def call(
    *arguments: str, folder: Path, program: tuple[str, ...] = ("train.py",), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the program with ``folder / "run"`` as its run folder and a secret of its own."""
    return subprocess.run(
        [sys.executable, *program, f"hydra.run.dir={folder / 'run'}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": ""} | environment,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal; everything else about the refusal is checked here."""
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.slow
def test_verify_exits_with_0_only_if_nothing_failed(tmp_path: Path) -> None:
    made = Run(tmp_path / "made", make_plan()).train(3)
    write_card(made.card(), made.folder)
    program = ("-m", "lit_dpret", "verify", str(made.folder))
    done = call(folder=tmp_path, program=program)
    assert done.returncode == 0 and "ok           generator, numbers" in done.stdout
    assert not list((tmp_path / "run").iterdir()), "a check leaves nothing behind"
    rewrite_chain(made.path, lambda record: record.update(noise_std=9.0) if "noise_std" in record else None)
    done = call(folder=tmp_path, program=program)
    assert "FAILED       generator, ledger" in done.stdout
    assert "checks failed, the first: generator, ledger" in refused(done)


QUESTIONS = [
    "can i cancel, and when?", "what's covered?", "'tis [a] test", 'a "{b}" (c) $d', "x=1?", "${seed}", "a\\",
    "a\\'b\\\\'",
]  # fmt: skip


@pytest.mark.parametrize("question", [*QUESTIONS, "plain", "12"])
def test_a_question_is_taken_as_it_is_typed(question: str) -> None:
    assert str(composed("task=search", quoted(f"task.query={question}")).task.query) == question
    again = quoted(f"task.query={question}")
    assert quoted(again) == again, "ranks get the command as it was read"


def test_a_path_may_hold_an_apostrophe_and_a_comma_is_explained() -> None:
    assert composed(quoted("init_from=bob's run")).init_from == "bob's run"
    word = with_task(["verify", "c:\\bob's\\run\\"])[-1]
    assert composed("task=verify", word).task.card == "c:\\bob's\\run\\"
    with pytest.raises(HydraException) as found:
        composed("init_from=a,b")
    assert "init_from='A, B'" in (explain(found.value) or "")


@pytest.mark.costly
def test_a_terminal_is_told_at_once_that_something_happens_and_a_pipe_gets_results_and_errors_alone() -> None:
    command = [sys.executable, "train.py", "compare", "nowhere", "nowhere"]
    screen, terminal = pty.openpty()
    subprocess.run(command, cwd=ROOT, stderr=terminal, check=False)
    os.close(terminal)
    with os.fdopen(screen, "rb") as shown:
        assert shown.readline().startswith(b"lit-dpret: loading")
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert piped.stderr.splitlines() == [refused(piped)]


@pytest.mark.slow
def test_a_resume_with_other_noise_or_data_is_refused_and_spends_nothing(tmp_path: Path) -> None:
    log = write_log(tmp_path)
    settings = [*TINY, f"datamodule.pairs={log}", "privacy.noise_multiplier=5.0"]
    assert call(*settings, folder=tmp_path).returncode == 0
    (tmp_path / "run" / "privacy_card.json").unlink()  # with its card it would be finished
    ledger = tmp_path / "run" / "privacy_ledger.jsonl"
    before = ledger.read_text(encoding="utf-8").count('"intent"')
    changed, left = [s.replace("5.0", "6.0") for s in settings], contents(tmp_path / "run")
    assert ".hydra/overrides.yaml" in left
    assert "noise_multiplier" in refused(call(*changed, "resume=true", folder=tmp_path))
    assert "already holds a ledger" in refused(call(*settings, folder=tmp_path))
    late = f"callbacks.card.audit_protocols=[{log}]"
    assert "audit_protocols" in refused(call(*settings, late, "resume=true", folder=tmp_path))
    log.write_text(log.read_text(encoding="utf-8").replace("number 7", "number seven"), encoding="utf-8")
    assert "data set" in refused(call(*settings, "resume=true", folder=tmp_path))
    assert ledger.read_text(encoding="utf-8").count('"intent"') == before
    assert contents(tmp_path / "run") == left, "the settings of the run and all else are as it left them"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_fit_goes_on_with_the_settings_that_it_began_with(tmp_path: Path) -> None:
    """What is trained stays as it was, and is named as the user named it; how fast it goes may change."""

    def keep(*changed: str) -> None:
        keep_settings(build_parts(composed(f"run_dir={tmp_path}", *TINY, *changed)))

    keep()
    for name, value in {
        "trainer.max_steps": "3", "seed": "7", "model.max_query_length": "9", "model.optimizer.lr": "0.5",
        "privacy.eps": "8", "datamodule.expected_batch_size": "4", "model": "dual_encoder",
    }.items():  # fmt: skip
        with pytest.raises(ConfigurationError, match=f"^{re.escape(name)}="):
            keep(f"{name}={value}", "resume=true")
    keep("trainer.max_steps=1", "resume=true")  # it ends there, under the claim of the steps planned at first
    (tmp_path / "privacy_ledger.jsonl").write_text("")  # of a run that was killed before its first checkpoint
    keep("trainer.max_steps=3")
    keep("resume=true", "datamodule.physical_batch_size=4", "model.gradient_checkpointing=true")
    with pytest.raises(DataError, match=r"settings\.json"):
        (tmp_path / "settings.json").write_text("{}")
        keep("resume=true")


OWN_MODEL = """
import torch
from lit_dpret.modules import PrivateModule

class Mine(PrivateModule):
    def __init__(self, norm="LayerNorm", **settings):
        super().__init__(**settings)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 3), getattr(torch.nn, norm)(3), torch.nn.Linear(3, 1))

    def collate_rows(self, rows):
        numbers = torch.tensor([[len(row.query), len(row.passage), 1.0] for row in rows])
        return {"inputs": numbers.sin(), "target": numbers[:, 0].cos()}

    def per_row_loss(self, rows):
        return (self.net(rows["inputs"]).squeeze(-1) - rows["target"]).square()
"""
OWN_CONFIG = """
_target_: mine.Mine
norm: LayerNorm
log_private_loss: false
optimizer: {_target_: lit_dpret.modules.OptimizerSpec, name: sgd, lr: 0.1}
"""


@pytest.mark.slow
def test_an_own_model_trains_and_one_with_batch_statistics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "mine.py").write_text(OWN_MODEL, encoding="utf-8")
    (tmp_path / "configs" / "model" / "mine.yaml").write_text(OWN_CONFIG, encoding="utf-8")
    settings = [*TINY[:4], f"datamodule.pairs={write_log(tmp_path)}", "privacy.noise_multiplier=5.0", "model=mine"]
    own = {"program": ("train.py", "--config-dir", str(tmp_path / "configs")), "PYTHONPATH": str(tmp_path)}
    done = call(*settings, folder=tmp_path, **own)
    assert done.returncode == 0, done.stderr
    (tmp_path / "second").mkdir()
    line = refused(call(*settings, "model.norm=BatchNorm1d", folder=tmp_path / "second", **own))
    assert "BatchNorm1d" in line and "GroupNorm" in line, line
    assert '"intent"' not in (tmp_path / "second" / "run" / "privacy_ledger.jsonl").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("program", [("train.py",), ("-m", "lit_dpret")])
def test_a_run_leaves_model_ledger_card_and_metrics(tmp_path: Path, program: tuple[str, ...]) -> None:
    from lit_dpret.privacy.accounting.composition import epsilon
    from lit_dpret.privacy.ledger.run_ledger import PrivacyLedger, charged_releases

    done = call(*TINY, f"datamodule.pairs={write_log(tmp_path)}", "privacy.eps=3", folder=tmp_path, program=program)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    card = json.loads((run / "privacy_card.json").read_text(encoding="utf-8"))
    records = PrivacyLedger.read(run / "privacy_ledger.jsonl").records
    spent = epsilon(charged_releases(records), delta=1 / 80, neighbours="zero_out")
    assert f"run folder: {run}, model: generator" in done.stderr.splitlines()[0]
    assert card["claim"]["epsilon"] == pytest.approx(spent) and spent <= 3
    assert (run / "metrics.jsonl").exists() and (run / "model" / "model.safetensors").exists()
    assert done.stdout.splitlines()[-2:] == [f"model: {run / 'model'}", f"privacy card: {run / 'privacy_card.json'}"]
    assert "lit-dpret" in (tmp_path / "state").name or (tmp_path / "state" / "lit-dpret" / "privacy_secret").exists()


@pytest.mark.slow
def test_a_run_from_another_runs_model_claims_the_cost_of_both(tmp_path: Path) -> None:
    log = write_log(tmp_path)
    settings = [*TINY, f"datamodule.pairs={log}", "privacy.noise_multiplier=5.0"]
    assert call(*settings, folder=tmp_path).returncode == 0
    (tmp_path / "next").mkdir()
    start = f"init_from={tmp_path / 'run'}"
    done = call(*settings, start, folder=tmp_path / "next", XDG_STATE_HOME=str(tmp_path / "state"))
    assert done.returncode == 0, done.stderr
    first, both = (
        json.loads((folder / "run" / "privacy_card.json").read_text(encoding="utf-8"))
        for folder in (tmp_path, tmp_path / "next")
    )
    assert both["claim"]["epsilon"] > first["claim"]["epsilon"]
    assert both["accounting"]["init_from"]["epsilon_of_this_run"] == pytest.approx(first["claim"]["epsilon"])
    assert both["parents"][0]["name"] == "QueryGenerator"
    (tmp_path / "third").mkdir()
    (tmp_path / "run" / "privacy_card.json").unlink()
    assert "init_from_is_public=true" in refused(call(*settings, start, folder=tmp_path / "third"))


def test_a_refusal_in_what_hydra_builds_reaches_the_task_as_itself(tmp_path: Path) -> None:
    cfg = composed(f"run_dir={tmp_path}", "model.pretrained=/nowhere")
    with pytest.raises(LitDpretError, match=r"model\.pretrained=/nowhere is not a folder"):
        build_parts(cfg).make_module(privacy=NoPrivacy())


def test_a_setting_that_a_constructor_chokes_on_is_explained_by_place_and_cause() -> None:
    part = {"callbacks": {"audit": {"_target_": "lit_dpret.callbacks.OneRunAudit", "confidence": "high"}}}
    with pytest.raises(HydraException) as found:
        instantiate(part)
    line = explain(found.value) or ""
    assert line.startswith("callbacks.audit cannot be built: '<' not supported") and "\n" not in line


def test_a_terminated_run_has_not_finished(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning answers SIGTERM by a SystemExit without a code, which is status 0."""

    def ended() -> None:
        raise SIGTERMException

    monkeypatch.setattr(cli, "_hydra_main", ended)
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=0"])
    with pytest.raises(SystemExit) as found:
        cli.main()
    assert found.value.code == 143 and "SIGTERM" in capsys.readouterr().err


def test_a_full_disk_is_explained_and_a_defect_is_not() -> None:
    assert "disk is full" in (explain(OSError(28, "No space left on device", "/x/last.ckpt")) or "")
    for larger in (OSError(27, "File too large", "/x/config.yaml"), OSError(27, "File too large")):
        assert "ulimit" in (explain(larger) or "")
    assert "weights" in (explain(SafetensorError("Error while serializing: I/O error: File too large")) or "")
    assert explain(SafetensorError("Error while deserializing header")) is None
    assert explain(KeyError("a defect of ours")) is None
