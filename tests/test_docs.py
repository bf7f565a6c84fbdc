"""What the pages under docs/ say about the code is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lit_dpret.callbacks.traps import TRAPS, Trap

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_trap_stands_in_the_doctors_page_as_it_is_told(trap: Trap) -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    stage = "guaranteed by construction" if trap.stage == "construction" else trap.stage
    assert f"| {trap.name} | {trap.title} | {stage} | {trap.instead} |" in page


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_a_link_to_a_file_leads_to_one(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_name_that_is_imported_in_a_page_exists(page: Path) -> None:
    for line in re.findall(r"^from lit_dpret.* import .*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        exec(line, {})
