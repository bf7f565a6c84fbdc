"""Every page is followed, command by command, in an empty folder, at a tiny size.

`page_runs.py` says what makes a command tiny, `page_stages.py` what a page takes for granted, and both what is left out
and why. `test_pages.py` checks in every run of the tests that all commands compose.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest
from page_runs import NEEDS, NOT_EXECUTED, OTHER_PROGRAMS, STOPS, Desk, shortened
from page_stages import STAGES, Stage
from shown_commands import PAGES, Shown, commands, snippets

FOLLOWED = [page for page in PAGES if commands(page)]


def left_out(shown: Shown) -> str | None:
    """Why a command is not executed; None where it is."""
    text = " ".join(shown.words)
    if missing := [name for words, name in NEEDS.items() if words in text and importlib.util.find_spec(name) is None]:
        return f"needs {missing[0]}, which is not installed"
    if shown.arguments is None:
        return next((why for words, why in OTHER_PROGRAMS.items() if text.startswith(words)), None)
    return next((why for words, why in NOT_EXECUTED.items() if words in text), None)


def test_what_is_left_out_is_named_and_little() -> None:
    every = [shown for page in PAGES for shown in commands(page)]
    ours = Counter(left_out(shown) for shown in every if shown.arguments is not None)
    assert ours[None] >= 0.9 * ours.total() > 120
    for words in (*OTHER_PROGRAMS, *NOT_EXECUTED, *NEEDS, *STOPS):
        assert any(words in " ".join(shown.words) for shown in every), f"{words}: never shown"


@pytest.mark.slow
@pytest.mark.parametrize("page", FOLLOWED)
def test_every_command_of_the_page_runs_after_the_one_before(page: str, tmp_path: Path) -> None:
    stage = STAGES.get(page, Stage())
    desk = Desk(tmp_path)
    for write in stage.files:
        write(tmp_path)
    for line in stage.first:
        desk.ours(shortened(line.split()))
    failed = []
    scripts = snippets(page) if stage.snippets else []
    for shown in commands(page):
        while scripts and scripts[0][0] < shown.line:
            desk.other([sys.executable, "-c", scripts.pop(0)[1]])
        if left_out(shown) is not None:
            continue
        words = list(shown.words)
        for name, here in stage.names.items():  # what stands for the reader's own
            words = [word.replace(name, here) for word in words]
        try:
            if shown.arguments is None:
                desk.other(words)
            else:
                stops = next((said for part, said in STOPS.items() if part in " ".join(shown.words)), "")
                desk.ours(shortened(words[1:]), launcher=shown.launcher, stops=stops)
        except AssertionError as error:  # the others are still worth knowing
            failed.append(f"{shown}: {error}")
            print(failed[-1])
    assert not failed, "\n\n".join(failed)
    if not any("not installed" in (left_out(shown) or "") for shown in commands(page)):
        for name in stage.left:
            assert (tmp_path / name).is_file(), name
