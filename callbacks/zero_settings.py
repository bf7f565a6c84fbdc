"""Settings of DeepSpeed under which a private step is shown, and the refusal of all others.

DeepSpeed is told what to do by a nested dict with some two hundred keys, many of which change what a gradient is:
they compress it, clip it, skip it or build another optimizer. So the keys that are let through are listed here, and
everything else is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_dpret.errors import ConfigurationError


def refuse_zero_settings(strategy: Any, optimizer: Any) -> None:
    """Refuse a `DeepSpeedStrategy` that would do more than hold, exchange and update shards.

    Args:
        strategy: The Trainer's.
        optimizer: The module's `OptimizerSpec`, where it has one.

    Raises:
        ConfigurationError: Naming the key, its value and what to do instead.
    """
    config: Mapping[str, Any] = strategy.config or {}
    stage = (config.get("zero_optimization") or {}).get("stage")
    if stage not in (1, 2, 3):
        raise ConfigurationError(
            f"DeepSpeed with zero_optimization.stage={stage} divides nothing over the ranks. Choose trainer=ddp, which "
            "does the same, or trainer.strategy.stage=1, 2 or 3."
        )
    for key, why in _WHY_NOT.items():
        value = _at(config, key)
        if value is not None and not _is_off(value):
            raise ConfigurationError(f"DeepSpeed's {key}={_short(value)}: {why}", trap=_TRAPS.get(key))
    _refuse_unknown(config, "", _ALLOWED)
    _refuse_unknown(config.get("zero_optimization") or {}, "zero_optimization.", _ALLOWED_ZERO)
    for part in ("offload_optimizer", "offload_param"):
        device = _at(config, f"zero_optimization.{part}.device")
        if device not in (None, "none", "cpu"):
            raise ConfigurationError(
                f"DeepSpeed's zero_optimization.{part}.device={device}: a private step is shown with cpu alone."
            )
        _refuse_unknown(_at(config, f"zero_optimization.{part}") or {}, f"zero_optimization.{part}.", _ALLOWED_OFFLOAD)
    if getattr(optimizer, "name", None) == "adafactor":
        raise ConfigurationError(
            "model.optimizer.name=adafactor averages over rows and columns, and ZeRO shows an optimizer flat parts of "
            "parameters without any: it would be another optimizer. Choose adam, adamw, adam_bc or sgd, or trainer=ddp."
        )


_CLIPS = (
    "it scales down the sum over the batch, which bounds nothing that one unit does. Set privacy.max_grad_norm, and "
    "leave it out."
)
_SKIPS = "loss scaling skips steps that were paid for. Leave it out, and set trainer.precision=bf16-mixed or 32-true."
_BUILDS = (
    "the optimizer and its schedule are the module's (model.optimizer), which knows the noise and stands in the card. "
    "Leave it out."
)
_ROUNDS = "it rounds what is sent to fewer bits, and the update of one process would not be made. Leave it out."
_SUMS = (
    "clipped sums are added up in float32 or wider before DeepSpeed sees a gradient, and the optimizers that it picks "
    "by this are not shown. Leave it out."
)
_MOVES = "master weights are looked for by DeepSpeed's plain layout. Leave it out."

_WHY_NOT: dict[str, str] = {
    "gradient_clipping": _CLIPS,
    "fp16.enabled": _SKIPS,
    "amp.enabled": _SKIPS,
    "gradient_accumulation_steps": (
        "it divides by a number of batches and would step in the middle of a logical one. A logical batch is cut to "
        "fit by datamodule.physical_batch_size. Leave it out."
    ),
    "optimizer": _BUILDS,
    "scheduler": _BUILDS,
    "sparse_gradients": "noise is dense: it covers every coordinate, touched or not. Leave it out.",
    "data_types.grad_accum_dtype": _SUMS,
    "bf16.bf16_master_weights_and_grads": "master weights and finished gradients are kept in float32. Leave it out.",
    "bf16.immediate_grad_update": _SUMS,
    "zero_optimization.zero_quantized_gradients": _ROUNDS,
    "zero_optimization.zero_quantized_weights": _ROUNDS,
    "zero_optimization.zero_quantized_nontrainable_weights": _ROUNDS,
    "zero_optimization.round_robin_gradients": _MOVES,
}
_TRAPS = {
    "gradient_clipping": "T16", "fp16.enabled": "T7", "amp.enabled": "T7", "gradient_accumulation_steps": "T12",
    "sparse_gradients": "T24", "data_types.grad_accum_dtype": "T8",
}  # fmt: skip

# Keys whose value makes no difference to an update, and those with a reason above, where they are off.
_ALLOWED = {
    "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization", "bf16", "activation_checkpointing", "aio", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "communication_data_type",
    "gradient_clipping", "fp16", "amp", "optimizer", "scheduler", "sparse_gradients", "data_types", "checkpoint",
}  # fmt: skip
_ALLOWED_ZERO = {
    "stage", "contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "offload_optimizer", "offload_param", "sub_group_size", "load_from_fp32_weights",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "round_robin_gradients",
    "zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
}  # fmt: skip
_ALLOWED_OFFLOAD = {
    "device", "pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init",
}  # fmt: skip


def _refuse_unknown(config: Mapping[str, Any], prefix: str, allowed: set[str]) -> None:
    unknown = sorted(key for key, value in config.items() if key not in allowed and not _is_off(value))
    if unknown:
        raise ConfigurationError(
            f"DeepSpeed's {prefix}{unknown[0]}={_short(config[unknown[0]])}: nobody has shown what it does to a "
            "clipped and noised gradient. Leave it out."
        )


def _at(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    found: Any = config
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def _is_off(value: Any) -> bool:
    """Whether a setting says no: false, zero, nothing, or a section whose ``enabled`` is false."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return not value


def _short(value: Any) -> str:
    return "{...}" if isinstance(value, Mapping) else str(value)
