"""A stranger's machine: the wheel in a clean environment, outside the repository, from a list of choices to a card."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from installed import ROOT, install_wheel, run
from page_stages import private_log

import lit_dpret

pytestmark = pytest.mark.slow
FIT = [
    *("fit", "model=generator", "privacy.eps=3", "datamodule=pairs", "datamodule.pairs=log.jsonl"),
    *("datamodule.expected_batch_size=8", "datamodule.sampling=poisson", "trainer.max_steps=2"),
    "hydra.run.dir=runs/generator",
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(tmp_path_factory.mktemp("installed"))


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
