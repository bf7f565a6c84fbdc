"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: By their import names; the second and third are links, which a search of the first does not follow.
FOLDERS = ("lit_dpret", "lit_dpret/callbacks", "lit_dpret/datamodules", "reproduction")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
}


@pytest.mark.costly
@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_examples_of_the_docstrings_are_true(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted and not found.failed
