"""Random transformers of a few thousand weights, with real tokenizers, built on the fly.

Imported by path through ``conftest.py``; not a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

WORDS = [
    "how", "to", "file", "a", "claim", "does", "flood", "insurance", "cover", "my", "house", "What", "Is", "The",
    "best", "life", "policy", "query:", "passage:", "é",
]  # fmt: skip
TEXTS = [
    "how to file a claim",
    "does flood insurance cover my house",
    "What Is The best life insurance policy",
    "life",
    "unseen words here",
    " ".join(["my house"] * 8),
    "",
]


def tiny_tokenizer(special: bool = True, eos_only: bool = False, **settings: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits at white space; adds [CLS] and [SEP], or one </s> at the end, or nothing."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "[UNK]", "[CLS]", "[SEP]", "</s>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        single = "$A </s>" if eos_only else "[CLS] $A [SEP]"
        names = ["</s>"] if eos_only else ["[CLS]", "[SEP]"]
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(name, vocabulary[name]) for name in names]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="[UNK]", **settings)


def words_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most sixty given words, with [CLS] and [SEP] around a text."""
    names = ["<pad>", "[UNK]", "[CLS]", "[SEP]", *words]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    marks = {"pad_token": "<pad>", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **marks)


def tiny_bert(seed: int = 0, **settings: Any) -> BertModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes["vocab_size"] = 64
    config = BertConfig(max_position_embeddings=48, **{"initializer_range": 0.5, **sizes, **settings})
    return BertModel(config).eval()


def tiny_t5(seed: int = 0, **settings: Any) -> T5EncoderModel:
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8}
    return T5EncoderModel(T5Config(vocab_size=64, **{**sizes, **settings})).eval()
