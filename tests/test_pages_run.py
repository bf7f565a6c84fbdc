"""A page that leads through a whole job is followed command by command, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


def private_log(folder: Path) -> None:
    """The two files that the page asks its reader for: 120 queries of 40 people, 120 passages."""
    topics = ["flood", "fire", "theft", "hail", "travel", "dental"]
    passages = [f"Clause {i} covers {topics[i % 6]} damage up to {100 + i} dollars a year." for i in range(120)]
    records = [
        {"query": f"does clause {i} cover {topics[i % 6]}?", "passage": text, "user_id": f"u{i // 3}"}
        for i, text in enumerate(passages)
    ]
    corpus = [{"_id": f"p{i}", "text": text} for i, text in enumerate(passages)]
    for name, rows in (("log.jsonl", records), ("passages.jsonl", corpus)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# What the reader brings, what makes a command shorter, and what has to lie there in the end.
FOLLOWED: dict[str, tuple[Callable[[Path], None], dict[str, list[str]], list[str]]] = {
    "howto/own_log.md": (
        private_log,
        {"fit": ["trainer.max_steps=2"], "synthesize": ["task.max_passages=24"]},
        ["runs/plan/plan.json", "runs/generator/privacy_card.html", "runs/filtered/filtered/privacy_card.json"],
    ),
}


def shown(page: str) -> list[list[str]]:
    """The commands of a page, as words, in its order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [shlex.split(line) for line in re.findall(r"^    (lit-dpret .*)$", text, flags=re.MULTILINE)]


def test_a_page_that_is_followed_has_commands() -> None:
    assert all(len(shown(page)) >= 3 for page in FOLLOWED)


@pytest.mark.slow
@pytest.mark.parametrize("page", FOLLOWED)
def test_every_command_of_the_page_runs_after_the_one_before(page: str, tmp_path: Path) -> None:
    prepare, shorter, left = FOLLOWED[page]
    prepare(tmp_path)
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path / "home")}
    for _, task, *settings in shown(page):
        command = [sys.executable, "-m", "lit_dpret", task, *settings, *shorter.get(task, [])]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **state}, capture_output=True, text=True)
        assert done.returncode == 0, f"{task}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    for name in left:
        assert (tmp_path / name).is_file(), name
