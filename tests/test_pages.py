"""Every command and every snippet of the README and of the pages under docs/ is one that works.

Here the cheap half, in every run of the tests: a command of ours composes, its settings are arguments of what they
construct, and its task and its mode are made; a program of others is one that `page_runs.py` knows; a snippet of Python
is executed. `test_pages_run.py` executes the commands themselves, at a tiny size.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from configured import composed, wrong_keys
from hydra.utils import instantiate
from page_runs import NOT_EXECUTED, OTHER_PROGRAMS, TINY, shortened
from page_snippets import PACKAGES, REPLACED, SURROUNDINGS
from shown_commands import PAGES, ROOT, Shown, commands, snippets

from lit_dpret.audit.testing import assert_private
from lit_dpret.cli import checked_task, listing, with_task
from lit_dpret.config import arguments_of, choices, groups, names, top_level
from lit_dpret.tasks.silo_command import silo_parser

SHOWN = {command.words: command for page in PAGES for command in commands(page)}.values()  # equal ones once
OURS = [command for command in SHOWN if command.arguments is not None]
OTHERS = [command for command in SHOWN if command.arguments is None]
TOLD = [page for page in PAGES if snippets(page)]


@pytest.mark.costly
@pytest.mark.parametrize("shown", OURS, ids=str)
def test_a_command_is_made_of_what_there_is(shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = list(shown.words[1:])
    if arguments[:1] == ["silo"]:
        assert silo_parser().parse_args(arguments[1:])
        return
    if arguments[:1] == ["list"]:
        assert listing(arguments[1:])
        return
    for folder, found in {"FOLDER": "configs", "DIR": "configs", "configs": "configs", "docs": "docs"}.items():
        (tmp_path / folder).symlink_to(ROOT / found)  # what a constructor looks for
    monkeypatch.chdir(tmp_path)
    cfg = composed(*(word for word in with_task(arguments) if not word.startswith(("hydra.", "-"))))
    assert wrong_keys(cfg) == []
    assert checked_task(cfg) is not None
    assert instantiate(cfg.privacy, _convert_="all") is not None


def first_of_each() -> dict[str, Shown]:
    """The first command of each experiment, and of each task that `TINY` shrinks, of those that are executed."""
    found: dict[str, Shown] = {}
    for shown in OURS:
        if not any(part in " ".join(shown.words) for part in NOT_EXECUTED):
            for word in shown.words[1:]:
                if word.startswith("experiment=") or word in TINY:
                    found.setdefault(word, shown)
    return {word: shown for word, shown in found.items() if word.startswith(("experiment=", "task="))}


@pytest.mark.costly
@pytest.mark.parametrize("shown", first_of_each().values(), ids=list(first_of_each()))
def test_what_makes_a_command_tiny_is_what_its_task_takes(
    shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FOLDER", "DIR", "docs"):
        (tmp_path / name).symlink_to(ROOT / "docs")  # what a constructor looks for
    monkeypatch.chdir(tmp_path)
    cfg = composed(*(word for word in shortened(list(shown.words[1:])) if not word.startswith(("hydra.", "-"))))
    assert instantiate(cfg.task, _convert_="all") is not None


@pytest.mark.parametrize("shown", OTHERS, ids=str)
def test_a_program_of_others_is_there_or_its_absence_has_a_reason(shown: Shown) -> None:
    text = " ".join(shown.words)
    known = any(text.startswith(words) for words in OTHER_PROGRAMS)
    assert known or shown.words[0] in ("export", "printf") or shutil.which(shown.words[0]), text


def test_the_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = [
        name
        for page in PAGES
        for names in re.findall(r"(?:lit-dpret|\.)\[([a-z,-]+)\]", (ROOT / page).read_text(encoding="utf-8"))
        for name in names.split(",")
    ]
    assert len(named) > 10 and set(named) <= set(extras)


# What stands for a name of the reader's own.
READERS_OWN = {"model=mine"}


def test_a_setting_that_is_named_in_a_sentence_exists() -> None:
    known = {key.name for group in groups() for choice in choices(group) for key in choice.keys}
    known |= {f"{choice.group}.{name}" for group in groups() for choice in choices(group) if choice.target
              for name in arguments_of(choice.target)}  # fmt: skip
    known |= {key.name for key in top_level().keys}
    named: list[tuple[str, str]] = []
    for page in [*PAGES, "SECURITY.md", "CONTRIBUTING.md"]:
        prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        words = [word for span in re.findall(r"`([^`\n]+)`", prose) for word in span.split()]
        named += [(page, word) for word in words if re.match(r"[a-z_]+(\.[a-z_0-9]+)*=.", word)]
    assert len(named) > 250
    assert [(page, word) for page, word in named if not exists(word, known) and word not in READERS_OWN] == []


def exists(word: str, known: set[str]) -> bool:
    """Whether ``group=choice`` or ``group.key=value`` is one of ours; other words with an equals sign pass."""
    key, _, value = word.partition("=")
    if key in groups():
        chosen = [one for one in re.split(r"[\[\],|]", value) if re.fullmatch(r"[a-z_0-9]+", one)]
        return all(one in {*names(key), "null"} for one in chosen)
    ours = {name.split(".")[0] for name in known}
    return "." not in key or key.split(".")[0] not in ours or key.removesuffix("._target_") in known


@pytest.mark.costly
@pytest.mark.parametrize("page", TOLD)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "shown"} | SURROUNDINGS.get(page, lambda folder: {})(tmp_path)
    for line, text in snippets(page):
        if any(text.startswith(words) and importlib.util.find_spec(name) is None for words, name in PACKAGES.items()):
            continue
        for words, instead in REPLACED.items():
            text = text.replace(words, instead)
        exec(compile("\n" * line + text, str(ROOT / page), "exec"), names)
        # A test that is shown is run, by its fixtures.
        for name in [name for name in names if name.startswith("test_")]:
            test = names.pop(name)
            test(*([assert_private] if inspect.signature(test).parameters else []))
