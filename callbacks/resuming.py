"""Resume a run: its checkpoint, and the steps that are repeated."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lit_dpret.callbacks.checkpoint_files import newest_checkpoint
from lit_dpret.distributed.ranks import Ranks
from lit_dpret.errors import ConfigurationError, ResumeError, told
from lit_dpret.privacy.ledger.private_run import Position, PrivateRun
from lit_dpret.privacy.ledger.trained import TrainedIn, mark_trained


def refuse_checkpoint_of_other_run(module: Any, found: Position | None, own: Position, run_dir: Path | None) -> None:
    """Refuse another run's checkpoint under a claim; mark the module, which already has its weights."""
    if found is not None and found.run_id == own.run_id:
        return
    mark_trained(module, [TrainedIn("another checkpoint", "unknown")], whole=True)
    whose = "no run that was counted" if found is None else f"run {found.run_id}"
    raise ResumeError(
        f"The checkpoint belongs to {whose}, and the ledger in {run_dir} to run {own.run_id}: no card would count the "
        "training of its weights. Continue from a checkpoint of this run folder, start from the other run by "
        "init_from, or omit trainer.fit(ckpt_path=). The module now holds those weights: build a new one.",
        trap="T30",
    )


def refuse_other_positions(
    trainer: L.Trainer, restored: Position | None, run: PrivateRun | None, run_dir: Path | None, ranks: Ranks
) -> None:
    """Refuse ranks with different checkpoints, and a restart while a checkpoint of a run with releases is left."""
    for rank, position in enumerate(positions := ranks.gather(restored)):
        if position != positions[0]:
            raise ResumeError(
                f"Rank {rank} resumed from a different checkpoint than rank 0: all must read the same file. Put the "
                "run folder on a path shared by all machines of the job."
            )
    begun = ranks.share(lambda: run is not None and bool(run.intents))
    if restored is not None or not begun:
        return
    if trainer.global_step > 0:
        raise ResumeError("The checkpoint holds no accountant state, but the ledger holds releases.")
    if (own := ranks.share(lambda: None if run is None else _own_checkpoint(trainer, run, run_dir))) is not None:
        raise ResumeError(
            f"The ledger in {run_dir} holds releases, and no checkpoint was given to trainer.fit: all steps would be "
            f"repeated and charged again. Give trainer.fit(ckpt_path={own!r}) beside resume=true."
        )


def _own_checkpoint(trainer: Any, run: PrivateRun, run_dir: Path | None) -> str | None:
    """Return a checkpoint of this run that lies where its callbacks, or Lightning, put them."""
    kept = {Path(callback.dirpath) for callback in trainer.checkpoint_callbacks if callback.dirpath}
    root = Path(run_dir or ".")  # no deeper: it may be a project, with other runs below it
    for folder in sorted(kept | {root, *root.glob("*/"), *root.glob("lightning_logs/*/checkpoints")}):
        if (found := newest_checkpoint(folder, run_id=run.run_id, quiet=True)) is not None:
            return str(found)
    return None


def tell_repeated(run: PrivateRun, first: int, planned: int) -> None:
    """Report which steps, from ``first`` to ``planned``, a resume repeats, and whether they are charged again."""
    begun = run.intents
    free = (run.attempt, first) in begun  # as far as this attempt came; another had other keys
    last = max((step for attempt, step in begun if not free or attempt == run.attempt), default=-1) + 1
    last = min(last, planned)
    if last > first:
        how = "with the same noise, at no further cost" if free else "with fresh noise, and are charged again"
        sys.stderr.write(told(f"resume=true goes on after step {first}: steps {first + 1}-{last} are repeated {how}\n"))


def refuse_short_schedules(trainer: L.Trainer, planned: int) -> None:
    """Refuse a schedule of a fixed length, such as OneCycleLR, that raises an error before the last planned step."""
    for config in trainer.lr_scheduler_configs:
        length = getattr(config.scheduler, "total_steps", None)
        if isinstance(length, int) and config.interval == "step" and planned // config.frequency > length:
            raise ConfigurationError(
                f"{type(config.scheduler).__name__}(total_steps={length}) of configure_optimizers ends before the "
                f"{planned} planned steps, and would end the run there with an error. Give it total_steps={planned}, "
                "or lower trainer.max_steps."
            )


def optimizer_settings(trainer: L.Trainer) -> list[dict[str, float]]:
    """Return the numbers of each group of parameters: under a schedule, the rate at which it began."""
    found = []
    for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
        numbers = {name: float(value) for name, value in group.items() if isinstance(value, (int, float))}
        numbers["lr"] = numbers.pop("initial_lr", numbers.get("lr", math.nan))
        found.append(numbers)
    return found


def tell_restored_settings(configured: list[dict[str, float]], restored: list[dict[str, float]]) -> None:
    """Say what ``configure_optimizers`` sets otherwise than the checkpoint, whose numbers are used."""
    for own, used in zip(configured, restored, strict=False):
        for name in own.keys() & used.keys():
            if own[name] == own[name] and not math.isclose(own[name], used[name], rel_tol=1e-6):
                rank_zero_warn(
                    f"configure_optimizers sets {name}={own[name]:g}, and the run goes on with {used[name]:g}, that of "
                    "its checkpoint. To train with another one, begin another run."
                )
                return
