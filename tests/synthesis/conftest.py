"""A saved generator with a card, a data set that it wrote in one go, and a cross-encoder of random weights.

Nothing changes them, so all tests share them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_generator import PASSAGES, SETTINGS, lively_generator, tokenizer, write_parent_card
from transformers import BertConfig, BertForSequenceClassification

from lit_dpret.synthesis.filters import ReleasedQueries, load_released
from lit_dpret.synthesis.writer import synthesize


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = lively_generator().save_model(tmp_path_factory.mktemp("generator") / "g")
    write_parent_card(folder)
    return folder


@pytest.fixture(scope="session")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(source, PASSAGES, tmp_path_factory.mktemp("whole") / "set", **SETTINGS)


@pytest.fixture(scope="session")
def released(whole: Path) -> ReleasedQueries:
    return load_released(whole)


@pytest.fixture(scope="session")
def cross_encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    words = tokenizer()
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24, num_labels=1, initializer_range=1.0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("cross_encoder")
    BertForSequenceClassification(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
