"""Which row of the table of strategies a Trainer runs under."""

from __future__ import annotations

import math
import signal
import threading
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy

from lit_dpret.callbacks.xla_processes import XLAProcesses
from lit_dpret.errors import ConfigurationError
from lit_dpret.privacy.strategies import STRATEGIES, strategy

# Exact classes: a subclass may reduce, noise or wrap in a way that nobody looked at.
_ROWS = {
    "SingleDeviceStrategy": "one_device",
    "ModelParallelStrategy": "fsdp",
    "DeepSpeedStrategy": "deepspeed",
    "SingleDeviceXLAStrategy": "xla",
    "XLAStrategy": "xla_fork",
}


def ddp_strategy(
    *, timeout_minutes: float = 5.0, process_group_backend: str | None = None, **settings: Any
) -> DDPStrategy:
    """Lightning's DDP, with a timeout that a configuration can say.

    Args:
        timeout_minutes: How long ranks wait for one that is stuck. It must cover what one of them does while the others
            wait: reading its data, writing a checkpoint.
        process_group_backend: ``gloo`` or ``nccl``; null for the device's own.
        settings: Of ``DistributedDataParallel``.

    Raises:
        ConfigurationError: The timeout is no positive number.
    """
    if not (math.isfinite(timeout_minutes) and timeout_minutes > 0):
        raise ConfigurationError(f"trainer.strategy.timeout_minutes={timeout_minutes} is not a positive number.")
    timeout = timedelta(minutes=timeout_minutes)
    return DDPStrategy(timeout=timeout, process_group_backend=process_group_backend, **settings)


def strategy_name(trainer: L.Trainer) -> str:
    """The name of the Trainer's row in `lit_dpret.privacy.strategies`."""
    found: Any = trainer.strategy
    name = type(found).__name__
    if type(found) is XLAProcesses:
        return "xla_processes"
    if not type(found).__module__.startswith(("lightning.pytorch.", "pytorch_lightning.")):
        return "custom"
    if name == "DDPStrategy":
        start = getattr(found, "_start_method", "popen")
        return {"popen": "ddp", "spawn": "ddp_spawn"}.get(start, "ddp_fork")
    return _ROWS.get(name, "custom")


def refuse_unsupported(trainer: L.Trainer, mode: Any) -> None:
    """Refuse a strategy under which the privacy mode's claim would be false, or is not shown to be true.

    Raises:
        ConfigurationError: With the reason of the table.
    """
    row = strategy(strategy_name(trainer))
    name = str(getattr(mode, "name", "none"))
    reason = row.reason_against(name, getattr(mode, "engine", None))
    if reason is None:
        return
    others = [r.name for r in STRATEGIES if r.reason_against(name, getattr(mode, "engine", None)) is None]
    raise ConfigurationError(
        f"trainer.strategy={row.name} ({type(trainer.strategy).__name__}) cannot honour privacy={name}: {reason}. "
        f"Choose one of {', '.join(others)} (docs/several_processes.md).",
        trap="T3",
    )


def keep_the_sampler(trainer: L.Trainer) -> None:
    """Tell a Trainer that its training batches are dealt to the ranks already.

    Without this, ``Trainer(strategy="ddp")`` as people write it would try to put a `DistributedSampler` in their place,
    and fail. What the loader really draws by is checked when training starts.
    """
    connector: Any = getattr(trainer, "_accelerator_connector", None)
    if hasattr(connector, "use_distributed_sampler"):
        connector.use_distributed_sampler = False


def note_sigterm_quietly(trainer: L.Trainer) -> None:
    """On several ranks, have a SIGTERM noted and passed on, and nothing sent from within its handler.

    Lightning's handler broadcasts. A rank that is interrupted there waits for one that waits for its sum, and the job
    ends by a timeout instead of after the step.
    """
    connector: Any = getattr(trainer, "_signal_connector", None)
    if trainer.world_size == 1 or connector is None or threading.current_thread() is not threading.main_thread():
        return

    def note(signum: int, frame: Any) -> None:
        launcher: Any = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True

    signal.signal(signal.SIGTERM, note)
