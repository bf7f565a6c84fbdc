"""Trainer strategies supported for private steps, and the refusal of all others.

DeepSpeed takes a nested dict with some two hundred keys, many of which change what a gradient is: they compress it,
clip it, skip it or build another optimizer. The keys allowed are listed here; every other key is refused.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_dpret.distributed.strategies import STRATEGIES, strategy
from lit_dpret.errors import ConfigurationError
from lit_dpret.settings import require_number

# Exact classes, by name, so that none is imported: a subclass may reduce, noise or wrap in its own way.
_OURS = {
    "lit_dpret.distributed.fsdp.ShardingStrategy": "fsdp",
    "lit_dpret.distributed.zero.ZeroStrategy": "deepspeed",
    "lit_dpret.distributed.xla_processes.XLAProcesses": "xla_processes",
}
_ROWS = {
    "SingleDeviceStrategy": "one_device",
    "ModelParallelStrategy": "fsdp",
    "SingleDeviceXLAStrategy": "xla",
    "XLAStrategy": "xla_fork",
}


def ddp_strategy(
    *, timeout_minutes: float = 5.0, process_group_backend: str | None = None, **settings: Any
) -> DDPStrategy:
    """Build Lightning's DDP, with a timeout that a configuration can set.

    Args:
        timeout_minutes: How long ranks wait for one that is stuck. It must cover what one rank does while the others
            wait, such as reading its data or writing a checkpoint.
        process_group_backend: ``gloo`` or ``nccl``; null for the device's default.
        settings: Arguments of ``DistributedDataParallel``.
    """
    require_number("trainer.strategy", {"timeout_minutes": timeout_minutes})
    timeout = timedelta(minutes=timeout_minutes)
    return DDPStrategy(timeout=timeout, process_group_backend=process_group_backend, **settings)


def strategy_name(trainer: L.Trainer) -> str:
    """Return the name of the Trainer's row in `lit_dpret.distributed.strategies`."""
    found: Any = trainer.strategy
    name = type(found).__name__
    if (ours := _OURS.get(f"{type(found).__module__}.{name}")) is not None:
        return ours
    if name == "DeepSpeedStrategy":
        return "plain_deepspeed"
    if not type(found).__module__.startswith(("lightning.pytorch.", "pytorch_lightning.")):
        return "custom"
    if name == "DDPStrategy":
        start = getattr(found, "_start_method", "popen")
        return {"popen": "ddp", "spawn": "ddp_spawn"}.get(start, "ddp_fork")
    return _ROWS.get(name, "custom")


def refuse_unsupported(trainer: L.Trainer, mode: Any) -> None:
    """Refuse a strategy under which the privacy mode's claim is false or unproven."""
    row = strategy(strategy_name(trainer))
    engine = getattr(mode, "engine", None)
    reason = row.reason_against(mode, engine)
    if row.name.startswith("xla") and getattr(mode, "noise", "gaussian") == "discrete":
        raise ConfigurationError(
            f"privacy.noise=discrete is not tested under trainer.strategy={row.name}. Set privacy.noise=gaussian, or "
            "train on a CPU or a GPU.",
            trap="T23",
        )
    if reason is None:
        if row.name == "fsdp":
            _refuse_other_cuts(trainer.strategy)
        return
    others = [r.name for r in STRATEGIES if r.reason_against(mode, engine) is None]
    raise ConfigurationError(
        f"trainer.strategy={row.name} ({type(trainer.strategy).__name__}) cannot honour privacy={mode.name}: {reason}. "
        f"Choose one of {', '.join(others)} (docs/several_processes.md).",
        trap="T3",
    )


def _refuse_other_cuts(strategy: Any) -> None:
    """Refuse a layout of `ModelParallelStrategy` that is not known to keep the claim and the run intact."""
    tensor = getattr(strategy, "_tensor_parallel_size", "auto")
    devices, nodes = strategy.num_processes, strategy.num_nodes
    tensor = devices if tensor == "auto" else tensor
    if tensor != 1:
        raise ConfigurationError(
            f"trainer.strategy.tensor_parallel_size={tensor}: no rank could compute a unit's norm. Set it to 1 and "
            f"data_parallel_size={devices * nodes}, or choose trainer=fsdp."
        )
    if getattr(strategy, "_save_distributed_checkpoint", False):
        raise ConfigurationError(
            "trainer.strategy.save_distributed_checkpoint=true writes a folder file by file, which a kill leaves "
            "incomplete unseen. Set it to false, or choose trainer=fsdp."
        )


def refuse_parted_sums(trainer: L.Trainer, module: Any) -> None:
    """Refuse several processes for a module that does not declare that it reduces its sums.

    Otherwise each process would add the noise that all share to its own sum: the difference of two of their updates
    would be a difference of clipped gradients without any noise.
    """
    if trainer.world_size > 1 and getattr(module, "adds_up_over_ranks", False) is not True:
        raise ConfigurationError(
            f"{type(module).__name__} has a custom training step and does not set adds_up_over_ranks = True, so each "
            f"of the {trainer.world_size} processes would add the same noise to its own sum. Reduce sums and counts "
            "before calling the guard (lit_dpret.distributed.ranks.Ranks.sum_) and say so, derive from PrivateModule, "
            "or set trainer.devices=1.",
            trap="T3",
        )


def refuse_uncut_optimizer(trainer: L.Trainer, module: Any) -> None:
    """Refuse an optimizer that needs more of a parameter than the part that a rank holds."""
    spec = getattr(module, "optimizer_spec", None)  # a custom module has none
    if strategy_name(trainer) in ("fsdp", "deepspeed") and getattr(spec, "name", None) == "adafactor":
        raise ConfigurationError(
            "model.optimizer.name=adafactor averages over whole rows and columns of a parameter, and under "
            f"trainer={strategy_name(trainer)} a rank holds a part of it. Choose adam, adamw, adam_bc or sgd."
        )


def refuse_own_optimizers(trainer: L.Trainer, module: Any) -> None:
    """Refuse the result of ``configure_optimizers`` if a private run does not support it."""
    who, found = f"{type(module).__name__}.configure_optimizers", trainer.optimizers
    if len(found) != 1 or isinstance(found[0], _MockOptimizer):
        count = sum(not isinstance(optimizer, _MockOptimizer) for optimizer in found)
        raise ConfigurationError(f"{who} returned {count} optimizers: a noised step is made by one, so return one.")
    if isinstance(found[0], torch.optim.LBFGS):
        raise ConfigurationError(
            f"{who} returned LBFGS, which asks for the loss several times in a step. Return an optimizer "
            "that uses one gradient."
        )
    if isinstance(found[0], torch.optim.SparseAdam):
        raise ConfigurationError(f"{who} returned SparseAdam, and a noised gradient is dense. Return Adam.")
    if any(isinstance(config.scheduler, ReduceLROnPlateau) for config in trainer.lr_scheduler_configs):
        raise ConfigurationError(
            f"{who} returned ReduceLROnPlateau, which sets the learning rate by a metric: an uncounted release of "
            "private rows. Return a schedule that depends on steps only.",
            trap="T25",
        )


def refuse_second_masters(trainer: L.Trainer) -> None:
    """Refuse half precision with float32 optimizer copies if the strategy keeps such copies itself."""
    name = strategy_name(trainer)
    if name in ("fsdp", "deepspeed") and str(trainer.precision) == "bf16-true":
        copies = "its shards are float32" if name == "fsdp" else "ZeRO divides them"
        raise ConfigurationError(
            f"trainer.precision=bf16-true keeps float32 copies of weights in the optimizer, and trainer={name} keeps "
            f"such copies itself ({copies}). Set trainer.precision=bf16-mixed."
        )


def keep_the_sampler(trainer: L.Trainer) -> None:
    """Keep the Trainer from inserting a `DistributedSampler`: its batches are distributed already."""
    connector: Any = getattr(trainer, "_accelerator_connector", None)
    if hasattr(connector, "use_distributed_sampler"):
        connector.use_distributed_sampler = False


def note_sigterm_quietly(trainer: L.Trainer) -> None:
    """On several ranks, record a SIGTERM and pass it on, without communication in its handler.

    Lightning's handler broadcasts. A rank interrupted there would wait for a rank that waits for its sum, and the job
    would end by a timeout instead of after the step.
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


def refuse_zero_settings(strategy: Any) -> None:
    """Refuse a `DeepSpeedStrategy` that would do more than hold, exchange and update shards."""
    config: Mapping[str, Any] = strategy.config or {}
    stage = (config.get("zero_optimization") or {}).get("stage")
    if stage not in (1, 2, 3):
        raise ConfigurationError(
            f"DeepSpeed with zero_optimization.stage={stage} divides nothing over the ranks. Choose trainer=ddp, or "
            "trainer.strategy.stage=1, 2 or 3."
        )
    for why, keys in _REASONS:
        for key, trap in keys.items():
            if (value := _at(config, key)) is not None and not _is_off(value):
                raise ConfigurationError(f"DeepSpeed's {key}={_short(value)}: {why}. Leave it out.", trap=trap)
    _refuse_unknown(config, "", _ALLOWED)
    _refuse_unknown(config.get("zero_optimization") or {}, "zero_optimization.", _ALLOWED_ZERO)
    for part in ("offload_optimizer", "offload_param"):
        device = _at(config, f"zero_optimization.{part}.device")
        if device not in (None, "none", "cpu"):
            raise ConfigurationError(
                f"DeepSpeed's zero_optimization.{part}.device={device}: private steps are tested with cpu alone."
            )
        _refuse_unknown(_at(config, f"zero_optimization.{part}") or {}, f"zero_optimization.{part}.", _ALLOWED_OFFLOAD)


#: Groups of refused settings: the reason, and the trap of each setting.
_REASONS: tuple[tuple[str, dict[str, str | None]], ...] = (
    ("it scales down the sum, which bounds no unit; set privacy.max_grad_norm", {"gradient_clipping": "T16"}),
    (
        "loss scaling skips steps that were paid for; set trainer.precision=bf16-mixed or 32-true",
        {"fp16.enabled": "T7", "amp.enabled": "T7"},
    ),
    (
        "it would step in the middle of a logical batch; set datamodule.physical_batch_size",
        {"gradient_accumulation_steps": "T12"},
    ),
    ("the optimizer and its schedule are the module's (model.optimizer)", {"optimizer": None, "scheduler": None}),
    ("noise is dense: it covers every coordinate, touched or not", {"sparse_gradients": "T24"}),
    (
        "sums and master weights are kept in float32, and the optimizers that this selects are not tested",
        {
            "data_types.grad_accum_dtype": "T8",
            "bf16.bf16_master_weights_and_grads": None,
            "bf16.immediate_grad_update": None,
        },
    ),
    (
        "it rounds what is sent to fewer bits, so the update is not that of one process",
        {
            "zero_optimization.zero_quantized_gradients": None,
            "zero_optimization.zero_quantized_weights": None,
            "zero_optimization.zero_quantized_nontrainable_weights": None,
        },
    ),
    ("master weights are located by DeepSpeed's default layout", {"zero_optimization.round_robin_gradients": None}),
)

# Keys that make no difference to an update, and sections whose refused keys are listed above.
_ALLOWED = {
    "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization", "bf16", "activation_checkpointing", "aio", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "communication_data_type", "fp16", "amp",
    "data_types", "checkpoint",
}  # fmt: skip
_ALLOWED_ZERO = {
    "stage", "contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "offload_optimizer", "offload_param", "sub_group_size", "load_from_fp32_weights",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip
_ALLOWED_OFFLOAD = {
    "device", "pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init",
}  # fmt: skip


def _refuse_unknown(config: Mapping[str, Any], prefix: str, allowed: set[str]) -> None:
    unknown = sorted(key for key, value in config.items() if key not in allowed and not _is_off(value))
    if unknown:
        raise ConfigurationError(
            f"DeepSpeed's {prefix}{unknown[0]}={_short(config[unknown[0]])}: its effect on a clipped and noised "
            "gradient is unknown. Leave it out."
        )


def _at(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def _is_off(value: Any) -> bool:
    """Return whether a setting is off: false, zero, empty, or a section whose ``enabled`` is false."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return not value


def _short(value: Any) -> str:
    return "{...}" if isinstance(value, Mapping) else str(value)
