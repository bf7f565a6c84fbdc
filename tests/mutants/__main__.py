"""Put each known mistake into a copy of the tree and see whether a test notices.

``python tests/mutants`` runs all of `mutants.toml`; words on the command line choose those whose name or file holds one
of them. The exit status is the number of mutants that survived or could not be applied.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "lit_dpret", "callbacks", "datamodules", "reproduction", "configs", "examples", "tests", "pyproject.toml",
    "train.py",
)  # fmt: skip
FAILED = 1
"""What pytest exits with where tests ran and some failed; with anything else the mutant proves nothing."""


def mutants(words: list[str]) -> list[dict[str, Any]]:
    """Return the mutants whose name or file holds one of ``words``; all of them where there are none."""
    found = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))["mutant"]
    return [m for m in found if not words or any(word in m["name"] or word in m["file"] for word in words)]


def mutated(text: str, mutant: dict[str, Any]) -> str:
    """Return the text of a file with the mistake in it.

    Raises:
        ValueError: What is to be replaced does not stand in it exactly once.
    """
    for old, new in [(mutant["old"], mutant["new"]), *mutant.get("also", [])]:
        if (count := text.count(old)) != 1:
            raise ValueError(f"{old!r} stands {count} times in {mutant['file']}")
        text = text.replace(old, new)
    return text


def copy_of_the_tree(folder: Path) -> None:
    """Copy what the tests need; the links inside the package stay links."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", *(("golden", "data") if name == "tests" else ()))
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)
    os.symlink(ROOT / "tests" / "data", folder / "tests" / "data")


def run(folder: Path, tests: list[str]) -> int:
    """Run tests in the copy until the first one fails; returns pytest's exit status."""
    path = os.pathsep.join([str(folder), str(folder / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *tests]
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if finished.returncode not in (0, FAILED):
        print(finished.stdout[-2000:], finished.stderr[-2000:])
    return finished.returncode


def main(words: list[str], *, honest_first: bool = True) -> int:
    """Report on each mutant; return how many were not killed.

    With ``honest_first`` the tests have to pass on the tree as it is: one that fails anyway kills nothing.
    """
    alive = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_of_the_tree(folder)
        tests = list(dict.fromkeys(test for mutant in mutants(words) for test in mutant["tests"]))
        if honest_first and run(folder, tests):
            print("A test fails without any mutant.")
            return 1
        for mutant in mutants(words):
            path = folder / mutant["file"]
            right = path.read_text(encoding="utf-8")
            try:
                path.write_text(mutated(right, mutant), encoding="utf-8")
                status = run(folder, mutant["tests"])
                verdict = {FAILED: "killed", 0: "SURVIVED"}.get(status, f"BROKEN (pytest exits with {status})")
            except (ValueError, OSError) as error:
                verdict = f"BROKEN ({error})"
            path.write_text(right, encoding="utf-8")
            alive += verdict != "killed"
            print(f"{verdict:10} {mutant['name']}", flush=True)
    print(f"{len(mutants(words)) - alive} of {len(mutants(words))} killed")
    return alive


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
