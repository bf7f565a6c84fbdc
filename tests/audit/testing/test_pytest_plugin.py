"""The fixture ``assert_private`` is there in any test suite, and costs a suite that does not use it nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SUITE = """
import sys

import pytest


def test_nothing_heavy_was_loaded_for_a_suite_that_may_never_ask():
    assert "lit_dpret.pytest_plugin" in sys.modules
    assert not {"lit_dpret.audit.testing", "lightning", "transformers"} & set(sys.modules)


@pytest.fixture
def parts():
    import torch

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    rows = {"x": torch.randn(6, 3), "y": torch.randn(6)}
    return net, rows, lambda r: (net(r["x"]).squeeze(-1) - r["y"]) ** 2


def test_a_private_step_passes(assert_private, parts):
    net, rows, loss = parts
    assert assert_private(net, rows, 1.0, 1e-5, per_row_loss=loss, trials=60).eps == 1.0


def test_a_broken_one_fails(assert_private, parts):
    net, rows, loss = parts
    assert_private(net, rows, 1.0, 1e-5, per_row_loss=lambda r: loss(r) / loss(r).mean().detach(), trials=60)
"""


@pytest.mark.slow
def test_an_installed_suite_finds_the_fixture_and_a_broken_step_fails_in_it(tmp_path: Path) -> None:
    """Run a suite of its own with the entry point of ``pyproject.toml``, as an installation declares it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = "".join(f"{name} = {where}\n" for name, where in project["entry-points"]["pytest11"].items())
    metadata = tmp_path / "site" / "declared-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[pytest11]\n{declared}", encoding="utf-8")
    (tmp_path / "test_mine.py").write_text(SUITE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "PrivacyViolation: independence: " in done.stdout
    assert "test_mine.py:" in done.stdout and "lit_dpret/" not in done.stdout, "the reader's line, and none of ours"
