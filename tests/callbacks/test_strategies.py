"""What a DeepSpeed configuration may say under a private run; DeepSpeed itself is not needed to ask."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from lit_dpret.callbacks.strategies import refuse_second_masters, refuse_uncut_optimizer, refuse_zero_settings
from lit_dpret.distributed.zero import ZeroStrategy
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.optimizers import OptimizerSpec


def strategy(zero: dict[str, Any] | None = None, **config: Any) -> Any:
    return SimpleNamespace(config={"zero_optimization": {"stage": 2} | (zero or {})} | config)


# What Lightning's strategy asks of DeepSpeed by itself.
LIGHTNINGS: dict[str, Any] = {
    "zero_allow_untested_optimizer": True,
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    "aio": {"block_size": 1048576, "queue_depth": 8},
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_lightning_asks_of_deepspeed_by_itself_is_let_through(stage: int) -> None:
    zero = {
        "stage": stage, "contiguous_gradients": True, "overlap_comm": True, "allgather_partitions": True,
        "reduce_scatter": True, "allgather_bucket_size": 1, "reduce_bucket_size": 1, "sub_group_size": 1,
        "offload_optimizer": {"device": "cpu", "nvme_path": "x", "buffer_count": 4, "pin_memory": False},
    }  # fmt: skip
    refuse_zero_settings(strategy(zero, **LIGHTNINGS))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping=1.0"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=True"),
        ({"amp": {"enabled": True}}, "amp.enabled=True"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"sparse_gradients": True}, "sparse_gradients=True"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer={...}"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler={...}"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype=fp32"),
        ({"zero": {"zero_quantized_gradients": True}}, "zero_optimization.zero_quantized_gradients=True"),
        ({"zero": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights=True"),
        ({"zero": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients=True"),
        ({"zero": {"zero_hpz_partition_size": 8}}, "zero_optimization.zero_hpz_partition_size=8"),
        ({"zero": {"mics_shard_size": 4}}, "zero_optimization.mics_shard_size=4"),
        ({"zero": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow={...}"),
        ({"zero": {"offload_optimizer": {"device": "nvme"}}}, "zero_optimization.offload_optimizer.device=nvme"),
        ({"zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "offload_optimizer.ratio=0.5"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast={...}"),
        ({"compression_training": {"weight_quantization": {}}}, "compression_training={...}"),
        ({"zero": {"stage": 0}}, "zero_optimization.stage=0"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_shown_is_refused_by_its_name(config: dict[str, Any], named: str) -> None:
    zero = config.pop("zero", None)
    with pytest.raises(ConfigurationError) as refusal:
        refuse_zero_settings(strategy(zero, **config))
    assert named in str(refusal.value)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeeds_own_clipping_of_the_sum_is_off_unless_it_is_asked_for() -> None:
    found = ZeroStrategy(stage=1)
    assert found.config["gradient_clipping"] == 0.0
    refuse_zero_settings(found)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("settings", "named"),
    [({"stage": 0}, "stage=0"), ({"stage": 2, "offload_parameters": True}, "offload_parameters"),
     ({"timeout_minutes": 0}, "timeout_minutes=0")],
)  # fmt: skip
def test_a_strategy_out_of_range_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ZeroStrategy(**settings)


def test_an_optimizer_that_averages_over_rows_is_refused_on_flat_parts() -> None:
    trainer: Any = SimpleNamespace(strategy=object.__new__(ZeroStrategy))
    module = SimpleNamespace(optimizer_spec=OptimizerSpec(name="adafactor"))
    with pytest.raises(ConfigurationError, match=r"model\.optimizer\.name=adafactor"):
        refuse_uncut_optimizer(trainer, module)


def test_float32_copies_in_the_optimizer_are_refused_beside_those_of_zero() -> None:
    trainer: Any = SimpleNamespace(strategy=object.__new__(ZeroStrategy), precision="bf16-true")
    with pytest.raises(ConfigurationError, match=r"precision=bf16-true.*trainer=deepspeed.*precision=bf16-mixed"):
        refuse_second_masters(trainer)
    trainer.precision = "bf16-mixed"
    refuse_second_masters(trainer)


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_a_run_without_deepspeed_says_how_to_install_it() -> None:
    with pytest.raises(ConfigurationError, match="pip install"):
        ZeroStrategy()
