"""Time and memory of a step: the estimate is held against a real one, which reads no data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import decoder_only, generator
from torch.utils.flop_counter import FlopCounterMode

from lit_dpret.costs.estimate import FACTOR, estimate, measure
from lit_dpret.costs.measure import LiveBytes, TrialStep, held_bytes
from lit_dpret.costs.slices import SLICES, Part, slice_of, taken_apart
from lit_dpret.costs.work import work_of
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import OptimizerSpec, QueryGenerator
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.clipping.ghost import PHASES
from lit_dpret.privacy.modes import DPSGD
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def plan(rows: int = 4, batch: int = 16) -> PrivacyPlan:
    return PrivacyPlan.build(
        PrivacyBudget(eps=3.0, delta=1e-5),
        PlainSamplingRequest(sampling="poisson", expected_batch_size=batch, physical_batch_size=rows),
        steps=60, max_grad_norm=0.1, n_public=10_000, noise_multiplier=5.0,
    )  # fmt: skip


def new_t5(layers: int, width: int, *, passage: int, query: int, **settings: Any) -> QueryGenerator:
    shape = {"d_model": width, "d_kv": width // 4, "d_ff": 4 * width, "num_layers": layers, "num_heads": 4}
    return QueryGenerator(
        privacy=DPSGD(eps=3.0), optimizer=OptimizerSpec(lr=1e-3), pretrained=None, config={**shape, "vocab_size": 8192},
        tokenizer=ROOT / "lit_dpret" / "assets" / "public_t5", max_passage_length=passage, max_query_length=query,
        **settings,
    )  # fmt: skip


def test_memory_grows_by_the_same_for_each_row_and_time_with_the_batch() -> None:
    module = generator()
    few, many = estimate(module.outlined, plan(rows=200), CPU), estimate(module.outlined, plan(rows=800), CPU)
    assert many["bytes"] - few["bytes"] == pytest.approx(1.3 * 600 * few["bytes_per_row"], rel=0.01)
    assert few["seconds_of_run"] == pytest.approx(60 * few["seconds_per_step"])
    assert json.loads(json.dumps(few, allow_nan=False)) == few
    assert few["parameters"] == sum(p.numel() for p in module.parameters())


IN_A_PROCESS = """
import json, sys, torch
sys.path[:0] = [{tests!r}, {here!r}]
from test_estimate import CPU, new_t5, plan
from lit_dpret.costs.estimate import estimate, measure
torch.set_num_threads(1)
module = new_t5({layers}, {width}, passage={passage}, query={query})
found = plan({rows}, 64)
print(json.dumps([estimate(module.outlined, found, CPU), measure(module, found, CPU)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux only")
@pytest.mark.parametrize(
    ("layers", "width", "rows", "passage", "query"), [(2, 192, 16, 96, 32), (4, 256, 8, 256, 64), (2, 64, 16, 96, 32)]
)
def test_estimated_memory_is_within_its_factor(layers: int, width: int, rows: int, passage: int, query: int) -> None:
    """In a process of its own, whose memory nothing else uses. Seconds are compared in benchmarks/plan_cost.py."""
    program = IN_A_PROCESS.format(
        tests=str(ROOT / "tests"), here=str(Path(__file__).parent),
        layers=layers, width=width, rows=rows, passage=passage, query=query,
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    told, real = json.loads(done.stdout.splitlines()[-1])
    assert 1 / FACTOR < told["bytes"] / real["bytes"] < FACTOR


@pytest.mark.costly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux only")
def test_a_measurement_is_of_the_planned_rows_and_lengths() -> None:
    module = generator()
    before = [p.detach().clone() for p in module.parameters()]
    found = measure(module, plan(rows=4, batch=16), CPU)
    contract = module.codec.contract
    assert (found["passage_tokens"], found["query_tokens"]) == (contract.max_passage_length, contract.max_query_length)
    assert found["seconds_per_step"] == pytest.approx(4 * found["seconds_of_batch"] + found["seconds_of_update"])
    assert found["seconds_of_run"] == pytest.approx(60 * found["seconds_per_step"]) and found["bytes"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)), "it really stepped"


@pytest.mark.costly
@pytest.mark.parametrize(("settings", "half"), [
    ({}, False),
    *(
        pytest.param(*given, marks=pytest.mark.slow)
        for given in (
            ({"gradient_checkpointing": True}, False), ({"lora": {"r": 2, "target_modules": ["q", "v"]}}, False),
            ({"prompt_tuning": {"num_virtual_tokens": 7}}, False), ({}, True),
        )
    ),
], ids=["plain", "checkpointing", "lora", "prompt", "bfloat16"])  # fmt: skip
def test_bytes_of_the_phases_add_up_over_layers_to_the_whole_model(settings: dict[str, Any], half: bool) -> None:
    """Bytes are counted, and linear in layers and rows, so that slices tell those of any model and batch."""
    kind = torch.bfloat16 if half else torch.float32
    whole = new_t5(5, 32, passage=20, query=6, **settings)
    slices = [slice_of(whole.outlined, *layers).to(kind) for layers in SLICES]
    base, encoder, decoder = taken_apart([Part(0.0, held_bytes(each, plan(), CPU)) for each in slices])
    told = (base + encoder * 5 + decoder * 5).held
    step = TrialStep(whole.to(kind), plan(), CPU)
    for lines in (told.checked, told.clipped):
        with LiveBytes() as counted:
            step.clip(6)
        assert max(line.at(6) for line in lines) == pytest.approx(counted.peak, rel=0.02)
        for phase, line in zip(PHASES, lines, strict=True):
            assert line.at(6) == pytest.approx(counted.peaks.get(phase, 0), rel=0.1), phase


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_operations_of_a_decoder_only_model_are_those_that_run(kind: str) -> None:
    module = decoder_only(kind, tied=False)
    rows = module.longest_rows(3)
    # Fused attention is counted for a whole square and in one operation that the counter does not know on a CPU.
    module.model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        module.per_row_loss(rows)
    assert 3 * work_of(module.outlined).forward_flops == counter.get_total_flops()


def test_a_model_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Linear"):
        measure(torch.nn.Linear(2, 2), plan(), CPU)
