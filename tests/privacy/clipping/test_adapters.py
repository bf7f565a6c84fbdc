"""LoRA and prompt tuning by peft: the adapter alone is trained, and clipped exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clipping_cases import (
    COVERED,
    bart,
    check_exact,
    check_low_precision,
    check_refused,
    pooled,
    prepared,
    token_losses,
)
from torch import Tensor

from lit_dpret.errors import UnsupportedModelError
from lit_dpret.privacy.clipping import make_engine, rules

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*_checkpointing.* is deprecated")


def lora(task: str, **changes: Any) -> Any:
    return peft.LoraConfig(**(dict(task_type=task, r=2, lora_alpha=3, lora_dropout=0.0) | changes))


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

#: peft takes the decoder to have as many layers as the encoder.
BUILDS = COVERED | {"bart": lambda rows: bart(rows, encoder_layers=2)}


def adapted(case: Any, config: Any) -> Any:
    """The same losses, of the model inside an adapter whose parameters are away from their start at zero."""
    case.module = prepared(peft.get_peft_model(case.module, config)).train()
    return case


def generator(build: Callable[..., Any], task: str, rows: int, config: Any) -> Any:
    """Logits of the labels alone, without those at virtual tokens."""
    case = adapted(build(rows), config)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"] if "input_ids" in batch else batch["ids"]
        if task == "SEQ_2_SEQ_LM":
            start = batch["labels"].roll(1, 1).clamp(min=1)
            out = case.module(input_ids=ids, attention_mask=batch["mask"], decoder_input_ids=start, use_cache=False)
            return token_losses(out.logits[:, -start.shape[1] :], batch["labels"])
        logits = case.module(input_ids=ids, attention_mask=batch["mask"], use_cache=False).logits
        labels = ids.masked_fill(batch["mask"] == 0, -100)[:, 1:]
        return token_losses(logits[:, logits.shape[1] - ids.shape[1] : -1], labels)

    case.losses = losses
    return case


def encoder(build: Callable[..., Any], task: str, rows: int, config: Any) -> Any:
    case = adapted(build(rows), config)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        hidden = case.module(input_ids=batch["ids"], attention_mask=batch["mask"]).last_hidden_state
        hidden = hidden[:, hidden.shape[1] - batch["ids"].shape[1] :]
        return (pooled(hidden, batch["mask"]) * batch["target"]).sum(1).tanh()

    case.losses = losses
    return case


#: How the model is used, its task in peft, and what peft cannot read off its configuration.
MODELS: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "t5_v1.0_tied": (generator, "SEQ_2_SEQ_LM", {}),
    "t5_v1.1_untied_as_flan": (generator, "SEQ_2_SEQ_LM", {"target_modules": ["q", "v", "wi_0", "wo"]}),
    "bart": (generator, "SEQ_2_SEQ_LM", {}),
    "gpt2": (generator, "CAUSAL_LM", {"fan_in_fan_out": True}),
    "llama": (generator, "CAUSAL_LM", {}),
    "bert": (encoder, "FEATURE_EXTRACTION", {}),
    "minilm": (encoder, "FEATURE_EXTRACTION", {}),
    "distilbert": (
        encoder,
        "FEATURE_EXTRACTION",
        {"target_modules": ["q_lin", "v_lin"], "token_dim": 12, "num_layers": 2, "num_attention_heads": 3},
    ),
}


def build(name: str, adapter: str | Callable[[str], Any], rows: int = 5) -> Any:
    use, task, where = MODELS[name]
    config = (ADAPTERS[adapter] if isinstance(adapter, str) else adapter)(task)
    for key, value in where.items():
        if getattr(config, key, 0) in (None, False):  # the adapter has such a setting, and it is unset
            setattr(config, key, value)
    return use(BUILDS[name], task, rows, config)


#: An encoder-decoder, a decoder and an encoder.
OF_EACH_KIND = ["t5_v1.0_tied", "gpt2", "bert"]
PAIRS = [(name, adapter) for name in sorted(MODELS) for adapter in sorted(ADAPTERS)]
PAIRS.remove(("distilbert", "prefix_tuning"))  # it takes no keys and values from outside


@pytest.mark.like(4)
@pytest.mark.parametrize(
    ("name", "adapter", "clip_groups"),
    [*((*pair, "flat") for pair in PAIRS), *((*pair, "per_layer") for pair in PAIRS if pair[0] in OF_EACH_KIND)],
)
def test_an_adapter_is_clipped_exactly(name: str, adapter: str, clip_groups: str) -> None:
    clipping = check_exact(build(name, adapter), clip_groups=clip_groups)
    assert clipping.parameters
    assert all("lora_" in n or "prompt_encoder" in n or n.endswith(".bias") for n in clipping.parameters)


@pytest.mark.parametrize("adapter", ["lora", "prompt_tuning"])
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_units_of_several_rows_batches_of_one_checkpointing_and_bf16(name: str, adapter: str) -> None:
    case = build(name, adapter, rows=6)
    check_exact(case, unit_ids=torch.tensor([2, 0, 2, 1, 2, 0]))
    whole, case.rows = case.rows, case.take(torch.tensor([4]))
    check_exact(case)
    case.rows = {key: value[:3] for key, value in whole.items()}
    if adapter == "lora":
        case.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        check_exact(case)
    check_low_precision(case, norm_within=None)


@pytest.mark.parametrize("clip_groups", ["flat", "per_layer"])
@pytest.mark.parametrize(("name", "targets"), [("resnet18", ["conv1", "conv2", "head"]), ("conv_net", ["0", "6"])])
def test_lora_of_convolutions_is_clipped_exactly(name: str, targets: list[str], clip_groups: str) -> None:
    case = adapted(COVERED[name](5), peft.LoraConfig(r=2, target_modules=targets))
    clipping = check_exact(case, clip_groups=clip_groups)
    assert clipping.parameters and all("lora_" in name for name in clipping.parameters)


@pytest.mark.parametrize("engine", ["ghost", "opacus"])
def test_dora_is_refused_by_name(engine: str) -> None:
    case = build("gpt2", lambda task: lora(task, use_dora=True))
    with pytest.raises(UnsupportedModelError, match=rf"lora_magnitude_vector.*privacy\.engine={engine}"):
        make_engine(engine, case.module, max_grad_norm=1.0)


def test_lora_of_an_embedding_is_refused_by_name_and_left_to_the_fallback() -> None:
    case = build("gpt2", lambda task: lora(task, target_modules=["wte"]))
    with pytest.raises(UnsupportedModelError, match="lora_embedding_A"):
        make_engine("ghost", case.module, max_grad_norm=1.0)
    check_exact(case, engine="vmap")


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_virtual_tokens_without_a_batch_axis_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PROMPTED", set())
    check_refused(build(name, prompts), "first axis has size 1 for a batch of 5 rows")
