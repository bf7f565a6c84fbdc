"""A stranger's machine: the wheel in a clean environment, outside the repository, and foreign projects that use it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from page_stages import private_log

import lit_dpret

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.slow
FIT = [
    *("fit", "model=generator", "privacy.eps=3", "datamodule=pairs", "datamodule.pairs=log.jsonl"),
    *("datamodule.expected_batch_size=8", "datamodule.sampling=poisson", "trainer.max_steps=2"),
    "hydra.run.dir=runs/generator",
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the built wheel; the other packages come from ours, by a ``.pth``."""
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(home)], cwd=ROOT, check=True)
    venv.create(home / "venv", with_pip=True)
    found = home / "venv" / "bin" / "python"
    (wheel,) = home.glob("*.whl")
    subprocess.run([found, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    own = subprocess.run(
        [found, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    libraries = {sysconfig.get_paths()["purelib"], str(Path(pytest.__file__).parent.parent)}
    (Path(own) / "libraries.pth").write_text("\n".join(sorted(libraries)), encoding="utf-8")
    return found


def run(command: list[str], folder: Path) -> str:
    """What a command says, in ``folder`` and without a way to the repository; it has to end well."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(command, cwd=folder, env=env | {"XDG_STATE_HOME": str(folder / "state")},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_installed_program_lists_trains_and_verifies(python: Path, tmp_path: Path) -> None:
    program = str(python.with_name("lit-dpret"))
    assert "datamodule" in run([program, "list"], tmp_path)
    private_log(tmp_path)
    run([program, *FIT], tmp_path)
    card = json.loads((tmp_path / "runs" / "generator" / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["package_versions"]["lit-dpret"] == lit_dpret.__version__
    assert card["environment"]["code_commit"] is None, "installed, so of no checkout"
    assert "FAILED" not in run([program, "verify", "runs/generator"], tmp_path)


def test_a_user_of_the_installed_package_gets_its_types(python: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from lit_dpret.privacy.modes import DPSGD\nreveal_type(DPSGD(eps=3.0).eps)\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--follow-imports=silent", "mine.py"]
    assert 'Revealed type is "float' in run([*mypy, "--config-file", str(ROOT / "pyproject.toml")], tmp_path)


# What the last line has to say.
SAYS = {
    "intent_classifier": r"epsilon (2\.9\d\d|3\.000) at delta 8\.3e-04, accuracy (0\.[5-9]\d|1\.00)",
    "own_loop": r"epsilon (2\.9\d\d|3\.000) at delta 5\.0e-04 in 100 steps",
    "frozen_retriever": r"nDCG@10 (0\.[5-9]|1\.0)\d\d .* \+0\.\d+, p = 0\.000\d",
}


@pytest.mark.parametrize("name", SAYS)
def test_a_foreign_project_runs_on_the_wheel(name: str, python: Path, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / name, tmp_path / name)
    place = run([str(python), "-c", "import lit_dpret; print(lit_dpret.__file__)"], tmp_path).strip()
    assert Path(place).is_relative_to(python.parent.parent), "the wheel, not the repository"
    said = run([str(python), f"{name}/train.py", "--folder", "run"], tmp_path)
    assert re.search(SAYS[name], said), said
    if (tmp_path / name / "test_private.py").is_file():
        assert "1 passed" in run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", name], tmp_path)


def test_every_example_is_run() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/train.py")} == set(SAYS)
