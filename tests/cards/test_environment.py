"""What a card says of the machine is about this package and this device, and names neither host nor user."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_dpret.cards import facts as environment
from lit_dpret.cards.facts import code_commit, environment_facts


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a package in it that this module believes to be its own; nothing is committed yet."""
    package = tmp_path / "lit_dpret" / "privacy"
    package.mkdir(parents=True)
    (tmp_path / "lit_dpret" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "other.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    git(tmp_path, "init", "-q")
    code_commit.cache_clear()
    yield tmp_path
    code_commit.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True).stdout


def test_a_package_that_only_lies_in_a_repository_has_no_commit(repository: Path) -> None:
    git(repository, "add", "other.py")
    git(repository, "commit", "-qm", "another project, whose environment lies inside it")
    assert code_commit() is None


def test_a_checkout_is_named_by_its_commit_and_says_whether_files_differ_from_it(repository: Path) -> None:
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "all")
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert code_commit() == commit
    (repository / "other.py").write_text("changed = True\n", encoding="utf-8")
    code_commit.cache_clear()
    assert code_commit() == f"{commit}+changes"


def test_the_facts_name_kinds_and_no_host() -> None:
    facts = environment_facts(device="cpu", precision="32-true")
    assert (facts["hardware"], facts["precision"]) == (f"cpu ({platform.machine()})", "32-true")
    assert environment_facts()["hardware"] is None
    assert platform.node() not in json.dumps(facts)
