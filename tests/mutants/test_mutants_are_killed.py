"""A test fails for every known mistake in the privacy core, and every mistake still applies to the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_main", Path(__file__).with_name("__main__.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAIN = runner()


@pytest.mark.parametrize("mutant", MAIN.mutants([]), ids=lambda mutant: mutant["name"])
def test_a_mutant_still_applies_and_names_tests_that_exist(mutant: dict[str, object]) -> None:
    text = (MAIN.ROOT / str(mutant["file"])).read_text(encoding="utf-8")
    assert MAIN.mutated(text, mutant) != text
    assert [name for name in mutant["tests"] if not (MAIN.ROOT / name).exists()] == []  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MAIN.mutants([]), ids=lambda mutant: mutant["name"])
def test_a_mutant_is_killed(mutant: dict[str, str]) -> None:
    assert MAIN.main([mutant["name"]], honest_first=False, jobs=1) == 0
