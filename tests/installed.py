"""The built wheel in an environment of its own, which does not know this repository. Imported by path; not a test."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def install_wheel(home: Path) -> Path:
    """Build the wheel, install it into a new environment in ``home``, and return that environment's interpreter.

    Everything that the wheel depends on comes from the running environment, by a ``.pth``: nothing is fetched.
    """
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
