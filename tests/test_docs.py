"""What the pages under docs/ say about the code is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lit_dpret.callbacks.traps import TRAPS, Trap
from lit_dpret.privacy.strategies import markdown_table

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


def test_no_page_or_report_holds_a_path_of_the_machine_that_made_it() -> None:
    kinds = {".md", ".html", ".json", ".jsonl", ".csv"}
    pages = [page for page in (ROOT / "docs").rglob("*") if page.suffix in kinds]
    assert len(pages) > 20
    for page in pages:
        found = re.search(r"(?<![\w.])/(?:tmp|root|home|work|mnt|scratch)/\S*", page.read_text(encoding="utf-8"))
        assert found is None, f"{page.relative_to(ROOT)} says {found and found[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_name_that_is_imported_in_a_page_exists(page: Path) -> None:
    for line in re.findall(r"^from lit_dpret.* import .*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        exec(line, {})


def test_the_page_on_several_processes_holds_the_table_that_a_fit_refuses_by() -> None:
    page = (ROOT / "docs" / "several_processes.md").read_text(encoding="utf-8")
    modes = ["dp_sgd", "public_passages", "batch_clip", "per_example_duplicated", "logit_dp", "synthetic", "none"]
    assert {path.stem for path in (ROOT / "configs" / "privacy").glob("*.yaml")} == set(modes)
    assert markdown_table(modes) in page
