"""Watch the processes that the command line starts for one job: if one fails, all end soon, with a message.

Lightning starts the ranks of a machine by repeating the command. A rank that dies ends the others too, but Lightning's
message is for developers, and a child that is still starting does not learn that its parent is gone. Under torchrun and
SLURM, those tools watch the ranks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import sys
import threading
import time
from contextlib import suppress

#: The environment variable that names, for ranks, the process that started them.
LAUNCHER = "LIT_DPRET_LAUNCHER"
#: The variables that Lightning's launcher leaves in the environment of the first process.
_LEFT_BEHIND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
_LIGHTNINGS_WATCH = "lightning.fabric.strategies.launchers.subprocess_script"
_HOW_TO_GO_ON = (
    "The ledger holds every granted step. To continue from the last checkpoint, run the command again with resume=true "
    "and hydra.run.dir=RUN, the folder of this run."
)


def begin() -> None:
    """Join the watch, as the launcher or as one of its processes."""
    if is_started_by_launcher():
        threading.Thread(target=_watch_launcher, daemon=True).start()
        return
    os.environ[LAUNCHER] = str(os.getpid())
    log = logging.getLogger(_LIGHTNINGS_WATCH)
    if not any(isinstance(handler, _LostRank) for handler in log.handlers):
        log.addHandler(_LostRank())
    log.setLevel(logging.INFO)
    log.propagate = False


def is_started_by_launcher() -> bool:
    """Return whether Lightning started this process as an additional rank of our command."""
    by_others = "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ
    return LAUNCHER in os.environ and os.environ.get("LOCAL_RANK", "0") != "0" and not by_others


def _launcher_lives() -> bool:
    """Return whether the launcher lives; it may be gone before this process has started."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def world_size() -> int:
    """Return the number of processes that torchrun, SLURM or a user started for this command; otherwise 1."""
    for name, rank in (("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("WORLD_SIZE", "LOCAL_RANK")):
        if rank in os.environ and os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


def is_first() -> bool:
    """Return whether this is the first process started for this command."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))


def new_name() -> str:
    """Return a random word for the run folder's name, equal on all processes of one launcher."""
    if world_size() == 1:
        return secrets.token_hex(4)
    job = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_PORT")]
    return hashlib.sha256(f"{job} {'' if job[1] else os.getppid()}".encode()).hexdigest()[:8]


def wait_for_launcher(*, at_most: float = 30.0) -> None:
    """Wait until the first process has finished its output; it is killed as soon as this process ends."""
    if not is_started_by_launcher():
        return
    end = time.monotonic() + at_most
    while _launcher_lives() and time.monotonic() < end:
        time.sleep(0.05)


def leave(before: dict[str, str]) -> None:
    """Remove the traces of a finished job, so that the next starts its own ranks; ``before`` is the old environment."""
    dist = sys.modules.get("torch.distributed")  # a job that never loaded it had no ranks
    if "LOCAL_RANK" in before or dist is None or not dist.is_available():
        return
    with suppress(RuntimeError, ValueError):
        if dist.is_initialized():
            dist.destroy_process_group()
    for name in _LEFT_BEHIND:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


class _LostRank(logging.Handler):
    """Explains, in the words of the command line, that Lightning's watch kills this process next."""

    def emit(self, record: logging.LogRecord) -> None:
        lost = " ".join(record.getMessage().split("Forcefully")[0].split())
        sys.stderr.write(f"error: another process of this job ended: {lost} This one ends too. {_HOW_TO_GO_ON}\n")
        sys.stderr.flush()


def _watch_launcher() -> None:
    """End this process soon after the one that started it; the main thread gets time to give a better message."""
    while _launcher_lives():
        time.sleep(0.5)
    time.sleep(5.0)
    sys.stderr.write(f"error: the first process of this job ended, so this one ends too. {_HOW_TO_GO_ON}\n")
    sys.stderr.flush()
    os._exit(2)
