"""Put each known mistake into a copy of the tree and check that a test fails.

``python tests/mutants [WORDS]`` runs the mutants of `mutants.toml` whose name, file or tests contain one of the words;
without words, all of them. The exit status is the number of mutants that survived or could not be applied, at most 100.

One process imports the libraries and is forked for each mutant, so that a mutant costs what its tests cost.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
import tomllib
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "lit_dpret", "callbacks", "datamodules", "reproduction", "configs", "examples", "tests", "pyproject.toml",
    "train.py",
)  # fmt: skip
FAILED = 1
"""Pytest's exit status when tests ran and some failed; any other status proves nothing about the mutant."""
SECONDS = 600
"""Time limit of one mutant's tests."""
JOBS = len(os.sched_getaffinity(0))
LIBRARIES = (
    "pytest",
    "torch",
    "lightning.pytorch",
    "transformers",
    "opacus",
    "dp_accounting",
    "scipy.stats",
    "omegaconf",
)


def mutants(words: list[str]) -> list[dict[str, Any]]:
    """Return the mutants whose name, file or tests contain one of ``words``; without words, all mutants."""
    found = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))["mutant"]
    return [
        m for m in found if not words or any(word in " ".join([m["name"], m["file"], *m["tests"]]) for word in words)
    ]


def mutated(text: str, mutant: dict[str, Any]) -> str:
    """Return the text of a file with the mistake in it.

    Raises:
        ValueError: The text to replace does not occur exactly once.
    """
    for old, new in [(mutant["old"], mutant["new"]), *mutant.get("also", [])]:
        if (count := text.count(old)) != 1:
            raise ValueError(f"{old!r} occurs {count} times in {mutant['file']}")
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
    """Run tests in the copy until the first failure, in a fork of this process; return pytest's exit status."""
    log = folder / "pytest.log"
    if (child := os.fork()) == 0:
        status = 70
        try:
            signal.alarm(SECONDS)
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(folder)
            sys.path[:0] = [str(folder), str(folder / "tests")]
            os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
            status = sys.modules["pytest"].main(["-q", "-x", "-p", "no:cacheprovider", "--tb=line", *tests])
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, FAILED):
        print(log.read_text(encoding="utf-8", errors="replace")[-4000:], flush=True)
    return status


def survivors(chosen: list[dict[str, Any]], folder: Path) -> int:
    """Report on each mutant, run in a copy of the tree at ``folder``; return how many were not killed."""
    alive = 0
    copy_of_the_tree(folder)
    for mutant in chosen:
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
    return alive


def main(words: list[str], *, honest_first: bool = True, jobs: int = JOBS) -> int:
    """Report on each mutant; return how many were not killed.

    With ``honest_first`` the tests must pass without a mutant first: a test that always fails kills nothing.
    """
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    for library in LIBRARIES:
        importlib.import_module(library)
    chosen = mutants(words)
    with tempfile.TemporaryDirectory() as temporary:
        if honest_first:
            copy_of_the_tree(Path(temporary) / "honest")
            tests = list(dict.fromkeys(test for mutant in chosen for test in mutant["tests"]))
            if run(Path(temporary) / "honest", tests):
                print((Path(temporary) / "honest" / "pytest.log").read_text(encoding="utf-8")[-4000:])
                print("A test fails without any mutant.")
                return 1
        children = []
        for job in range(jobs):
            if (child := os.fork()) == 0:
                status = 100
                try:
                    status = min(100, survivors(chosen[job::jobs], Path(temporary) / str(job)))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            children.append(child)
        alive = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    print(f"{len(chosen) - alive} of {len(chosen)} killed")
    return min(alive, 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
