"""What a task is given: a run folder and the means to build the rest, without knowing Hydra."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_dpret.errors import StorageError
from lit_dpret.privacy.start import model_folder

__all__ = ["Parts", "check_run_dir", "model_folder"]


@dataclass(frozen=True)
class Parts:
    """Factories for the pieces of a run; nothing is built, read or downloaded before its call."""

    run_dir: Path
    make_privacy: Callable[..., Any]
    make_datamodule: Callable[..., Any]
    make_module: Callable[..., Any]
    make_trainer: Callable[..., Any]
    make_callbacks: Callable[[], list[Any]] = list
    make_loggers: Callable[[], list[Any]] = list
    make_canaries: Callable[[], Any] = lambda: None
    make_federation: Callable[[], Any] = lambda: None
    resume: bool = False
    seed: int = 0
    command: str = field(default="python train.py")


def check_run_dir(folder: Path, *, min_free_mb: float) -> None:
    """Refuse a run folder that cannot be written or lies on a disk that is nearly full.

    Raises:
        StorageError: Naming the folder, the reason and the knob.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test.{os.getpid()}"  # of several processes each has its own
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise StorageError(
            f"hydra.run.dir={folder} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    free = shutil.disk_usage(folder).free / 2**20
    if free < min_free_mb:
        raise StorageError(
            f"hydra.run.dir={folder} has {free:.0f} MB of free disk, less than the {min_free_mb:.0f} MB that the "
            "run may need. Free space, choose another folder, or lower task.min_free_mb."
        )
