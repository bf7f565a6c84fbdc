"""Two processes under DeepSpeed make the run that one process makes without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import ledger, told, weights
from safetensors.torch import load_file
from zero_runs import ZeroServer

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install lit-dpret[deepspeed]"
)

# Few units at a time: some steps leave a rank empty, and some both.
SPARSE: dict[str, Any] = {"size": 40, "expected_batch_size": None, "sample_rate": 0.06, "physical_batch_size": 2}
COUPLED: dict[str, Any] = {"size": 40, "expected_batch_size": None, "sample_rate": 0.15, "physical_batch_size": 40}

STAGES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, optimizer in host memory": {"stage": 2, "offload_optimizer": True},
    "stage 3, all in host memory": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}
MODES: dict[str, dict[str, Any]] = {
    "all rows of a unit": {"data": SPARSE | {"rows_per_unit": "all"}},
    "fewer units than ranks": {"data": SPARSE | {"size": 1, "sample_rate": 0.5}},
    "loop, share of clipped units": {"mode": {"name": "dp_sgd", "engine": "loop", "clip_fraction_budget": 0.1},
                                     "data": SPARSE},
    "public_passages": {"module": "frozen", "data": {"expected_batch_size": None, "sample_rate": 0.3},
                        "mode": {"name": "public_passages", "max_grad_norm": 0.1, "pool_size": 5}},
    "T5 with LoRA": {"module": "lora", "data": SPARSE},
    "logit_dp": {"module": "pairs", "data": COUPLED,
                 "mode": {"name": "logit_dp", "max_logit_grad_norm": 0.1, "sub_batches": 3}},
    "whole numbers": {"mode": {"name": "dp_sgd", "noise": "discrete"}, "data": SPARSE},
    "none": {"mode": {"name": "none"}, "data": SPARSE},
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one process without DeepSpeed, made once each."""
    return tmp_path_factory.mktemp("alone")


def compare(zero_server: ZeroServer, runs: Path, stage: str, given: dict[str, Any]) -> None:
    """One process without DeepSpeed, run once in ``runs``, and two under ``stage``; they share a secret."""
    if not (runs / "one").exists():
        assert zero_server.run("zero_fit", runs / "one", world=1, steps=5, **given) == [0]
    assert zero_server.run("zero_fit", runs / stage, world=2, steps=5, zero=STAGES[stage], **given) == [0, 0]
    one, first, second = told(runs / "one", 0), told(runs / stage, 0), told(runs / stage, 1)
    assert len(weights(one)) == len(weights(first)) > 40
    assert first["weights"] == second["weights"]
    assert (weights(one) - weights(first)).abs().max() < 1e-5
    assert one["eps"] == first["eps"] == second["eps"] and first["global_step"] == 5
    assert ledger(runs / "one") == ledger(runs / stage)
    alone, shared = (
        [line for line in (runs / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if "clip_" in line]
        for name in ("one", stage)
    )
    assert alone == shared and len(alone) == 5 * ("clip_fraction_budget" in given.get("mode", {}))


@pytest.mark.costly
@pytest.mark.parametrize("stage", ["stage 2", pytest.param("stage 3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["buffer", "extra state", "none"])
def test_weights_are_published_without_a_private_number_beside_them(
    way: str, stage: str, zero_server: ZeroServer, tmp_path: Path
) -> None:
    ended = zero_server.run("shard_jobs:kept_private", tmp_path / "run", way=way, strategy=stage, timeout=60)
    assert ended == ([0, 0] if way == "none" else [2, 2])
    assert all(way == "none" or "of_rows" in told(tmp_path / "run", rank)["text"] for rank in (0, 1))
    assert bool(list(tmp_path.rglob("weights.pt"))) == (way == "none")


FAST = ("stage 2", "stage 3, all in host memory")


@pytest.mark.costly
@pytest.mark.parametrize("stage", [pytest.param(s, marks=[] if s in FAST else pytest.mark.slow) for s in STAGES])
def test_a_t5_takes_the_update_and_the_ledger_of_one_process(stage: str, zero_server: ZeroServer, alone: Path) -> None:
    compare(zero_server, alone / "t5", stage, {"module": "t5", "data": SPARSE})


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
def test_a_decoder_only_model_takes_the_update_and_the_ledger_of_one_process(
    stage: str, zero_server: ZeroServer, alone: Path
) -> None:
    compare(zero_server, alone / "llama", stage, {"module": "llama", "data": SPARSE})


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
@pytest.mark.parametrize("name", list(MODES))
def test_every_mode_takes_the_update_and_the_ledger_of_one_process(
    name: str, stage: str, zero_server: ZeroServer, alone: Path
) -> None:
    compare(zero_server, alone / name, stage, MODES[name])


@pytest.mark.costly
@pytest.mark.parametrize(
    ("stage", "bf16"),
    [("stage 2", True), *[pytest.param(s, b, marks=pytest.mark.slow) for s in STAGES for b in (False, True)
                          if (s, b) != ("stage 2", True)]],
)  # fmt: skip
def test_the_engine_steps_on_what_it_is_given_unrounded(
    stage: str, bf16: bool, zero_server: ZeroServer, tmp_path: Path
) -> None:
    zero = {"stage": STAGES[stage]["stage"]}
    if "optimizer" in stage or "all" in stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    assert zero_server.run("handed", tmp_path, world=3, zero=zero, bf16=bf16) == [0, 0, 0]
    for rank in range(3):
        seen = told(tmp_path, rank)
        assert seen["worst"] < 1e-6 and seen["here"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_checkpoint_holds_everything_whole_for_any_stage_and_any_number_of_ranks(
    precision: str, zero_server: ZeroServer, tmp_path: Path
) -> None:
    given = {"module": "t5", "data": SPARSE, "steps": 4, "precision": precision}
    folder = tmp_path / "run"
    assert zero_server.run("zero_fit", folder, world=2, zero=STAGES["stage 2"], **given) == [0, 0]
    first = told(folder, 0)
    assert len(first["momenta"]) == 2 * len(weights(first)) and set(first["steps"]) == {4.0}
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {torch.float32}
    for world, stage in ((1, "stage 3"), (3, "stage 1"), (2, "stage 3, all in host memory")):
        # All steps are made: it ends with what it read.
        statuses = zero_server.run("zero_fit", folder, world=world, zero=STAGES[stage], resume=True, **given)
        assert statuses == [0] * world
        again = told(folder, 0)
        assert again["weights"] == first["weights"] and again["global_step"] == 4
        assert again["momenta"] == first["momenta"] and set(again["steps"]) == {4.0}


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_goes_on_with_another_number_of_ranks(
    zero_server: ZeroServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    given = {"module": "t5", "data": SPARSE, "steps": 6}
    doom = {"whose": 1, "at": 4, "how": "kill"}
    survivor, killed = zero_server.run("zero_fit", folder, world=2, zero=STAGES["stage 3"], doom=doom, **given)
    assert killed == -9 and survivor != 0
    spent = [record for record in ledger(folder) if record["kind"] == "intent"]
    assert len(spent) >= 4
    assert zero_server.run("zero_fit", folder, world=3, zero=STAGES["stage 2"], resume=True, **given) == [0, 0, 0]
    records = ledger(folder)
    assert [r for r in records if r["kind"] == "intent"][: len(spent)] == spent
    assert {r["step"] for r in records if r["kind"] == "release"} == set(range(6))
    assert records[-1]["kind"] == "end" and told(folder, 0)["global_step"] == 6


@pytest.mark.slow
def test_a_command_leaves_one_folder_of_the_master_weights_and_a_checkpoint_that_needs_no_deepspeed(
    tmp_path: Path,
) -> None:
    rows = [{"query": f"what is number {i}", "passage": f"number {i} is a number after {i - 1}"} for i in range(40)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = [
        "trainer=deepspeed", "trainer.strategy.stage=3", "trainer.accelerator=cpu", "trainer.devices=2",
        "trainer.precision=bf16-mixed", "trainer.max_steps=3", "privacy.noise_multiplier=5.0", "datamodule=pairs",
        f"datamodule.pairs={tmp_path / 'log.jsonl'}", "datamodule.expected_batch_size=8",
        "datamodule.physical_batch_size=8", "model.max_passage_length=16", "model.max_query_length=8",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "lit_dpret", *settings]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    model = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert model and all(torch.equal(checkpoint[f"model.{name}"], value) for name, value in model.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in model.values()), "not the masters"
    card = json.loads((tmp_path / "run" / "privacy_card.json").read_text(encoding="utf-8"))
    assert card["claim"]["epsilon"] > 0
