"""A run whose parameters are cut up over two processes (FSDP2) is the run that one process makes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from rank_runs import Server, ledger, told, weights
from safetensors.torch import load_file
from stand_ins import Numbers, Regression, dp
from tiny_generator import DECODERS

from lit_dpret.callbacks import PrivacyAccountant
from lit_dpret.callbacks.refusals import refuse_broken_claims
from lit_dpret.callbacks.strategies import refuse_second_masters, refuse_uncut_optimizer, refuse_zero_settings
from lit_dpret.cards.check import verify_card
from lit_dpret.cards.file import read_card
from lit_dpret.distributed.fsdp import ShardingStrategy
from lit_dpret.distributed.zero import ZeroStrategy
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.query_generator import QueryGenerator

# 1.2 units on average: some steps leave a rank empty, and some both.
SPARSE = {"size": 40, "expected_batch_size": None, "sample_rate": 0.03, "physical_batch_size": 2}


@pytest.mark.costly
def test_shards_make_the_update_and_the_ledger_of_one_process(server: Server, tmp_path: Path) -> None:
    mode = {"name": "dp_sgd", "clip_fraction_budget": 0.1}
    for world in (1, 2):
        given = {"data": SPARSE, "steps": 12, "mode": mode}
        assert server.run("shard_jobs:fit", tmp_path / f"{world}", world=world, **given) == [0] * world
    one, first, second = (told(tmp_path / name, rank) for name, rank in (("1", 0), ("2", 0), ("2", 1)))
    assert first["weights"] == second["weights"]
    assert (weights(one) - weights(first)).abs().max() < 1e-5
    assert one["eps"] == first["eps"] == second["eps"] and first["global_step"] == 12
    assert ledger(tmp_path / "1") == ledger(tmp_path / "2")
    told_by = [(tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8") for name in "12"]
    assert told_by[0].count("privacy/clip_fraction") == 12 and told_by[0] == told_by[1]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("way", "strategy"),
    [
        pytest.param("buffer", "fsdp", marks=pytest.mark.slow),
        ("extra state", "fsdp"),
        pytest.param("metadata", "fsdp", marks=pytest.mark.slow),
        ("buffer", "ddp"),
    ],
)
def test_weights_with_a_private_number_beside_them_are_not_published(
    way: str, strategy: str, server: Server, tmp_path: Path
) -> None:
    assert server.run("shard_jobs:kept_private", tmp_path / "run", way=way, strategy=strategy, timeout=60) == [2, 2]
    assert all("of_rows" in told(tmp_path / "run", rank)["text"] for rank in (0, 1))
    assert not list(tmp_path.rglob("weights.pt"))


@pytest.mark.costly
def test_what_was_beside_the_weights_at_the_start_is_published_with_them(server: Server, tmp_path: Path) -> None:
    assert server.run("shard_jobs:kept_private", tmp_path / "run", way="none", strategy="fsdp", timeout=60) == [0, 0]
    assert "frozen.weight" in torch.load(tmp_path / "run" / "model" / "weights.pt", weights_only=True)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float((weights(one) - weights(other)).abs().max())


@pytest.mark.costly
def test_a_parameter_is_cut_gathered_added_up_and_noised_as_if_it_were_whole(server: Server, tmp_path: Path) -> None:
    assert server.run("shard_jobs:pieces", tmp_path, world=3) == [0] * 3
    for rank in range(3):
        seen = told(tmp_path, rank)
        assert seen["blocks"] == [True] * 3 and seen["tied"] and seen["still_whole"] and seen["gathered"]
        assert seen["same_objects"] and seen["shards_again"] and seen["shards_after"] and seen["frozen"] == [False] * 2
        assert seen["buffers"] == [0.0, 1.0, 2.0] and seen["emptied"]
        assert seen["sums"] < 1e-6 and seen["kept_in"] == "torch.float32" and seen["noise"]
        assert seen["rows"] == [[3, 0], [3, 1], [1, 1]][rank], "7 rows on 3 ranks, and one number on the first"
        assert set(seen["optimizers"]) == {"sgd", "adam", "adamw", "adam_bc"}
        assert max(seen["optimizers"].values()) < 1e-6
        assert seen["assembled"] == (rank == 0) and seen["equal"] and seen["tied_inside"]
        assert "Parameter scale" in seen["refused"]


@pytest.mark.costly
def test_rank_0_writes_the_one_model_that_one_process_would_write(server: Server, tmp_path: Path) -> None:
    assert server.run("shard_jobs:generate", tmp_path / "1", world=1, sharded=False) == [0]
    assert server.run("shard_jobs:generate", tmp_path / "2") == [0, 0]
    one, two = told(tmp_path / "1", 0), [told(tmp_path / "2", rank) for rank in (0, 1)]
    assert distance(one, two[0]) < 1e-5 and set(two[0]["held"].values()) == {"DTensor"}
    assert [one["in_blocks"], *(rank["in_blocks"] for rank in two)] == [False, True, True]
    assert sum(rank["state"] for rank in two) == one["state"] and two[0]["state"] < 0.6 * one["state"]
    left, right = (load_file(tmp_path / name / "model" / "model.safetensors") for name in "12")
    assert left.keys() == right.keys() and all((left[name] - right[name]).abs().max() < 1e-5 for name in left)
    assert ledger(tmp_path / "1") == ledger(tmp_path / "2")
    card = read_card(tmp_path / "2")
    assert card["subject"]["name"] == "QueryGenerator"
    assert verify_card(card, tmp_path / "2" / "privacy_ledger.jsonl", folder=tmp_path / "2" / "model") == []
    found = QueryGenerator.load_from_checkpoint(
        tmp_path / "2" / "checkpoints" / "last.ckpt", tokenizer=tmp_path / "2" / "model"
    )
    for name, tensor in found.model.state_dict().items():
        assert name not in right or torch.equal(tensor, right[name])


RESUMES = [(2, 1), (2, 2), (1, 2)]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*worlds, marks=[] if worlds == (2, 1) else pytest.mark.slow) for worlds in RESUMES],
)
def test_a_run_goes_on_with_another_number_of_processes(
    before: int, after: int, server: Server, tmp_path: Path
) -> None:
    found = {}
    for name, worlds in {"alone": (1, 1), "moved": (before, after)}.items():
        for world, given in zip(worlds, ({"kill_at": 3}, {"resume": True}), strict=True):
            ended = server.run("shard_jobs:generate", tmp_path / name, world=world, sharded=world > 1, **given)
            assert ended == [1 if "kill_at" in given else 0] * world
        found[name] = told(tmp_path / name, 0)
    assert found["alone"]["attempt"] == found["moved"]["attempt"] == 1, "step 2 is made again with fresh noise"
    assert distance(found["alone"], found["moved"]) < 1e-5
    assert ledger(tmp_path / "alone") == ledger(tmp_path / "moved")


@pytest.mark.slow
def test_a_run_whose_optimizer_keeps_no_state_goes_on(server: Server, tmp_path: Path) -> None:
    for given in ({"kill_at": 3}, {"resume": True}):
        ended = server.run("shard_jobs:generate", tmp_path / "run", world=2, model={"optimizer": "sgd"}, **given)
        assert ended == [1 if "kill_at" in given else 0] * 2
    assert told(tmp_path / "run", 0)["attempt"] == 1


DECODER_ONLY: dict[str, Any] = {
    "config": {"model_type": "llama", **DECODERS["llama"], "tie_word_embeddings": True}, "prompt": "{passage} Ask: ",
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "activation checkpointing": {"model": {"gradient_checkpointing": True}},
    "LoRA": {"lora": True},
    "LoRA, merged": {"model": {"lora": {"r": 2, "target_modules": ["q", "v"]}}},
    "decoder only": {"model": DECODER_ONLY},
    "decoder only, LoRA, merged": {"model": DECODER_ONLY | {"lora": {"r": 2}}},
    "decoder only, prompt tuning": {"model": DECODER_ONLY | {"prompt_tuning": {"num_virtual_tokens": 3}}},
    "prompt tuning": {"model": {"prompt_tuning": {"num_virtual_tokens": 3}}},
    "frozen encoder": {"model": {"trainable_patterns": ["decoder"]}},
    "per layer": {"privacy": {"clip_groups": "per_layer"}},
    "no privacy": {"privacy": {"none": True}},
    "ChaCha20": {"privacy": {"secure_rng": True}},
    "whole numbers": {"privacy": {"noise": "discrete"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("given", SETTINGS.values(), ids=SETTINGS)
def test_a_tied_generator_is_trained_as_by_one_process(given: dict[str, Any], server: Server, tmp_path: Path) -> None:
    assert server.run("shard_jobs:generate", tmp_path / "1", world=1, sharded=False, **given) == [0]
    assert server.run("shard_jobs:generate", tmp_path / "2", **given) == [0, 0]
    assert distance(told(tmp_path / "1", 0), told(tmp_path / "2", 0)) < 1e-5
    if "lora" in given:  # that job wraps the model after it was built, and writes none
        return
    one, two = (load_file(tmp_path / world / "model" / "model.safetensors") for world in ("1", "2"))
    assert one.keys() == two.keys() and not any("lora" in name for name in one)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
def test_bfloat16_computes_on_copies_and_keeps_master_weights_in_float32(server: Server, tmp_path: Path) -> None:
    for world in (1, 2):
        ended = server.run("shard_jobs:generate", tmp_path / f"{world}", world=world, precision="bf16-mixed")
        assert ended == [0] * world
    one, two = told(tmp_path / "1", 0), told(tmp_path / "2", 0)
    assert one["kinds"] == two["kinds"] == ["torch.float32"] and distance(one, two) < 1e-4
    weights = load_file(tmp_path / "2" / "model" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.float32"}
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values())


MODES: dict[str, dict[str, Any]] = {
    "vmap": {"mode": {"name": "dp_sgd", "engine": "vmap"}},
    "opacus": {"mode": {"name": "dp_sgd", "engine": "opacus"}, "data": SPARSE},
    "loop": {"mode": {"name": "dp_sgd", "engine": "loop", "clip": "automatic"}, "data": SPARSE},
    "batch_clip": {"module": "pairs", "mode": {"name": "batch_clip", "max_grad_norm": 0.1, "sub_batches": 3}},
    "per_example_duplicated": {"module": "pairs",
                               "mode": {"name": "per_example_duplicated", "max_grad_norm": 0.1, "sub_batches": 3}},
    "logit_dp": {"module": "pairs", "mode": {"name": "logit_dp", "max_logit_grad_norm": 0.1, "sub_batches": 3}},
    "public_passages": {"module": "frozen", "data": {"expected_batch_size": None, "sample_rate": 0.3},
                        "mode": {"name": "public_passages", "max_grad_norm": 0.1, "pool_size": 5}},
}  # fmt: skip
COUPLED: dict[str, Any] = {"size": 40, "expected_batch_size": None, "sample_rate": 0.15, "physical_batch_size": 40}


@pytest.mark.slow
@pytest.mark.parametrize("given", MODES.values(), ids=MODES)
def test_every_mode_and_engine_makes_the_update_of_one_process(
    given: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    for world in (1, 2):
        job = {"data": COUPLED} | given
        assert server.run("shard_jobs:fit", tmp_path / f"{world}", world=world, **job) == [0] * world
    assert distance(told(tmp_path / "1", 0), told(tmp_path / "2", 0)) < 1e-5
    assert ledger(tmp_path / "1") == ledger(tmp_path / "2")


@pytest.mark.slow
def test_rank_0_can_ask_the_whole_model_between_two_steps(server: Server, tmp_path: Path) -> None:
    for world in (1, 2):
        assert server.run("shard_jobs:evaluated", tmp_path / f"{world}", world=world) == [0] * world
    seen = [told(tmp_path / "1", 0), told(tmp_path / "2", 0), told(tmp_path / "2", 1)]
    assert seen[0] == seen[1] == seen[2] and seen[0]["step"] == 6 and 0 < seen[0]["mrr"] < 1


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"tensor_parallel_size": 2, "save_distributed_checkpoint": False}, "tensor_parallel_size=2"),
        ({"tensor_parallel_size": "auto", "save_distributed_checkpoint": False}, "data_parallel_size=2"),
        ({"tensor_parallel_size": 1}, "save_distributed_checkpoint=true writes a folder file by file"),
    ],
)
def test_another_layout_of_lightnings_strategy_is_refused(strategy: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        refuse(tmp_path, ModelParallelStrategy(**strategy), OptimizerSpec(name="adam"))


def test_adafactor_is_refused_because_it_looks_at_whole_rows_and_columns(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="adafactor averages over whole rows"):
        refuse(tmp_path, ShardingStrategy(), OptimizerSpec(name="adafactor"))


def test_float32_copies_in_the_optimizer_are_refused_beside_those_that_the_shards_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.precision=bf16-true.*Set trainer\.precision=bf16-mixed"):
        refuse(tmp_path, ShardingStrategy(), OptimizerSpec(name="adam"), precision="bf16-true")
    refuse(tmp_path, ShardingStrategy(), OptimizerSpec(name="adam"), precision="bf16-mixed")


@pytest.mark.costly
def test_a_rank_that_ran_out_of_memory_begins_its_step_again_in_smaller_batches(server: Server, tmp_path: Path) -> None:
    """Parameters are whole while gradients are clipped, so that a rank may make more passes than another one."""
    data = {"sample_rate": 0.1, "expected_batch_size": None, "physical_batch_size": 4}
    assert server.run("shard_jobs:fit", tmp_path / "whole", data=data) == [0, 0]
    assert server.run("shard_jobs:short_of_memory", tmp_path / "short", data=data, at=3, always=False) == [0, 0]
    short, other = told(tmp_path / "short", 1), told(tmp_path / "short", 0)
    assert short["calls"] > 3 and short["weights"] == other["weights"]
    assert distance(short, told(tmp_path / "whole", 0)) < 1e-5
    assert ledger(tmp_path / "whole") == ledger(tmp_path / "short")


@pytest.mark.costly
def test_the_size_that_fits_is_found_in_shards_and_is_that_of_the_rank_with_the_least_room(
    server: Server, tmp_path: Path
) -> None:
    assert server.run("shard_jobs:find_size", tmp_path / "found", room=[11, 5], steps=3) == [0, 0]
    assert server.run("shard_jobs:find_size", tmp_path / "told", room=[99, 99], told=4, steps=3) == [0, 0]
    found, least = (told(tmp_path / "found", rank) for rank in (0, 1))
    assert set(found["tried"]) == {1, 2, 4, 8, 16} and set(least["tried"]) == {1, 2, 4, 8}
    assert ledger(tmp_path / "found") == ledger(tmp_path / "told"), "one plan, of physical batches of 4"
    assert found["weights"] == least["weights"] == told(tmp_path / "told", 0)["weights"]


def refuse(folder: Path, strategy: Any, optimizer: OptimizerSpec, **settings: Any) -> None:
    module = Regression(privacy=dp(folder), optimizer=optimizer)
    runner = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=2, max_epochs=-1, logger=False,
        callbacks=[PrivacyAccountant(run_dir=folder)], enable_checkpointing=False, **settings,
    )  # fmt: skip
    refuse_broken_claims(runner, module, Numbers())


# -- what a DeepSpeed configuration may say under a private run; DeepSpeed itself is not needed to a--


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
