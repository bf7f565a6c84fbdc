"""The commands and Python snippets that the README and the pages under docs/ show. Imported by path; not a test."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md"))),
         *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs" / "howto").glob("*.md")))]  # fmt: skip
SHELL = ("sh", "bash")
PROGRAM = "lit-dpret"
LAUNCHERS = ("torchrun", "srun")


@dataclass(frozen=True)
class Shown:
    """One command of a page.

    Attributes:
        page: Its path from the root of the repository.
        line: The line where it begins.
        words: Its words, split as by a shell, without environment settings and without the launcher of ranks.
        launcher: ``torchrun`` or ``srun`` if one starts it, else empty.
    """

    page: str
    line: int
    words: tuple[str, ...]
    launcher: str = ""

    @property
    def arguments(self) -> list[str] | None:
        """The words after ``python train.py`` or ``lit-dpret``; None for another program."""
        return list(self.words[1:]) if self.words[0] == PROGRAM else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def commands(page: str) -> list[Shown]:
    """Return the commands of a page in order, from indented lines and shell fences."""
    found = []
    for line, text in _shell_lines((ROOT / page).read_text(encoding="utf-8")):
        for words in _parts(text):
            launcher = next((word for word in words if word in LAUNCHERS), "")
            script = next((place for place, word in enumerate(words) if word.endswith("train.py")), None)
            if script is not None and (launcher or words[0] in ("python", "python3")):
                words = [PROGRAM, *words[script + 1 :]]
            found.append(Shown(page, line, tuple(words), launcher))
    return found


def snippets(page: str) -> list[tuple[int, str]]:
    """Return the Python fences of a page, each with its first line number."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        (text[: found.start()].count("\n") + 1, found[1])
        for found in re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    ]


def _parts(text: str) -> list[list[str]]:
    """Return the commands of one line, as words; ignore comments."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&;")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if word in ("&&", ";"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def _shell_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines typed into a shell, with their numbers; a line ending in a backslash continues in the next."""
    found: list[tuple[int, str]] = []
    fence: str | None = None
    continued = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            fence = None if fence is not None else line[3:].strip()
            continue
        typed = line if fence in SHELL else line[4:] if re.match(r"    \S", line) and fence in (None, "text") else None
        if continued:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
        elif typed is not None:
            found.append((number, typed))
        else:
            continue
        start, whole = found[-1]
        continued = whole.endswith("\\")
        found[-1] = (start, whole.rstrip("\\").rstrip())
    return found
