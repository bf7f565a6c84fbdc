"""LoRA and prompt tuning by peft: the adapter alone is trained, and clipped exactly."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import make_engine, rules

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*_checkpointing.* is deprecated")


def lora(task: str, **changes: Any) -> Any:
    values = dict(task_type=task, r=2, lora_alpha=3, lora_dropout=0.0, fan_in_fan_out=task == "CAUSAL_LM")
    return peft.LoraConfig(**(values | changes))


def prompts(task: str, **changes: Any) -> Any:
    return peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3, **changes)


ADAPTERS: dict[str, Callable[[str], Any]] = {
    "lora": lora,
    "rank_stabilised_lora_with_biases": lambda task: lora(task, use_rslora=True, bias="lora_only"),
    "prompt_tuning": prompts,
    "p_tuning_by_an_mlp": lambda task: peft.PromptEncoderConfig(
        task_type=task, num_virtual_tokens=3, encoder_hidden_size=5
    ),
    "prefix_tuning": lambda task: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
}


def adapted(case: Any, config: Any) -> Any:
    """The same losses, of the model inside an adapter whose parameters are away from their start at zero."""
    case.module = peft.get_peft_model(case.module, config).double().train()
    for p in case.module.parameters():
        if p.requires_grad:
            p.data.add_(torch.randn_like(p) * 0.2)
    return case


def t5(lib: SimpleNamespace, rows: int, config: Any) -> Any:
    case = adapted(lib.t5(rows=rows), config)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        out = case.module(input_ids=batch["input_ids"], attention_mask=batch["mask"], labels=batch["labels"])
        prompt = out.logits.shape[1] - batch["labels"].shape[1]
        return lib.token_losses(out.logits[:, prompt:], batch["labels"])

    case.losses = losses
    return case


def gpt2(lib: SimpleNamespace, rows: int, config: Any) -> Any:
    shape = dict(vocab_size=13, n_positions=12, n_embd=8, n_layer=2, n_head=2)
    case = lib.Case(GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)), None, {})
    adapted(case, config)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        logits = case.module(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False).logits
        prompt = logits.shape[1] - batch["ids"].shape[1]
        return lib.token_losses(logits[:, prompt:-1], batch["ids"].masked_fill(batch["mask"] == 0, -100)[:, 1:])

    case.losses, case.rows = losses, {"ids": torch.randint(0, 13, (rows, 6)), "mask": lib.lengths_mask(rows, 6)}
    return case


MODELS = {"t5": (t5, "SEQ_2_SEQ_LM"), "gpt2": (gpt2, "CAUSAL_LM")}


def build(name: str, lib: SimpleNamespace, adapter: Callable[[str], Any], rows: int = 5) -> Any:
    model, task = MODELS[name]
    return model(lib, rows, adapter(task))


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_an_adapter_is_clipped_exactly(name: str, adapter: str, lib: SimpleNamespace) -> None:
    clipping = lib.check_exact(build(name, lib, ADAPTERS[adapter]))
    assert clipping.parameters
    assert all("lora_" in n or "prompt_encoder" in n or n.endswith(".bias") for n in clipping.parameters)


@pytest.mark.parametrize("adapter", ["lora", "prompt_tuning"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_units_of_several_rows_and_batches_of_one(name: str, adapter: str, lib: SimpleNamespace) -> None:
    case = build(name, lib, ADAPTERS[adapter], rows=6)
    lib.check_exact(case, unit_ids=torch.tensor([2, 0, 2, 1, 2, 0]))
    case.rows = case.take(torch.tensor([4]))
    lib.check_exact(case)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_lora_under_activation_checkpointing(name: str, lib: SimpleNamespace) -> None:
    case = build(name, lib, lora)
    case.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lib.check_exact(case)


@pytest.mark.parametrize("adapter", ["lora", "prompt_tuning"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_under_bf16_autocast_a_contribution_is_within_the_bound(name: str, adapter: str, lib: SimpleNamespace) -> None:
    case = build(name, lib, ADAPTERS[adapter], rows=3)
    bound = float(torch.stack([lib.norm_of(g) for g in case.unit_gradients()]).min()) / 3
    case.module.float()
    clipping = make_engine("ghost", case.module, max_grad_norm=bound)
    for unit in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            case.run(clipping, mask=torch.arange(3) == unit)
        assert float(lib.norm_of(clipping.take())) == pytest.approx(bound, rel=1e-5)


def test_dora_is_refused_by_name(lib: SimpleNamespace) -> None:
    case = build("gpt2", lib, lambda task: lora(task, use_dora=True))
    with pytest.raises(UnsupportedModelError, match="lora_magnitude_vector"):
        make_engine("ghost", case.module, max_grad_norm=1.0)


def test_lora_of_an_embedding_is_refused_by_name_and_left_to_the_fallback(lib: SimpleNamespace) -> None:
    case = build("gpt2", lib, lambda task: lora(task, target_modules=["wte"]))
    with pytest.raises(UnsupportedModelError, match="lora_embedding_A"):
        make_engine("ghost", case.module, max_grad_norm=1.0)
    lib.check_exact(case, engine="vmap")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_virtual_tokens_without_a_batch_axis_are_refused(
    name: str, lib: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "PROMPTED", set())
    case = build(name, lib, prompts)
    with pytest.raises(UnsupportedModelError, match="first axis is 1 for a batch of 5 rows"):
        case.run(make_engine("ghost", case.module, max_grad_norm=1.0))
