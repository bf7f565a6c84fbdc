"""A T5 that can write digits: words, and each digit a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import SHAPE, WORDS
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lit_dpret.modules.generator_folder import GeneratorModel
from lit_dpret.modules.optimizers import OptimizerSpec
from lit_dpret.modules.query_generator import QueryGenerator
from lit_dpret.privacy.modes import NoPrivacy


def digit_tokenizer() -> PreTrainedTokenizerFast:
    marks = ["<pad>", "</s>", "<unk>", "generate_query:", *(f"<extra_id_{i}>" for i in range(16))]
    words = [*marks, *"0123456789", *WORDS]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    fast.normalizer = normalizers.Lowercase()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    fast.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=[f"<extra_id_{i}>" for i in range(16)],
    )  # fmt: skip


def digit_module(**settings: Any) -> QueryGenerator:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "privacy": NoPrivacy(), "optimizer": OptimizerSpec(name="adam", lr=0.02), "pretrained": None, "config": SHAPE,
        "tokenizer": digit_tokenizer(), "max_passage_length": 32, "max_query_length": 24, "dropout": 0.0,
    }  # fmt: skip
    return QueryGenerator(**defaults | settings)


@pytest.fixture
def module() -> QueryGenerator:
    return digit_module()


@pytest.fixture
def generator(module: QueryGenerator) -> GeneratorModel:
    return GeneratorModel(module.model.eval(), module.codec, Path())
