"""What README and the pages under docs/ say about the code is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lit_dpret.distributed.strategies import markdown_table
from lit_dpret.privacy import modes as privacy_modes
from lit_dpret.privacy.clipping import ENGINES
from lit_dpret.privacy.modes import (
    DPSGD,
    BatchClip,
    LogitDP,
    NoPrivacy,
    PerExampleDuplicated,
    PublicPassages,
    SyntheticData,
)

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "howto").glob("*.md")])
WRITTEN_BY_THE_SITE = {"configuration.md", "pitfalls.md"}  # docs/pages.py makes it when the site is built


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "SECURITY.md", *PAGES], ids=lambda page: page.name)
def test_a_link_to_a_file_leads_to_one(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert target in WRITTEN_BY_THE_SITE or (page.parent / target).is_file(), f"{page.name} links to {target}"


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


SOURCES = [
    path
    for part in ("lit_dpret", "callbacks", "datamodules", "reproduction")
    for path in sorted((ROOT / part).rglob("*.py"))
]
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))


def test_the_errors_that_the_page_explains_are_those_that_the_code_says() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    said = re.sub(r"\"\s*\n\s*f?\"", "", text)  # the seams between adjoining literals closed
    assert len(QUOTED) > 12 and [words for words in QUOTED if words.strip() not in said] == []


def test_the_page_on_several_processes_holds_the_table_that_a_fit_refuses_by() -> None:
    page = (ROOT / "docs" / "several_processes.md").read_text(encoding="utf-8")
    shown = [DPSGD, PublicPassages, BatchClip, PerExampleDuplicated, LogitDP, SyntheticData, NoPrivacy]
    kinds = [getattr(privacy_modes, name) for name in privacy_modes.__all__]
    named = {kind.name: kind for kind in kinds if hasattr(kind, "name")}
    others = {path.stem for path in (ROOT / "configs" / "privacy").glob("[!_]*.yaml")} - {mode.name for mode in shown}
    modes = [*shown, *(named[name] for name in sorted(others))]
    assert markdown_table(modes, ENGINES) in page


def test_the_two_lines_of_the_readme_do_all_and_its_tests_are_those_of_ci() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in readme.splitlines() if line.startswith("    python -m venv")]
    assert len(lines) == 2
    assert lines[0].endswith("python train.py experiment=quickstart") and lines[1].endswith(" && pytest -q -n 2")
    for line in lines:
        assert line.index("torch==2.13.0") < line.index('pip install -e ".['), "torch by name, before what needs it"
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("\npytest -q -n 2")
