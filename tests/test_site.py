"""The documentation builds as a site, without a warning and without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from lit_dpret.config import choices, groups

pytest.importorskip("mkdocs_autorefs", reason="the extra docs is not installed")
ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    return folder


def test_every_page_stands_in_the_site(site: Path) -> None:
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "howto").glob("*.md")]:
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page.name


def test_every_setting_stands_in_the_site(site: Path) -> None:
    page = (site / "configuration.html").read_text(encoding="utf-8")
    for group in groups():
        for choice in choices(group):
            assert all(f"<code>{key.name}</code>" in page for key in choice.keys), choice.name


def test_the_reference_tells_arguments_from_docstrings(site: Path) -> None:
    assert "Budget of the whole run." in (site / "reference" / "privacy.html").read_text(encoding="utf-8")


def test_a_page_asks_no_other_server_for_anything_that_it_shows(site: Path) -> None:
    for name in ("index.html", "concepts.html", "configuration.html"):
        page = (site / name).read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?https?://(?!127)[^\"> ]+", page)


def test_whatever_a_page_points_to_within_the_site_is_there(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert site / "reproduction" / "paper_002" / "paper_002.html" in pages
    for page in pages:
        if page.name == "404.html":  # its addresses start at the root of a server
            continue
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"""<(?:a|img)[^>]+?(?:href|src)=["']?([^"'\s>]+)""", text):
            if not re.match(r"[a-z]+:|#|//", target):
                there = page.parent / unquote(target.split("#")[0])
                assert there.exists(), f"{page.relative_to(site)} points to {target}"
