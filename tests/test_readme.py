"""Every command that the README and the pages under docs/ show composes, with settings that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lit_dpret.cli import with_task

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TESTS = "pytest -q -n 2"
DOCS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "howto").glob("*.md")])
PAGES = [README, *(page.read_text(encoding="utf-8") for page in DOCS)]
WHOLE_LINES = [re.sub(r"\\\n\s*", "", page) for page in PAGES]  # a command may go on in the next line


def commands() -> list[str]:
    """What follows ``python train.py`` in an indented line of a page."""
    found = [
        part for page in WHOLE_LINES for part in re.findall(r"^    .*?python train\.py (.*)$", page, flags=re.MULTILINE)
    ]
    return list(dict.fromkeys(part.split("&&")[0].strip() for part in found))


def test_the_readme_shows_the_main_commands() -> None:
    shown = " ".join(commands())
    for wanted in (
        "experiment=quickstart",
        "task=plan",
        "task=doctor",
        "task=synthesize",
        "task=evaluate",
        "datamodule=pairs",
    ):
        assert wanted in shown


@pytest.mark.parametrize("command", commands())
def test_a_shown_command_composes(command: str) -> None:
    overrides = [o for o in with_task(shlex.split(command)) if not o.startswith(("hydra.", "-"))]
    with initialize_config_module(version_base="1.3", config_module="lit_dpret.configs"):
        cfg = compose("train", overrides=["run_dir=run", *overrides])
    assert OmegaConf.to_container(cfg, resolve=True)


def test_two_lines_do_all() -> None:
    lines = [line for line in README.splitlines() if line.startswith("    python -m venv")]
    assert len(lines) == 2
    assert lines[0].endswith("python train.py experiment=quickstart") and lines[1].endswith(f" && {TESTS}")
    for line in lines:
        assert line.index("torch==2.13.0") < line.index('pip install -e ".['), "torch by name, before what needs it"


def test_the_readme_and_ci_run_the_same_tests() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith(f"\n{TESTS}")


def test_the_extras_that_the_readme_names_exist() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for names in re.findall(r"\[([a-z,]+)\]\"", README):
        for name in names.split(","):
            assert re.search(rf"^{name} = \[", pyproject, flags=re.MULTILINE), name
