"""Write ``constraints.txt``: the versions that the tests of this environment ran with, one pin per line.

    python scripts/write_constraints.py

It pins the dependencies of this project and of the extras below, and their dependencies in turn. The other extras are
not in the test environment (``faiss-gpu`` excludes ``faiss-cpu``, ``tpu`` excludes this torch), so no version of them
was tested. To use it, run ``pip install -c constraints.txt "lit-dpret[quickstart]"``.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("quickstart", "hf", "parquet", "plot", "peft", "wandb", "faiss-cpu", "sign", "federated", "vision", "quality",
          "docs", "dev")  # fmt: skip
HEAD = """\
# What the tests ran with: python scripts/write_constraints.py writes this file, nobody edits it.
# pip install -c constraints.txt "lit-dpret[quickstart]"
"""


def requirements(extras: Iterable[str]) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    return [Requirement(line) for line in lines]


def pins(wanted: Iterable[Requirement]) -> dict[str, str]:
    """Return the installed public version (without a build) of every package that ``wanted`` requires, by name.

    Raises:
        SystemExit: A required package is not installed.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(one, extra) for one in wanted for extra in ("", *one.extras) if _applies(one, "")]
    while waiting:
        one, extra = waiting.pop()
        name = canonicalize_name(one.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            sys.exit(f"{name} is not installed. pip install -e '.[{','.join(EXTRAS)}]' first.")
        found[name] = Version(installed.version).public
        for line in installed.requires or ():
            next_one = Requirement(line)
            if _applies(next_one, extra):
                waiting += [(next_one, deeper) for deeper in ("", *next_one.extras)]
    return found


def _applies(one: Requirement, extra: str) -> bool:
    return one.marker is None or one.marker.evaluate({"extra": extra})


def main() -> None:
    lines = sorted(f"{name}=={version}\n" for name, version in pins(requirements(EXTRAS)).items())
    (ROOT / "constraints.txt").write_text(HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
