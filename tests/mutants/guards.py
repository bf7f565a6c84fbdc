"""Leave out each refusal of the product code, one at a time, and name those that no test misses.

    python tests/mutants/guards.py record [TESTS]    # run the fast tests, and note which refusals each of them meets
    python tests/mutants/guards.py leave-out [WORDS] # without each refusal in such files, run tests that met it

A refusal is a ``raise`` of a new exception, or a call of a function whose name begins with refuse, require or check.
One that survives is caught by another as well, which is fine where both are wanted, or comes too late to be reached by
what it is for, or is looked for by no test. One that no test meets is not listed by ``record`` at all.
"""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTES = Path(__file__).with_name(".guards")
ROOMS = ("lit_dpret/", "callbacks/", "datamodules/")
NAMES = ("refuse", "require", "check")
#: So many tests are run without a refusal, two at most of one function, and so many seconds.
TESTS, OF_ONE, SECONDS = 8, 2, 150

left_out: set[str] = set()
_noted: set[tuple[str, str]] = set()


class _Switches(ast.NodeTransformer):
    """Put a switch before each refusal of one file, named by its place."""

    def __init__(self, file: str) -> None:
        self.file = file

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node if node.exc is None else self._switched(node, node, "__refuses__")

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", "")).lstrip("_")
        if not name.startswith(NAMES):
            return self.generic_visit(node)
        noted = ast.Expr(self._asked("__refused__", node))
        handler = ast.ExceptHandler(type=ast.Name("BaseException", ast.Load()), name=None, body=[noted, ast.Raise()])
        return self._switched(node, ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[]), "__is_in__")

    def _switched(self, node: ast.stmt, body: ast.stmt, by: str) -> ast.AST:
        return ast.copy_location(ast.If(test=self._asked(by, node), body=[body], orelse=[]), node)

    def _asked(self, by: str, node: ast.stmt) -> ast.Call:
        place = ast.Constant(f"{self.file}:{node.lineno}:{node.col_offset}")
        return ast.Call(func=ast.Name(by, ast.Load()), args=[place], keywords=[])


def _note(place: str) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if NOTES.is_dir() and test and (place, test) not in _noted and "GUARDS_RECORD" in os.environ:
        _noted.add((place, test))
        with (NOTES / f"{os.getpid()}.txt").open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{place}\t{test}\n")


def _refuses(place: str) -> bool:
    _note(place)
    return place not in left_out


def install() -> None:
    """Compile every module of the product with switches from now on."""
    functions = {"__refuses__": _refuses, "__refused__": _note, "__is_in__": lambda place: place not in left_out}
    vars(builtins).update(functions)
    plain = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        path = self.get_filename(name)
        file = os.path.relpath(os.path.realpath(path), ROOT)
        if not file.startswith(ROOMS):
            return plain(self, name)
        tree = _Switches(file).visit(ast.parse(self.get_source(name) or ""))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def record(tests: list[str]) -> int:
    NOTES.mkdir(exist_ok=True)
    for old in NOTES.glob("*.txt"):
        old.unlink()
    here = str(Path(__file__).parent)
    environment = os.environ | {"GUARDS_RECORD": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), here])}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-p", "guards", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def leave_out(words: list[str]) -> int:
    """Return how many refusals no test misses."""
    import guards  # by the name that the plugin has
    import pytest

    met: dict[str, list[str]] = defaultdict(list)
    for file in sorted(NOTES.glob("*.txt")):
        for line in file.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            place, _, test = line.partition("\t")
            met[place].append(test)
    for name in ("lit_dpret.callbacks", "lit_dpret.datamodules", "lit_dpret.modules", "lit_dpret.cli"):
        __import__(name)  # once for all processes below
    alive = 0
    for place in sorted(place for place in met if not words or any(word in place for word in words)):
        of_function: Counter[str] = Counter()
        tests = []
        for test in met[place]:
            of_function[function := test.partition("[")[0]] += 1
            if of_function[function] <= OF_ONE and len(tests) < TESTS:
                tests.append(test)
        if not (child := os.fork()):
            guards.left_out.add(place)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1), os.dup2(silent, 2)
            os._exit(int(pytest.main([*tests, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""])))
        begun = time.monotonic()
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() - begun < SECONDS:
            time.sleep(0.05)
        if not ended[0]:
            os.kill(child, 9)
            ended = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(ended[1]) == 0:
            alive += 1
            print(f"NOT MISSED {place} by {len(met[place])} tests that met it, as {tests[0]}", flush=True)
    return alive


if "GUARDS_RECORD" in os.environ and __name__ != "__main__":
    install()
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    os.chdir(ROOT)
    if sys.argv[1:2] == ["record"]:
        sys.exit(record(sys.argv[2:]))
    import guards

    guards.install()
    sys.exit(leave_out(sys.argv[2:]))
