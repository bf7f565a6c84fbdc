"""Checkpoint files: written atomically, found again, and checked against the ledger when a run is resumed.

Lightning moves a checkpoint from the machine's temporary folder. Between two file systems this is a copy, which a kill
can leave half done. An unreadable checkpoint costs no more than the steps since the one before it: the ledger knows
which steps were released, and charges those that are repeated.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, ResumeError, told
from lit_dpret.privacy.ledger.chain import storage_error, sync_folder
from lit_dpret.privacy.ledger.private_run import Position, PrivateRun
from lit_dpret.privacy.ledger.trained import TrainedIn, mark_trained

#: The name of a file while it is being written.
DRAFT = ".{}.tmp"


class WholeCheckpoints(TorchCheckpointIO):
    """Write checkpoints so that, under their names, a kill at any moment leaves the old file, the new one, or none.

    When ``save_checkpoint`` returns, the file and its name are on disk. A path with a scheme is left to Lightning.
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
    """Return the readable checkpoint in ``folder`` with the latest attempt and step; None without one.

    A checkpoint that is damaged, or of another run than ``run_id``, is skipped, with a warning unless ``quiet``.
    Attempt and step are read from the file; its name and time are ignored, except that ``last.ckpt`` wins a tie.
    Checkpoints that Lightning writes next to the folder when SLURM requeues a job are included.
    """
    pass_over = (lambda path, why: None) if quiet else _pass_over
    ranked: list[tuple[tuple[int, int, bool], Path]] = []
    for path in sorted([*folder.glob("*.ckpt"), *folder.parent.glob("hpc_ckpt_*.ckpt")]):
        try:
            found = _position(path)
            if run_id is not None and found.run_id != run_id:
                pass_over(path, f"it belongs to {found.run_id or 'a run without a ledger'}, the ledger to {run_id}")
                continue
            ranked.append(((found.attempt, found.steps_done, path.name == "last.ckpt"), path))
        except ResumeError:  # intact, but of a newer version
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


def refuse_checkpoint_of_other_run(module: Any, found: Position | None, own: Position, run_dir: Path | None) -> None:
    """Refuse another run's checkpoint under a claim; mark the module, which already has its weights."""
    if found is not None and found.run_id == own.run_id:
        return
    mark_trained(module, [TrainedIn("another checkpoint", "unknown")], whole=True)
    whose = "no run that was counted" if found is None else f"run {found.run_id}"
    raise ResumeError(
        f"The checkpoint belongs to {whose}, and the ledger in {run_dir} to run {own.run_id}. Build a new module, and "
        "continue from a checkpoint of this run folder, start from the other run by init_from, or omit ckpt_path.",
        trap="T30",
    )


def refuse_other_positions(
    trainer: L.Trainer, restored: Position | None, run: PrivateRun | None, run_dir: Path | None, ranks: Ranks
) -> None:
    """Refuse ranks with different checkpoints, and a restart of a run with releases that still has a checkpoint."""
    for rank, position in enumerate(positions := ranks.gather(restored)):
        if position != positions[0]:
            raise ResumeError(
                f"Rank {rank} resumed from a different checkpoint than rank 0. Put the run folder on a path shared by "
                "all machines of the job."
            )
    begun = ranks.share(lambda: run is not None and bool(run.intents))
    if restored is not None or not begun:
        return
    if trainer.global_step > 0:
        raise ResumeError(
            "The ledger holds releases, and the Trainer begins after step 0 without the accountant's state. Use a new "
            "Trainer, and pass its fit a checkpoint of this run (ckpt_path)."
        )
    if (own := ranks.share(lambda: None if run is None else _own_checkpoint(trainer, run, run_dir))) is not None:
        raise ResumeError(
            f"The ledger in {run_dir} holds releases, which would be repeated and charged again. In "
            f"addition to resume=true, pass trainer.fit(ckpt_path={own!r})."
        )


def _own_checkpoint(trainer: Any, run: PrivateRun, run_dir: Path | None) -> str | None:
    """Return a checkpoint of this run from the folders where its callbacks, or Lightning, write them."""
    kept = {Path(callback.dirpath) for callback in trainer.checkpoint_callbacks if callback.dirpath}
    root = Path(run_dir or ".")  # not searched deeper: it may be a project with other runs below it
    for folder in sorted(kept | {root, *root.glob("*/"), *root.glob("lightning_logs/*/checkpoints")}):
        if (found := newest_checkpoint(folder, run_id=run.run_id, quiet=True)) is not None:
            return str(found)
    return None


def tell_repeated(run: PrivateRun, first: int, planned: int) -> None:
    """Report which steps, from ``first`` to ``planned``, a resume repeats, and whether they are charged again."""
    begun = run.intents
    free = (run.attempt, first) in begun  # up to where this attempt came; other attempts had other keys
    last = max((step for attempt, step in begun if not free or attempt == run.attempt), default=-1) + 1
    last = min(last, planned)
    if last > first:
        how = "with the same noise, at no further cost" if free else "with fresh noise, and are charged again"
        sys.stderr.write(told(f"resume=true continues after step {first}: it repeats steps {first + 1}-{last} {how}\n"))


def refuse_short_schedules(trainer: L.Trainer, planned: int) -> None:
    """Refuse a schedule of fixed length, such as OneCycleLR, that raises an error before the last planned step."""
    for config in trainer.lr_scheduler_configs:
        length = getattr(config.scheduler, "total_steps", None)
        if isinstance(length, int) and config.interval == "step" and planned // config.frequency > length:
            raise ConfigurationError(
                f"{type(config.scheduler).__name__}(total_steps={length}) of configure_optimizers ends before the "
                f"{planned} planned steps, and would end the run there with an error. Give it total_steps={planned}, "
                "or lower trainer.max_steps."
            )


def optimizer_settings(trainer: L.Trainer) -> list[dict[str, float]]:
    """Return the numbers of each parameter group; under a schedule, the initial learning rate."""
    found = []
    for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
        numbers = {name: float(value) for name, value in group.items() if isinstance(value, (int, float))}
        numbers["lr"] = numbers.pop("initial_lr", numbers.get("lr", math.nan))
        found.append(numbers)
    return found


def tell_restored_settings(configured: list[dict[str, float]], restored: list[dict[str, float]]) -> None:
    """Warn if ``configure_optimizers`` sets other numbers than the checkpoint, whose numbers are used."""
    for own, used in zip(configured, restored, strict=False):
        for name in own.keys() & used.keys():
            if own[name] == own[name] and not math.isclose(own[name], used[name], rel_tol=1e-6):
                rank_zero_warn(
                    f"configure_optimizers sets {name}={own[name]:g}, but the run continues with {used[name]:g}, the "
                    "value in its checkpoint. To train with another value, start a new run."
                )
                return
