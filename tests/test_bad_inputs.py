"""Bad input on the command line ends in one line that names the setting, before anything is trained.

From the words that are typed to the line that is printed.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest
from tiny_tasks import write_log

from lit_dpret import cli

LOG = ("datamodule=pairs", "datamodule.folder=.", "datamodule.expected_batch_size=4", "trainer.max_steps=1")
SECONDS_OF_PROCESSOR = 5.0

CASES: dict[str, tuple[list[str], str]] = {
    "a seed that is a text": ([*LOG, "seed=abc"], r"seed='abc'"),
    "a seed that is too large": ([*LOG, "seed=4294967296"], r"seed=4294967296"),
    "a negative seed": ([*LOG, "seed=-1"], r"seed=-1"),
    "a setting that nothing reads": ([*LOG, "+foo=1"], r"foo is not a setting"),
    "a group of settings that nothing reads": ([*LOG, "+foo.bar=1"], r"foo is not a setting"),
    "a setting of a group that nothing reads": ([*LOG, "+model.foo=1"], r"model"),
    "a text for a number": ([*LOG, "model.optimizer.lr=fast"], r"model\.optimizer\.lr='fast'"),
    "a text for a whole number": ([*LOG, "model.max_query_length=long"], r"model\.max_query_length"),
    "a mapping that does not end": ([*LOG, "model.lora={r:"], r"model\.lora=\{r:.*quotes"),
    "a run folder that is a file": ([*LOG, "hydra.run.dir=a_file"], r"a_file is a file.*hydra\.run\.dir"),
    "a run folder inside a file": ([*LOG, "hydra.run.dir=a_file/run"], r"a_file.*hydra\.run\.dir"),
    "a start that is nowhere": ([*LOG, "init_from=nope"], r"init_from=nope is no folder"),
    "a start that is a file": ([*LOG, "init_from=a_file"], r"init_from=a_file is no folder"),
    "a hub that does not answer": ([*LOG, "model.pretrained=t5-smal"], r"model\.pretrained=t5-smal"),
    "a path for a hub name": ([*LOG, "model.pretrained=./t5-small"], r"model\.pretrained=\./t5-small is no folder"),
    "no GPU": ([*LOG, "trainer=gpu"], r"trainer cannot be made: .*trainer=cpu"),
    "no CUDA": ([*LOG, "trainer.accelerator=cuda"], r"trainer cannot be made: .*trainer=cpu"),
    "several GPUs": ([*LOG, "trainer=ddp", "trainer.devices=4"], r"trainer cannot be made: .*trainer=cpu"),
    "W&B without a key": ([*LOG, "logger=wandb"], r"logger=wandb: .*logger\.wandb\.offline=true"),
    "no such file": (["datamodule=pairs", "datamodule.pairs=nope.jsonl"], r"nope\.jsonl.*datamodule\.pairs"),
    "no such task": (["sinthesize"], r"'sinthesize'"),
    "no such choice": ([*LOG, "privacy=dpsgd"], r"privacy=dpsgd does not exist"),
    "no such setting": ([*LOG, "privacy.epsilon=3"], r"privacy\.epsilon is not a setting"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a log."""
    write_log(tmp_path)
    (tmp_path / "a_file").write_text("x")
    monkeypatch.chdir(tmp_path)


def _typed(arguments: list[str], folder: Path) -> None:
    """In a new process without a network and a key: what the installed program does."""

    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network")

    socket.create_connection = no_network  # type: ignore[assignment]
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        os.environ.pop(name, None)
    os.chdir(folder)
    said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = ["lit-dpret", *arguments]
    try:
        cli.main()
    finally:
        Path("seconds").write_text(str(time.process_time()))


def refused(arguments: list[str]) -> str:
    """Run a command in a process that has loaded the program, and return the line that it ends with."""
    # A fork of this process would not do: torch's threads, where an earlier test has used them, do not survive it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lit_dpret.cli", "lightning.pytorch"])
    process = context.Process(target=_typed, args=(arguments, Path.cwd()))
    process.start()
    process.join()
    said = Path("said").read_text()
    assert process.exitcode == cli.USER_ERROR, said
    # A bar of transformers', which the program switches off before it loads that; here it is loaded already.
    lines = [line for line in said.strip().splitlines() if not line.lstrip().startswith("Loading weights")]
    assert len(lines) == 1 and lines[0].startswith("error: "), said
    assert float(Path("seconds").read_text()) < SECONDS_OF_PROCESSOR
    return lines[0]


@pytest.mark.parametrize(("arguments", "named"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_one_line_that_names_the_setting(arguments: list[str], named: str) -> None:
    line = refused(arguments)
    assert re.search(named, line), line
    assert not list(Path().rglob("privacy_*")), "something was begun"


@pytest.mark.parametrize("name", ["my own log.jsonl", "a=b.jsonl", "wei rd ü 漢.jsonl", "50% of it.jsonl"])
def test_a_path_is_taken_as_it_is_typed(name: str) -> None:
    """It is found where it is, and named as it is where it is missing."""
    assert f"{name} does not exist" in refused(["datamodule=pairs", f"datamodule.pairs={name}"])


def test_a_setting_of_ones_own_that_another_one_reads_is_taken() -> None:
    assert "privacy.eps=-1" in refused([*LOG, "+budget=-1", "privacy.eps=${budget}"])
