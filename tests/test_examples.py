"""Foreign projects run on the built wheel, in an environment of their own that does not know this repository."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from installed import ROOT, install_wheel, run

EXAMPLES = ROOT / "examples"
# What the last line has to say.
SAYS = {
    "intent_classifier": r"epsilon (2\.9\d\d|3\.000) at delta 8\.3e-04, accuracy (0\.[5-9]\d|1\.00)",
    "own_loop": r"epsilon (2\.9\d\d|3\.000) at delta 5\.0e-04 in 100 steps",
    "frozen_retriever": r"nDCG@10 (0\.[5-9]|1\.0)\d\d .* \+0\.\d+, p = 0\.000\d",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(tmp_path_factory.mktemp("foreign"))


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
