"""The software and hardware that an artefact was computed with, as far as the program knows it."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lit_dpret

if TYPE_CHECKING:
    import torch

CHANGED = "+changes"
"""What stands after the commit of a checkout whose files differ from it."""

_PACKAGES = ("torch", "lightning", "transformers", "dp-accounting", "opacus", "numpy")


def version_of(package: str) -> str:
    """The installed version of a package, or ``unknown``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def package_versions() -> dict[str, str]:
    """The software that a claim depends on."""
    versions = {name: version_of(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "lit-dpret": lit_dpret.__version__, **versions}


def environment_facts(*, device: torch.device | str | None = None, precision: str | None = None) -> dict[str, Any]:
    """What a card says of the machine: kinds, never names of hosts or users.

    Args:
        device: Where it was computed; None where that is not known.
        precision: In which numbers, as Lightning writes it.
    """
    return {"code_commit": code_commit(), "hardware": None if device is None else _hardware(str(device)),
            "precision": precision}  # fmt: skip


@cache
def code_commit() -> str | None:
    """The git commit of this package's own checkout, ``+changes`` where files differ from it; None elsewhere.

    Guarantees:
        - An installed package is not taken for a part of the repository that its environment happens to lie in.
    """
    package = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "--error-unmatch", "__init__.py"):
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}{CHANGED}" if commit and git("status", "--porcelain", "--untracked-files=no") else commit


def _hardware(device: str) -> str:
    kind = device.partition(":")[0]
    if kind == "cuda":
        import torch  # who reads a card of another machine needs none

        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else kind
    return f"{kind} ({platform.machine()})" if kind == "cpu" else kind
