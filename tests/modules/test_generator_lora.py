"""Low-rank adapters in a generator: what is trained, and what is exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generator import copy_pairs, decoder_only, generator

from lit_dpret.errors import ConfigurationError
from lit_dpret.modules import QueryGenerator

LORA = {"r": 2, "target_modules": ["q", "v"]}


def test_only_adapters_are_trained_and_the_export_has_them_merged_into_its_weights(tmp_path: Path) -> None:
    module = generator(lora=LORA)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    rows = {
        "input_ids": torch.tensor([[5, 6, 7, 1]]), "attention_mask": torch.ones(1, 4, dtype=torch.long),
        "labels": torch.tensor([[8, 9, 1]]),
    }  # fmt: skip
    adapted = module.per_row_loss(rows).detach()
    folder = module.save_model(tmp_path / "generator")
    assert any("lora_" in name for name, _ in module.named_parameters()), "the export left the module as it was"
    exported = generator()
    exported.model = QueryGenerator.load_model(folder).model
    assert not any("lora" in name for name, _ in exported.named_parameters())
    torch.testing.assert_close(exported.per_row_loss(rows).detach(), adapted)
    assert (adapted - generator().per_row_loss(rows).detach()).abs() > 1e-3, "the adapters did something"


def test_adapters_and_patterns_are_not_both_what_is_trained() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.trainable_patterns and model\.lora"):
        generator(lora=LORA, trainable_patterns=[r"^decoder\."])


@pytest.mark.parametrize(
    ("build", "setting", "named"),
    [
        (generator, "modules_to_save", "shared"), (generator, "modules_to_save", "lm_head"),
        (generator, "modules_to_save", "decoder"), (generator, "target_modules", "lm_head"),
        (generator, "target_modules", "shared"), (decoder_only, "modules_to_save", "embed_tokens"),
        (decoder_only, "target_modules", "lm_head"), (decoder_only, "target_modules", "embed_tokens"),
    ],
)  # fmt: skip
def test_one_use_of_a_tied_weight_is_not_trained_alone(build: Callable[..., Any], setting: str, named: str) -> None:
    """The export, where the weight is one, would be another model than was trained."""
    lora: dict[str, Any] = {"r": 2, "target_modules": ["q"] if build is generator else ["q_proj"]}
    lora[setting] = [*lora.get(setting, ()), named]
    with pytest.raises(ConfigurationError, match=rf"model\.lora\.{setting}.*{named}"):
        build(lora=lora)


@pytest.mark.parametrize(
    ("build", "lora"),
    [
        (generator, {"target_modules": ["q"], "lora_bias": True}),
        (decoder_only, {"target_modules": ["q_proj"], "lora_bias": True}),
        (decoder_only, {"target_modules": ["q_proj"], "layer_replication": [[0, 1], [0, 1]]}),
    ],
)
def test_adapters_of_which_no_model_could_be_saved_are_refused_before_they_train(
    build: Callable[..., Any], lora: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.lora"):
        build(lora={"r": 2, **lora})


@pytest.mark.parametrize(
    ("tied", "lora"),
    [
        (False, {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}),
        (True, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}),
    ],
)
def test_an_export_is_the_model_that_was_trained(tmp_path: Path, tied: bool, lora: dict[str, Any]) -> None:
    module = decoder_only(lora={"r": 2, **lora}, tied=tied).eval()
    coins = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=coins)
    rows = module.collate_rows(copy_pairs(3))
    trained = module.per_row_loss(rows).detach()
    module.model = QueryGenerator.load_model(module.save_model(tmp_path / "generator")).model
    torch.testing.assert_close(module.per_row_loss(rows).detach(), trained)
