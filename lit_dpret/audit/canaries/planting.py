"""Putting canaries into a DataModule: every copy becomes a private unit like all others."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Protocol

from lit_dpret.audit.canaries.canary import (
    CANARIES,
    CanarySet,
    check_all_fit,
    read_canaries,
    set_sha256,
    write_canaries,
)
from lit_dpret.audit.canaries.suite import CanarySuite, Sources
from lit_dpret.datamodules.unit_dataset import Planted
from lit_dpret.errors import ConfigurationError, ResumeError


class Plantable(Sources, Protocol):
    """A DataModule that takes units beside its own."""

    def plant(self, planted: Planted) -> None: ...


def plant(data: Plantable, canaries: CanarySet) -> None:
    """Plant canaries in a DataModule, after ``setup`` and before ``fit``.

    Guarantees:
        - Each copy is one unit, without rows where its coin left it out: it is drawn by the run's law, counted in n
          and clipped like every unit, so the claim of the run holds for everybody else's units as it does for these.
        - The keyed fingerprint of the data covers them: a resume with others is refused.
        - No evaluation split and no list of passages holds them.

    Raises:
        ConfigurationError: The DataModule cannot take them; the message says why.
    """
    if not hasattr(data, "plant") or not hasattr(data, "public_passages"):
        raise _no_pairs(data)
    data.plant(Planted(canaries.units(), planted_facts(canaries)))


def plant_blanks(data: Any, units: int) -> None:
    """Plant units without rows, so that a run is planned with canaries that are not made yet.

    Raises:
        ConfigurationError: The DataModule cannot take them; the message says why.
    """
    if not hasattr(data, "plant"):
        raise _no_pairs(data)
    data.plant(Planted([()] * units, {"units": units}))


def planted_facts(canaries: CanarySet) -> dict[str, Any]:
    """Return what ledger and card say of a set: canaries, units, and the hash that fixes them."""
    return {
        "canaries": len(canaries.canaries),
        "units": len(canaries.units()),
        "sha256": set_sha256(canaries),
    }


def plant_in_run(
    data: Plantable, suite: CanarySuite, run_dir: Path, *, resume: bool, reader: object = None
) -> CanarySet:
    """Make the canaries of a run, write them beside it and plant them; a resume takes those of the file.

    Args:
        data: Takes them.
        suite: Makes them.
        run_dir: Where ``canaries.json`` lies.
        resume: Whether the run may have begun.
        reader: The module that will be trained on them; it must read every secret to its end.

    Raises:
        ResumeError: There are canaries and ``resume`` is false, or the run was begun with another suite.
        ConfigurationError: The DataModule cannot take them, or has too little to make them from, or ``reader`` would
            cut a secret; nothing is written then.
    """
    if not hasattr(data, "plant") or not hasattr(data, "public_passages"):
        raise _no_pairs(data)
    path = run_dir / CANARIES
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        _wait_for(path)  # which the first process makes: without a seed each would draw secrets of its own
        canaries = read_canaries(path)
    elif path.is_file() and not resume:
        raise ResumeError(
            f"{path} holds the canaries of an earlier run, whose secrets would be lost. Say resume=true to go on with "
            "it, or choose another hydra.run.dir."
        )
    elif path.is_file():
        canaries = read_canaries(path)
        if canaries.settings != suite.settings():
            raise ResumeError(
                f"resume=true, but the canaries of {path} were made by another suite. Restore the settings of canaries."
            )
    else:
        canaries = suite.make(data, reader)
        write_canaries(canaries, run_dir)
    check_all_fit(reader, canaries.canaries)
    plant(data, canaries)
    return canaries


def _no_pairs(data: object) -> ConfigurationError:
    return ConfigurationError(
        f"{type(data).__name__} has no pairs of texts that canaries could stand beside. Set canaries to null."
    )


def _wait_for(path: Path, *, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > end:
            raise ConfigurationError(f"{path} was not written by the first process within {seconds:.0f} seconds.")
        time.sleep(0.2)
