"""Errors raised inside somebody's own project name what Python knows, and nothing of the command line alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_dpret import errors
from lit_dpret.callbacks.traps import TRAPS
from lit_dpret.config import groups, names
from lit_dpret.errors import ConfigurationError, in_python

ROOT = Path(__file__).resolve().parent.parent
#: What a user of Python reaches; the other rooms are reached by commands.
REACHED = ("callbacks", "datamodules", *(f"lit_dpret/{room}" for room in (
    "privacy", "modules", "distributed", "encoders", "losses", "negatives", "made_private.py")))  # fmt: skip
OF_THE_COMMAND_LINE = re.compile(
    r"hydra\.|(?<!lit-dpret )\btask=\w|(?<![\w./])(?:callbacks|privacy|model|datamodule)\.[a-z]|"
    + "|".join(rf"(?<![\w.]){group}=(?:{'|'.join(names(group))})\b" for group in groups() if group != "task")
)


def sentences() -> Iterator[tuple[str, str]]:
    """Every text in a call that makes or writes an error, with X for what is filled in."""
    for room in REACHED:
        path = ROOT / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                named = getattr(node, "func", None)
                if not isinstance(node, ast.Call) or not getattr(named, "id", "").endswith(("Error", "told", "warn")):
                    continue
                for text in node.args:
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        yield f"{file.name}:{node.lineno}", text.value
                    if isinstance(text, ast.JoinedStr):
                        parts = [part.value if isinstance(part, ast.Constant) else "X" for part in text.values]
                        yield f"{file.name}:{node.lineno}", "".join(map(str, parts))


@pytest.mark.costly
def test_no_error_that_python_reaches_speaks_of_the_command_line() -> None:
    found = [(place, text) for place, text in sentences() if OF_THE_COMMAND_LINE.search(text)]
    assert len(found) > 100  # the command line is spoken to by the same sentences
    left = [(place, in_python(text)) for place, text in found if OF_THE_COMMAND_LINE.search(in_python(text))]
    assert not left, "\n".join(map(str, left))


def test_what_the_doctor_says_of_a_trap_can_be_said_in_python() -> None:
    found = [trap.instead for trap in TRAPS if OF_THE_COMMAND_LINE.search(trap.instead)]
    assert found and not [text for text in map(in_python, found) if OF_THE_COMMAND_LINE.search(text)]


@pytest.mark.parametrize("group", [group for group in errors._CHOICES if group != "trainer"])
def test_a_choice_is_called_by_the_class_that_it_makes(group: str) -> None:
    for name, said in errors._CHOICES[group].items():
        file = ROOT / "configs" / group / f"{name}.yaml"
        assert re.search(
            rf"^ *_target_: ([\w.]+\.)?{re.escape(said)}$", file.read_text(encoding="utf-8"), flags=re.MULTILINE
        ), name


def test_an_error_speaks_the_language_in_which_the_setting_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigurationError("privacy.eps=3 and callbacks.accountant.resume_reserve=2, or privacy=none")
    assert str(error).startswith("privacy.eps=3")
    monkeypatch.setattr(errors, "on_command_line", False)
    assert str(error) == "eps=3 and PrivacyAccountant(resume_reserve=2), or privacy=NoPrivacy"


def test_names_of_files_keep_their_stems() -> None:
    for name in ("model.safetensors", "privacy.md", "model.pt"):
        assert in_python(f"{name} cannot be read") == f"{name} cannot be read"
    assert in_python("model.few_shot and privacy.eps=3") == "few_shot and eps=3"


def test_a_value_is_written_as_python_writes_it() -> None:
    for said, meant in (
        ("init_from=runs/first", "PrivacyAccountant(init_from='runs/first')"),
        ("init_from_is_public=true", "PrivacyAccountant(init_from_is_public=True)"),
        ("datamodule.cap=0 must be at least 1, or null", "cap=0 must be at least 1, or None"),
    ):
        assert in_python(said) == meant
