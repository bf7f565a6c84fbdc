"""Weights in bfloat16, their updates in float32: exact up to the last rounding, through a checkpoint as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import Regression, dp
from tiny_generator import generator

from lit_dpret.distributed.handover import MasterWeights, gradient_slot, in_float32, keep_masters, needs_masters
from lit_dpret.modules import OptimizerSpec
from lit_dpret.privacy.budget import PrivacyBudget
from lit_dpret.privacy.clipping import make_engine
from lit_dpret.privacy.noise import KeyedStream
from lit_dpret.privacy.plan import PlainSamplingRequest, PrivacyPlan

LORA: dict[str, Any] = {"lora": {"r": 2, "target_modules": ["q", "v"]}}
PROMPT: dict[str, Any] = {"prompt_tuning": {"num_virtual_tokens": 3}}
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "sgd", "lr": 0.1, "momentum": 0.9}, {"name": "adam", "lr": 1e-3}, {"name": "adafactor", "lr": 1e-2},
]  # fmt: skip


def gradients(step: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)) * 1e-3


def take(optimizer: Any, weight: torch.nn.Parameter, steps: range) -> None:
    for step in steps:
        slot = gradient_slot(optimizer, weight)
        slot.grad = gradients(step, weight.shape).to(slot.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=lambda settings: settings["name"])
def test_the_masters_are_what_float32_training_gives_and_the_weights_are_the_masters_rounded(
    settings: dict[str, Any],
) -> None:
    start = torch.randn(6, 5, generator=torch.Generator().manual_seed(9)).bfloat16()
    wide, half = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
    reference, optimizer = (OptimizerSpec(**settings).build([p], steps=0) for p in (wide, half))
    assert isinstance(optimizer, MasterWeights) and not isinstance(reference, MasterWeights)
    take(reference, wide, range(20))
    take(optimizer, half, range(20))
    master = optimizer.state_dict()["state"][0]["master"]
    assert torch.equal(master, wide) and torch.equal(half, wide.bfloat16()) and half.dtype == torch.bfloat16
    assert half.grad is None and gradient_slot(optimizer, half).grad is None


def test_updates_too_small_for_bfloat16_add_up_in_the_master() -> None:
    weight = torch.nn.Parameter(torch.ones(4).bfloat16())
    optimizer = OptimizerSpec(name="sgd", lr=1.0).build([weight], steps=0)
    for _ in range(100):
        gradient_slot(optimizer, weight).grad = torch.full((4,), 1e-3)
        optimizer.step()
    assert torch.equal(weight, torch.full((4,), 0.9).bfloat16())
    alone = torch.ones(4).bfloat16()
    for _ in range(100):
        alone -= torch.full((4,), 1e-3).bfloat16()
    assert torch.equal(alone, torch.ones(4).bfloat16()), "without a master nothing would have been learnt"


@pytest.mark.costly
@pytest.mark.parametrize("settings", OPTIMIZERS, ids=lambda settings: settings["name"])
def test_a_checkpoint_brings_the_masters_back_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    ends = []
    for interrupted in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 30).view(6, 5).bfloat16())
        optimizer = OptimizerSpec(**settings).build([weight], steps=0)
        take(optimizer, weight, range(5))
        if interrupted:
            torch.save({"weight": weight.detach(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")
            kept = torch.load(tmp_path / "checkpoint", weights_only=True)
            weight = torch.nn.Parameter(kept["weight"])
            optimizer = OptimizerSpec(**settings).build([weight], steps=0)
            optimizer.load_state_dict(kept["optimizer"])
        take(optimizer, weight, range(5, 10))
        ends.append((optimizer.state_dict()["state"][0]["master"], weight))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("tuned", [LORA, PROMPT], ids=["lora", "prompt"])
def test_what_is_written_of_a_module_is_float32_the_masters_and_what_is_not_trained(tuned: Any) -> None:
    module = generator(**tuned).bfloat16()
    optimizer = OptimizerSpec(name="sgd", lr=1e-3).build(module.parameters(), steps=0)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for number, parameter in enumerate(trained):
        gradient_slot(optimizer, parameter).grad = gradients(number, parameter.shape)
    optimizer.step()
    before = dict(module.named_parameters())
    with in_float32(module, [optimizer]):
        inside = dict(module.named_parameters())
        state = dict(module.state_dict())
        assert {p.dtype for p in inside.values()} == {torch.float32} and inside.keys() == before.keys()
        tied = module.model.get_input_embeddings().weight
        assert any(p is tied for p in inside.values()) and len(inside) < len(state), "tied weights stay tied"
    assert all(p is before[name] for name, p in module.named_parameters())
    rounded = {name for name, p in inside.items() if not torch.equal(p, before[name].float())}
    assert rounded == {name for name, p in before.items() if p.requires_grad}
    assert all(torch.equal(p.bfloat16(), before[name]) for name, p in inside.items())
    kept = dict(module.state_dict())
    keep_masters(kept, module, [optimizer])
    assert all(torch.equal(kept[name], state[name]) for name in rounded)
    assert {kept[name].dtype for name in kept.keys() - rounded} == {torch.bfloat16}


def test_a_relative_bias_over_many_positions_passes_the_check_in_bfloat16() -> None:
    """Autograd sums its gradient over 256 * 256 places, of which bfloat16 loses most; the check asks for float32."""
    module = generator(max_passage_length=256, dropout=0.0).bfloat16()
    engine = make_engine("ghost", module, max_grad_norm=0.5)
    rows = module.longest_rows(2)
    stats = engine.add(lambda: module.per_row_loss(rows), torch.arange(2), torch.ones(2).bool())
    assert bool((stats.norms > 0).all()) and all(total.dtype == torch.float32 for total in engine.take().values())


def test_noised_gradients_of_bfloat16_weights_are_float32(tmp_path: Path) -> None:
    module = Regression(privacy=dp(tmp_path)).bfloat16()
    plan = PrivacyPlan.build(
        PrivacyBudget(eps=3.0, delta=1e-3), PlainSamplingRequest(sampling="poisson", expected_batch_size=10),
        steps=1, max_grad_norm=1.0, n_public=100, noise_multiplier=5.0,
    )  # fmt: skip
    module.privacy.attach(module, plan, KeyedStream(b"0" * 32, "x"))
    update = module.privacy.privatize(module.privacy.take(), attempt=0, step=0)
    assert {gradient.dtype for gradient in update.gradients.values()} == {torch.float32}
    assert not torch.equal(update.gradients["net.0.weight"], update.gradients["net.0.weight"].bfloat16().float())
    assert needs_masters(module.parameters())


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tuned", [{}, LORA, PROMPT], ids=["full", "lora", "prompt"])
def test_checkpointing_changes_no_norm_and_no_sum_also_in_bfloat16_with_dropout(half: bool, tuned: Any) -> None:
    """Activations are computed again under the same dropout masks, or norms and sums would be of another function."""
    found = []
    for checkpointing in (False, True):
        module = generator(dropout=0.3, gradient_checkpointing=checkpointing, **tuned)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.1)
        module = module.bfloat16() if half else module
        engine = make_engine("ghost", module, max_grad_norm=0.5)
        rows = module.longest_rows(3)
        torch.manual_seed(5)
        stats = engine.add(lambda m=module, r=rows: m.per_row_loss(r), torch.arange(3), torch.ones(3).bool())  # type: ignore[misc]
        found.append((stats.norms, engine.take()))
    (norms, sums), (again, sums_again) = found
    torch.testing.assert_close(norms, again, rtol=1e-5 if not half else 1e-2, atol=0)
    assert bool((norms > 0).all()) and {total.dtype for total in sums.values()} == {torch.float32}
    for (name, total), other in zip(sums.items(), sums_again.values(), strict=True):
        torch.testing.assert_close(total, other, rtol=1e-3 if half else 1e-5, atol=1e-3 if half else 1e-6, msg=name)
    whole = torch.cat([total.flatten().double() for total in sums.values()])
    assert whole.norm() <= 3 * 0.5 * (1 + 1e-6)
