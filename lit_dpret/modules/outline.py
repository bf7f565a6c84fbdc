"""`GeneratorOutline`: a generator without its weights, sufficient to plan a run of any size.

The model is built on PyTorch's ``meta`` device, so that a 3B model can be planned on a laptop. The shapes of published
models are listed here by hub name, because a plan must not need a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lit_dpret.distributed.blocks import own_blocks
from lit_dpret.errors import ConfigurationError
from lit_dpret.modules.fine_tuning import freeze_all_but, refuse_two_choices, with_lora
from lit_dpret.modules.language_models import (
    config_of_new,
    config_of_stored,
    enable_checkpointing,
    load_tokenizer,
    shaped,
)
from lit_dpret.modules.smollm2 import SMOLLM2
from lit_dpret.modules.virtual_tokens import PromptTuning, add_prompt

_WORDS = 32128
"""Rows of the embeddings of every published T5: its 32,100 pieces, rounded up."""

_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def _shape(width: int, heads: int, head: int, wide: int, layers: int, **more: Any) -> dict[str, Any]:
    facts = {"d_model": width, "num_heads": heads, "d_kv": head, "d_ff": wide, "num_layers": layers}
    return {"model_type": "t5", "vocab_size": _WORDS, **facts, **more}


def _llama(width: int, heads: int, shared: int, wide: int, layers: int, words: int, **more: Any) -> dict[str, Any]:
    facts = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": shared}
    facts |= {"intermediate_size": wide, "num_hidden_layers": layers, "vocab_size": words}
    return {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 8192, **facts, **more}


_SMOLLM2_135M = _llama(576, 9, 3, 1536, 30, 49152)

#: By hub name: the T5 models of Raffel et al. (2020, 1910.10683), section 3.7, and the released "T5.1.1" ones; SmolLM2
#: (Allal et al. 2025, 2502.02737); Qwen2.5 and Qwen3, as stated by their configs on the hub.
PUBLISHED: dict[str, dict[str, Any]] = {
    "google-t5/t5-small": _shape(512, 8, 64, 2048, 6),
    "google-t5/t5-base": _shape(768, 12, 64, 3072, 12),
    "google-t5/t5-large": _shape(1024, 16, 64, 4096, 24),
    "google-t5/t5-3b": _shape(1024, 32, 128, 16384, 24),
    "google/t5-v1_1-small": _shape(512, 6, 64, 1024, 8, **_GATED),
    "google/t5-v1_1-base": _shape(768, 12, 64, 2048, 12, **_GATED),
    "google/t5-v1_1-large": _shape(1024, 16, 64, 2816, 24, **_GATED),
    "google/t5-v1_1-xl": _shape(2048, 32, 64, 5120, 24, **_GATED),
    SMOLLM2: _SMOLLM2_135M,
    "HuggingFaceTB/SmolLM2-135M": _SMOLLM2_135M,
    "HuggingFaceTB/SmolLM2-360M": _llama(960, 15, 5, 2560, 32, 49152),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(2048, 32, 32, 8192, 24, 49152),
    "Qwen/Qwen2.5-0.5B": _llama(896, 14, 2, 4864, 24, 151936, model_type="qwen2"),
    "Qwen/Qwen3-0.6B": _llama(1024, 16, 8, 3072, 28, 151936, model_type="qwen3", head_dim=128),
}


@dataclass(frozen=True, kw_only=True)
class GeneratorOutline:
    """The facts about a generator that a plan needs."""

    model: nn.Module  # its layers, with the right shapes; the weights may be on the ``meta`` device
    name: str  # for the reader
    max_passage_length: int  # tokens of a passage, with its prompt
    max_query_length: int  # tokens of a query
    optimizer: str  # the optimizer's name
    gradient_checkpointing: bool = False  # whether activations are recomputed
    lora: Mapping[str, Any] | None = None  # arguments of the adapters, if there are any
    prompt_tuning: Mapping[str, Any] | None = None  # settings of the virtual tokens, if there are any
    trainable_patterns: Sequence[str] | None = None  # what is trained, if not everything is

    @property
    def source_length(self) -> int:
        """The maximum number of tokens of the encoder's input, including virtual ones."""
        virtual = 0 if self.prompt_tuning is None else PromptTuning.of(self.prompt_tuning).num_virtual_tokens
        return virtual + self.max_passage_length

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def trained(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def largest(self) -> int:
        return max((p.numel() for p in self.model.parameters() if p.requires_grad), default=0)

    @property
    def blocks(self) -> tuple[int, int]:
        """The weights of the largest part that a strategy gathers by itself, and those outside all blocks."""
        found = [sum(p.numel() for p in block.parameters()) for block in own_blocks(self.model)]
        outside = self.parameters - sum(found)
        return max([outside, *found]), outside

    @classmethod
    def of_settings(
        cls,
        *,
        optimizer: Any,
        pretrained: str | Path | None,
        config: Mapping[str, Any] | None = None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        trainable_patterns: Sequence[str] | None = None,
        lora: Mapping[str, Any] | None = None,
        prompt_tuning: Mapping[str, Any] | None = None,
        max_passage_length: int = 384,
        max_query_length: int = 128,
        gradient_checkpointing: bool = False,
        **others: Any,
    ) -> GeneratorOutline:
        """Return the outline of a `QueryGenerator` with these arguments, without loading any weight.

        A published model that is not in the cache is planned from its known shape, without asking the hub.
        """
        refuse_two_choices({"trainable_patterns": trainable_patterns, "lora": lora, "prompt_tuning": prompt_tuning})
        if pretrained is None and config is None:
            raise ConfigurationError("model.pretrained=null and model.config=null: give one of them.")
        if pretrained is not None:
            shape = config_of_stored(pretrained, known=PUBLISHED)
        elif "vocab_size" in (config or {}):
            shape = config_of_new(config or {}, None)
        else:
            if tokenizer is None:
                raise ConfigurationError(
                    "model.pretrained=null needs model.tokenizer, or a vocab_size in model.config, to be planned."
                )
            shape = config_of_new(config or {}, load_tokenizer(tokenizer, knob="model.tokenizer"))
        with torch.device("meta"):
            model: Any = shaped(shape)
            if gradient_checkpointing:
                enable_checkpointing(model)
            if lora is not None:
                model = with_lora(model, lora)
            if prompt_tuning is not None:
                add_prompt(model, prompt_tuning, None)
        if trainable_patterns is not None:
            freeze_all_but(model, list(trainable_patterns))
        return cls(
            model=model.train(),
            name="a new model" if pretrained is None else str(pretrained),
            max_passage_length=max_passage_length,
            max_query_length=max_query_length,
            optimizer=str(getattr(optimizer, "name", "adam")),
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            prompt_tuning=prompt_tuning,
            trainable_patterns=trainable_patterns,
        )
