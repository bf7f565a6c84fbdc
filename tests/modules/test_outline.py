"""A plan of a model needs its shape alone: no weights, no network, no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_generator import SHAPE, generator, tokenizer

from lit_dpret.errors import ConfigurationError, UnsupportedModelError
from lit_dpret.modules import OptimizerSpec
from lit_dpret.modules.outline import PUBLISHED, GeneratorOutline

#: In millions; the counts of Raffel et al. (2020), section 3.7, to which the paper's "60M, 220M, 770M, 3B" refer.
SIZES = {"google-t5/t5-small": 60.5, "google-t5/t5-base": 222.9, "google-t5/t5-large": 737.7, "google-t5/t5-3b": 2851.6}


def outline(**settings: Any) -> GeneratorOutline:
    return GeneratorOutline.of_settings(optimizer=OptimizerSpec(), **settings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_t5_is_outlined_without_memory_or_a_network(name: str) -> None:
    found = outline(pretrained=name)
    assert all(parameter.is_meta for parameter in found.model.parameters())
    assert name not in SIZES or found.parameters / 1e6 == pytest.approx(SIZES[name], abs=0.05)
    assert found.trained == found.parameters and found.name == name


def test_lora_leaves_few_weights_to_train() -> None:
    whole, adapted = (
        outline(pretrained="google-t5/t5-3b", lora=lora) for lora in (None, {"r": 16, "target_modules": ["q", "v"]})
    )
    assert adapted.trained == adapted.parameters - whole.parameters == 16 * 2 * 72 * (1024 + 4096)


def test_of_a_prompt_its_vectors_are_trained_and_a_plan_reads_no_words_for_them() -> None:
    text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "what people ask"}
    found = outline(pretrained="google-t5/t5-3b", prompt_tuning={"num_virtual_tokens": 50, **text})
    assert found.trained == 50 * 1024 and all(parameter.is_meta for parameter in found.model.parameters())
    with pytest.raises(ConfigurationError, match="both select"):
        outline(pretrained="google-t5/t5-3b", prompt_tuning={}, lora={"r": 2, "target_modules": ["q"]})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"trainable_patterns": [r"^decoder\."]},
        {"lora": {"r": 2, "target_modules": ["q"]}},
        {"prompt_tuning": {"num_virtual_tokens": 3}},
    ],
    ids=["plain", "checkpointing", "decoder only", "lora", "prompt"],
)
def test_an_outline_has_the_names_and_shapes_of_the_generator(settings: dict[str, Any]) -> None:
    given = {"pretrained": None, "config": SHAPE, "tokenizer": tokenizer(), **settings}
    real = generator(**settings).outlined
    paper = outline(**given, max_passage_length=12, max_query_length=8)
    shapes = [
        {name: (tuple(p.shape), p.requires_grad) for name, p in each.model.named_parameters()} for each in (real, paper)
    ]
    assert shapes[0] == shapes[1] and shapes[0]
    assert (real.gradient_checkpointing, real.trained) == (paper.gradient_checkpointing, paper.trained)
    assert (real.max_passage_length, real.max_query_length) == (paper.max_passage_length, paper.max_query_length)
    assert real.source_length == paper.source_length == 12 + (3 if "prompt_tuning" in settings else 0)


def test_what_cannot_be_outlined_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give one of them"):
        outline(pretrained=None)
    with pytest.raises(ConfigurationError, match="vocab_size"):
        outline(pretrained=None, config={"d_model": 8})
    with pytest.raises(UnsupportedModelError, match="nothing is not a folder"):
        outline(pretrained=tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="matches no parameter"):
        outline(pretrained="google-t5/t5-small", trainable_patterns=["no such layer"])
