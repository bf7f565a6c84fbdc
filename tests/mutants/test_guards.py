"""Refusals can be left out one by one, to see whether a test misses them."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = """
def refuse_odd(number):
    if number % 2:
        raise ValueError(number)

def halved(number):
    refuse_odd(number)
    return number // 2
"""


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("GUARDS_RECORD", raising=False)
    spec = importlib.util.spec_from_file_location("guards_alone", Path(__file__).with_name("guards.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_refusal_has_a_switch_of_its_own(guards: ModuleType) -> None:
    met: list[str] = []
    switches = {"__refuses__": lambda place: place not in guards.left_out, "__refused__": met.append,
                "__is_in__": lambda place: place not in guards.left_out}  # fmt: skip
    tree = ast.fix_missing_locations(guards._Switches("made.py").visit(ast.parse(SOURCE)))
    made: dict[str, Any] = dict(switches)
    exec(compile(tree, "made.py", "exec"), made)
    with pytest.raises(ValueError, match="3"):
        made["halved"](3)
    assert met == ["made.py:7:4"] and made["halved"](4) == 2
    for place in ("made.py:4:8", "made.py:7:4"):
        guards.left_out.clear()
        guards.left_out.add(place)
        assert made["halved"](3) == 1
