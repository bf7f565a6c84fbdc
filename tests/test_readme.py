"""The README shows the main commands, and the two lines that it begins with are those of CI."""

from __future__ import annotations

import re
from pathlib import Path

from shown_commands import commands

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TESTS = "pytest -q -n 2"


def test_the_readme_shows_the_main_commands() -> None:
    shown = " ".join(word for command in commands("README.md") for word in command.words)
    for wanted in (
        "experiment=quickstart",
        "task=check_data",
        "task=plan",
        "model=generator",
        "task=synthesize",
        "verify",
    ):
        assert wanted in shown


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
