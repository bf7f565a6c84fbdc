"""Flower is optional, and silent: what importing it says, does and leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

REPORTS = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED", "FLWR_DISABLE_UPDATE_CHECK")
HAS_FLOWER = find_spec("flwr") is not None


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A new process whose environment says nothing of reports but what is given."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in REPORTS}  # fmt: skip
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not HAS_FLOWER, reason="needs the extra federated (flwr)")
def test_flower_is_imported_with_its_reports_switched_off() -> None:
    done = python(
        "import lit_dpret.federated.flower, os; from flwr.supercore import telemetry; "
        "print(telemetry.FLWR_TELEMETRY_ENABLED, os.environ['RAY_USAGE_STATS_ENABLED']); "
        "from flwr.supercore import update_check; print(os.environ[update_check.FLWR_DISABLE_UPDATE_CHECK])"
    )
    assert done.stdout.split() == ["0", "0", "1"] and "Warning" not in done.stderr, done.stderr


@pytest.mark.skipif(not HAS_FLOWER, reason="needs the extra federated (flwr)")
def test_reports_that_were_decided_on_before_us_are_warned_of() -> None:
    done = python("from flwr.supercore import telemetry; import lit_dpret.federated.flower")
    assert "flwr was imported before lit_dpret.federated.flower" in done.stderr


def test_whoever_switched_the_reports_on_is_told_loudly() -> None:
    done = python("import lit_dpret.federated.flower", FLWR_TELEMETRY_ENABLED="1")
    assert "FLWR_TELEMETRY_ENABLED=1: Flower reports the use of this federation" in done.stderr


@pytest.mark.slow
def test_without_flower_all_else_imports_and_one_sentence_says_what_to_install() -> None:
    hidden = (
        "import sys, importlib.metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name == 'flwr': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version; sys.modules['flwr'] = None\n"
        "import lit_dpret.federated.transport, lit_dpret.federated.flower\n"
        "from lit_dpret.errors import ConfigurationError\n"
        "try:\n"
        "    import lit_dpret.federated.flower.library\n"
        "except ConfigurationError as error:\n"
        "    print(error)\n"
    )
    done = python(hidden)
    assert 'pip install "lit-dpret[federated]"' in done.stdout, done.stderr


@pytest.mark.skipif(not HAS_FLOWER, reason="needs the extra federated (flwr)")
def test_a_flower_that_moved_its_parts_is_named_with_the_versions_that_work() -> None:
    done = python(
        "import lit_dpret.federated.flower, sys; sys.modules['flwr.supercore.task_identity'] = None\n"
        "from lit_dpret.errors import ConfigurationError\n"
        "try:\n"
        "    import lit_dpret.federated.flower.library\n"
        "except ConfigurationError as error:\n"
        "    print(error)\n"
    )
    assert "lacks something that lit-dpret uses" in done.stdout and "flwr>=1.41,<1.43" in done.stdout, done.stderr
