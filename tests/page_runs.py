"""How the commands of a page are executed at a tiny size, and which are not, with the reason. Not a test.

The tables are in ``data/page_runs.yaml``; the prerequisites of a page are in `page_stages.STAGES`.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from shown_commands import ROOT

from lit_dpret.cli import USER_ERROR, with_task

_TABLES = yaml.safe_load((ROOT / "tests" / "data" / "page_runs.yaml").read_text(encoding="utf-8"))
QUICK, TINY = ({choice: words.split() for choice, words in _TABLES[name].items()} for name in ("quick", "tiny"))
NOT_EXECUTED: dict[str, str] = _TABLES["not_executed"]
NEEDS: dict[str, str] = _TABLES["needs"]
STOPS: dict[str, str] = _TABLES["stops"]
OTHER_PROGRAMS: dict[str, str] = _TABLES["other_programs"]


def shortened(arguments: Sequence[str]) -> list[str]:
    """Return the settings of a shown command, with settings around them that make its run tiny."""
    if arguments[:1] in (["silo"], ["list"]):
        return list(arguments)
    given = with_task(list(arguments))
    with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
        cfg = compose("train", overrides=[word for word in given if not word.startswith("-")], return_hydra_config=True)
    chosen = {f"{group}={choice}" for group, choice in OmegaConf.to_container(cfg.hydra.runtime.choices).items()}  # type: ignore[union-attr]
    chosen.update(given)

    def those(table: dict[str, list[str]]) -> list[str]:
        return [setting for choice, settings in table.items() if choice in chosen for setting in settings]

    return [*those(QUICK), *given, *those(TINY)]


class Desk:
    """A folder in which commands run one after the other, each in a process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "said.log"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lit_dpret.cli", "lightning.pytorch"])

    def ours(self, arguments: Sequence[str], *, launcher: str = "", stops: str = "") -> None:
        """Run ``lit-dpret`` with ``arguments``; commands with two ranks are started as a shell would.

        Args:
            arguments: Those after ``lit-dpret``.
            launcher: The program that starts the ranks.
            stops: The words with which it must be refused; empty if it must succeed.

        Raises:
            AssertionError: It ended otherwise; the message contains its output.
        """
        if launcher == "torchrun":
            self.other(
                [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "lit_dpret", *arguments]
            )
        elif "trainer.devices=2" in arguments:
            self.other([sys.executable, "-m", "lit_dpret", *arguments])
        else:
            given = (list(arguments), self.folder, self.log, _surroundings(self.folder))
            process = self._context.Process(target=_run, args=given)
            process.start()
            process.join()
            ended = process.exitcode == USER_ERROR and stops in self._said() if stops else process.exitcode == 0
            assert ended, f"lit-dpret {' '.join(arguments)}\n{self._said()}"

    def other(self, command: Sequence[str]) -> None:
        """Run any program; ``> FILE`` at the end redirects its output."""
        environment = os.environ | _surroundings(self.folder)
        redirected = ">" in command
        typed, into = (command[:-2], command[-1]) if redirected else (command, os.devnull)
        with self.log.open("w") as log, (self.folder / into).open("w") as file:
            out = file if redirected else log
            done = subprocess.run(typed, cwd=self.folder, env=environment, stdout=out, stderr=log, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{self._said()}"

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8")[-3000:] if self.log.exists() else "nothing"


def _surroundings(folder: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder / "home"), "WANDB_MODE": "offline",
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # fmt: skip


def _run(arguments: list[str], folder: Path, log: Path, surroundings: dict[str, str]) -> None:
    """Run the installed program's main function in the new process."""
    from lit_dpret import cli

    os.environ.update(surroundings)
    os.chdir(folder)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = [str(ROOT / "train.py"), *arguments]
    cli.main()
