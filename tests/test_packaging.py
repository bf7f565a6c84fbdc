"""What is installed is what lies in the repository: from a clone, editable, and by sdist -> wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lit_dpret
from lit_dpret.cards.provenance import package_versions

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {name: f"lit_dpret/{name}" for name in ("callbacks", "datamodules", "configs")}


def tracked(folder: str) -> set[str]:
    """Files of a folder as git knows them, or as they lie there where this is not a checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0 and listed.stdout:
        return set(listed.stdout.split())
    return {
        str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of this tree, and the wheel made from that sdist alone."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out)], cwd=ROOT, check=True)
    sdist = next(out.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    unpacked = out / sdist.name.removesuffix(".tar.gz")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=unpacked, check=True
    )
    return sdist, next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_of_the_sdist_holds_every_file_once(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    assert len(names) == len(set(names))
    expected = {path for path in tracked("lit_dpret") if Path(path).parts[1] not in FOLDERS}
    for folder, target in FOLDERS.items():
        expected |= {path.replace(folder, target, 1) for path in tracked(folder)}
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.mark.costly
def test_the_wheel_is_typed_declares_command_and_licence_and_has_the_one_version(built: tuple[Path, Path]) -> None:
    wheel = zipfile.ZipFile(built[1])
    named = {Path(name).name: name for name in wheel.namelist()}
    assert "lit_dpret/py.typed" in wheel.namelist() and "LICENSE" in named
    entries = wheel.read(named["entry_points.txt"]).decode()
    assert "lit-dpret = lit_dpret.__main__:main" in entries
    assert "[pytest11]\nlit_dpret = lit_dpret.pytest_plugin" in entries
    version = lit_dpret.__version__
    assert package_versions()["lit-dpret"] == version
    assert f"\nVersion: {version}\n" in wheel.read(named["METADATA"]).decode()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.costly
def test_the_image_copies_what_the_wheel_is_made_of_and_nothing_else(built: tuple[Path, Path], tmp_path: Path) -> None:
    file = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    stage = file.split("FROM ")[1]
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", stage, flags=re.MULTILINE) for name in line.split()]
    for name in copied:
        source, target = ROOT / name, tmp_path / "src" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheels")]
    subprocess.run(command, cwd=tmp_path / "src", check=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert set(zipfile.ZipFile(wheel).namelist()) == set(zipfile.ZipFile(built[1]).namelist())
    sent = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(sent) == {*copied, "constraints.txt"}


def test_the_image_has_the_versions_and_extras_of_the_project_and_no_root() -> None:
    file = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (named,) = re.findall(r"\[([a-z,]+)\]\"$", file, flags=re.MULTILINE)
    assert set(named.split(",")) <= set(extras)
    (torch,) = re.findall(r"torch==\S+", file)
    assert torch in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert file.index("USER retrieval") < file.index('ENTRYPOINT ["lit-dpret"]')
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, flags=re.MULTILINE)) == set(extras)


@pytest.mark.slow
def test_the_wheel_imports_and_composes_without_the_repository(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(tmp_path / "site")
    code = (
        "import lit_dpret, lit_dpret.callbacks, lit_dpret.cli, lit_dpret.config, lit_dpret.datamodules\n"
        "if 'paper_000' in lit_dpret.config.names('experiment'): raise SystemExit('the studies are in the wheel')\n"
        "from hydra import compose, initialize_config_module\n"
        "with initialize_config_module(version_base='1.3', config_module='lit_dpret.configs'):\n"
        "    print(compose('train', overrides=['privacy.eps=2', 'run_dir=x']).privacy.eps, lit_dpret.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2") and str(tmp_path / "site") in done.stdout


STARTED_WITHOUT = """
import builtins, sys
missing, real = {modules!r}, builtins.__import__

def without(name, globals=None, *rest, **more):
    ours = str((globals or {{}}).get("__name__")).partition(".")[0] == "lit_dpret"
    if ours and name.partition(".")[0] in missing:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return real(name, globals, *rest, **more)

builtins.__import__ = without
from lit_dpret.cli import main
main()
"""


@pytest.mark.slow
def test_the_command_starts_where_no_extra_is_installed() -> None:
    """What an extra brings is imported where it is used; only our own modules go without it here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def named(texts: Iterable[str]) -> set[str]:
        return {canonicalize_name(Requirement(text).name) for text in texts}

    extras = named(chain(*project["optional-dependencies"].values())) - named(project["dependencies"])
    modules = {
        module
        for module, owners in packages_distributions().items()
        if module != "lit_dpret" and any(canonicalize_name(owner) in extras for owner in owners)
    }
    assert {"cryptography", "flwr", "matplotlib"} <= modules
    program = STARTED_WITHOUT.format(modules=modules)
    command = [sys.executable, "-c", program, "list", "task"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0 and "federated" in found.stdout, found.stderr[-2000:]


@pytest.mark.slow
def test_a_clone_runs_without_being_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "train.py", "--cfg", "job", "privacy.eps=2", f"hydra.run.dir={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "eps: 2" in done.stdout


def test_the_links_and_the_folders_are_one_set_of_modules() -> None:
    for name, target in FOLDERS.items():
        link = ROOT / target
        assert link.is_symlink() and os.readlink(link) == f"../{name}"
        assert link.resolve() == ROOT / name
