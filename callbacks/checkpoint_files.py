"""Checkpoint files: written atomically, and the search for the newest complete one.

Lightning moves a checkpoint from the machine's temporary folder; between two file systems that is a copy, and a kill
leaves half of it. An unreadable checkpoint costs no more than the steps since the one before it: the ledger knows
which steps were released, and charges those that are repeated.
"""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_dpret.errors import ResumeError
from lit_dpret.privacy.ledger.chain import storage_error, sync_folder
from lit_dpret.privacy.ledger.private_run import Position

#: The name of a file while it is written.
DRAFT = ".{}.tmp"


class WholeCheckpoints(TorchCheckpointIO):
    """Write checkpoints so that a kill at any moment leaves under a name the old file, the new one, or none.

    When ``save_checkpoint`` returns, the file and its name are on the disk. A path with a scheme is left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, str(path), storage_options)
            return
        target = Path(path)
        draft = target.with_name(DRAFT.format(target.name))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
            sync_folder(target.parent)
        except BaseException as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise storage_error(target, "written", error) from error
            raise


def remove_drafts(folder: Path) -> None:
    """Remove incomplete checkpoints that a kill left in ``folder``."""
    for draft in folder.glob(DRAFT.format("*.ckpt")):
        draft.unlink(missing_ok=True)


def newest_checkpoint(folder: Path, *, run_id: str | None = None, quiet: bool = False) -> Path | None:
    """Return the readable checkpoint in ``folder`` with the most steps; None without one.

    A checkpoint that is damaged, or of another run than ``run_id``, is passed over with a warning, or without one where
    ``quiet``. Attempt and step stand inside the file; its name and its time play no part. What Lightning writes where
    SLURM requeues a job lies beside the folder, and is one of them.
    """
    pass_over = (lambda path, why: None) if quiet else _pass_over
    ranked: list[tuple[tuple[int, int, bool], Path]] = []
    for path in sorted([*folder.glob("*.ckpt"), *folder.parent.glob("hpc_ckpt_*.ckpt")]):
        try:
            found = _position(path)
            if run_id is not None and found.run_id != run_id:
                pass_over(path, f"of {found.run_id or 'a run without a ledger'}, and the ledger is of {run_id}")
                continue
            ranked.append(((found.attempt, found.steps_done, path.name == "last.ckpt"), path))
        except ResumeError:  # whole, and of a newer version
            if not quiet:
                raise
        except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
            pass_over(path, error)
    for _, path in sorted(ranked, reverse=True):
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            damaged = str(error)
        if damaged is None:
            return path
        pass_over(path, damaged)
    return None


def _position(path: Path) -> Position:
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    found = Position.among(content["callbacks"], place=str(path))
    return found or Position("", 0, int(content["global_step"]))


def _pass_over(path: Path, reason: object) -> None:
    first = (str(reason).splitlines() or [type(reason).__name__])[0]
    warnings.warn(
        f"{path} is not a complete checkpoint of this run ({first}); the run continues from an earlier one, or from "
        "its start. Repeated steps are bit-identical or charged again.",
        stacklevel=3,
    )
